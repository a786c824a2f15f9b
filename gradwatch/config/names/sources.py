"""Read Python sources with griffe, which imports nothing, so that a config mistake is found without torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import final

import griffe


@final
class _PartOfPackage(griffe.ModuleFinder):
    """Finds only the modules directly in some subpackages, since reading all of torch takes 10 s."""

    def __init__(self, subpackages: tuple[str, ...]) -> None:
        super().__init__()
        self._wanted = [tuple(path.split(".")[1:]) for path in subpackages]

    def submodules(self, module: griffe.Module) -> list[tuple[tuple[str, ...], Path]]:
        """Return the submodules on the path to a wanted subpackage or directly in one."""
        found = super().submodules(module)
        return [(p, file) for p, file in found if any(p in (w[: len(p)], (*w, p[-1])) for w in self._wanted)]


@cache
def load_module(path: str, *used: str) -> griffe.Module:
    """Load a module, or a package with the modules directly in it, without importing anything.

    Args:
        path: Dotted name of the module.
        used: Other parts of the same package that the module's annotations name.

    Raises:
        ModuleNotFoundError: The module has no source.
    """
    # inspection would import modules without a source
    loader = griffe.GriffeLoader(allow_inspection=False)
    loader.finder = _PartOfPackage((path, *used))
    with griffe.logger.disable():  # it warns about code of a library that it cannot parse
        found = loader.load(path, try_relative_path=False)
    assert isinstance(found, griffe.Module)
    return found


def resolve(scope: griffe.Object, name: str) -> griffe.Object | None:
    """Return the object that a name in a scope refers to, or None if its source was not loaded."""
    try:
        return final_object(scope.modules_collection.get_member(scope.resolve(name)))
    except (KeyError, griffe.NameResolutionError):
        return None


def final_object(member: griffe.Object | griffe.Alias) -> griffe.Object | None:
    """Return the object behind an import, or None if its source was not loaded."""
    try:
        return member.final_target if isinstance(member, griffe.Alias) else member
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None
