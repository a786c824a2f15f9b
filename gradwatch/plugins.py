"""Find plugins: own modules by name, classes of other packages by entry point, and the user's code by target."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from gradwatch.errors import GradwatchError, did_you_mean, raised


def names(package: str) -> tuple[str, ...]:
    """Return the sorted names of the public modules in a package, without importing the modules.

    Args:
        package: Dotted name, such as `gradwatch.models`. Only the package itself is imported.
    """
    path = importlib.import_module(package).__path__
    return tuple(sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_")))


def load(package: str, name: str) -> ModuleType:
    """Import one module of a package. The name must be one of `names(package)`."""
    return importlib.import_module(f"{package}.{name}")


def entry_points(group: str) -> tuple[Any, ...]:
    """Load the objects that installed packages register in an entry point group, such as `gradwatch.detectors`."""
    return _entry_points(group, tuple(sys.path))


@functools.cache
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[Any, ...]:
    # the metadata of some hundred packages take 50 ms to read, and a folder that joins the path may bring more
    return tuple(point.load() for point in importlib.metadata.entry_points(group=group))


def target(name: str, *, key: str) -> Callable[..., Any]:
    """Import the user's function or class from `package.module:factory`.

    Args:
        name: Target as written in the config.
        key: Config key of the target, such as `model.target`.

    Raises:
        GradwatchError: The module cannot be imported, lacks the attribute, or the attribute is not callable.
    """
    # the `gradwatch` script, unlike `python -m`, does not put the current folder on the path
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    # without a colon, the attribute is empty and is reported below as missing
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if f"{module_name}.".startswith(f"{error.name}."):  # the target itself, not a module that it imports
            raise GradwatchError(
                f"{key}: '{name}' does not import: {error}; expected package.module:factory, on the Python path "
                "or below the folder that gradwatch runs in"
            ) from error
        raise GradwatchError(f"{key}: '{name}' does not import: {raised(error)}") from error
    except Exception as error:  # an import runs the user's code, which may raise anything
        raise GradwatchError(f"{key}: '{name}' does not import: {raised(error)}") from error
    if not hasattr(module, attribute):
        hint = did_you_mean(attribute, vars(module))
        raise GradwatchError(f"{key}: module '{module_name}' has no '{attribute}'{hint}")
    found: Callable[..., Any] = getattr(module, attribute)
    if not callable(found):
        raise GradwatchError(f"{key}: '{name}' is a {type(found).__name__}, expected a function or a class")
    return found
