"""Hold what a check of gradients is asked to do."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import final


def tell_nobody(text: str) -> None:
    """Do nothing: nobody watches the progress."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of a check.

    Args:
        layer: Prefix of the names of the parameters to check, or None for all.
        allow: Names of custom Functions whose backward differs from the derivative on purpose.
        within: Time in seconds.
        second: Whether the second derivatives of custom Functions are checked too.
        progress: Takes a text before each direction.
    """

    layer: str | None = None
    allow: Collection[str] = ()
    within: float = 60.0
    second: bool = False
    progress: Callable[[str], None] = tell_nobody
