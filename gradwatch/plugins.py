"""Find plugins: files by their name in a package of ours, classes of other packages by their entry points."""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
from types import ModuleType
from typing import Any


def names(package: str) -> tuple[str, ...]:
    """Return the public module names in a package, sorted, without importing any of them.

    Args:
        package: Dotted name, such as `gradwatch.models`; only the package itself is imported.
    """
    path = importlib.import_module(package).__path__
    return tuple(sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_")))


def load(package: str, name: str) -> ModuleType:
    """Import one plugin file of a package. The name must be one of `names(package)`."""
    return importlib.import_module(f"{package}.{name}")


def entry_points(group: str) -> tuple[Any, ...]:
    """Return the objects that installed packages offer under an entry point group, such as `gradwatch.detectors`."""
    return tuple(point.load() for point in importlib.metadata.entry_points(group=group))
