"""Which names each section of a config may use, forgiving of case and underscores, and where their source lies."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import final

from gradwatch.config import signatures
from gradwatch.config.signatures import Signature
from gradwatch.config.source import load, locate

PACKAGE = Path(__file__).parents[1]

_MANY = 30
"""A message names at most so many; of more it says where to see them."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One name that a config may use.

    Args:
        name: The name as it is stored.
        read: Reads its signature.
        aliases: Other names for it, such as the code of a detector.
    """

    name: str
    read: Callable[[], Signature]
    aliases: tuple[str, ...] = ()


@final
class Catalogue:
    """The names of one section.

    Args:
        noun: What one is called, such as `optimizer`.
        plural: What `gradwatch list` calls them.
        own: Returns those of gradwatch itself.
        library: Returns those of torch or torchvision.
        suffix: Ending that may be left out, such as `Loss`.
    """

    def __init__(
        self,
        noun: str,
        plural: str,
        *,
        own: Callable[[], Iterator[Entry]] = lambda: iter(()),
        library: Callable[[], Iterator[Entry]] = lambda: iter(()),
        suffix: str = "",
    ) -> None:
        self.noun = noun
