"""Define the options and the target of a check of gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

TargetKind = Literal["layer", "config", "run", "script"]


def ignore_progress(text: str) -> None:
    """Ignore the progress."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The options of a check.

    Args:
        layer: Prefix of the names of the parameters to check, or None for all.
        allow: Names of custom Functions whose backward differs from the derivative on purpose.
        within: Time in seconds.
        second: Whether the second derivatives of custom Functions are checked too.
        progress: Called with a text before each direction.
    """

    layer: str | None = None
    allow: Collection[str] = ()
    within: float = 60.0
    second: bool = False
    progress: Callable[[str], None] = ignore_progress


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CheckTarget:
    """The target that the command line names.

    Args:
        text: A path, or `package.module:Layer` with its arguments if it needs any: `package.module:Layer(16)`.
        kind: Kind of the target.
        inputs: Shape of each input of a layer, such as `8x16`; `8x16:100` for integers below 100.
        overrides: Changed settings of a config.
        step: Step of a run, or None for the one after the newest checkpoint.
        arguments: Arguments of a script.
    """

    text: str
    kind: TargetKind
    inputs: Sequence[str] = ()
    overrides: Sequence[str] = ()
    step: int | None = None
    arguments: Sequence[str] = ()

    @property
    def path(self) -> Path:
        """The target as a path."""
        return Path(self.text).expanduser()
