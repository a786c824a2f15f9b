"""Read Python sources with griffe, which parses them and imports nothing: a config mistake needs no torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import final

import griffe


@final
class _PartOfPackage(griffe.ModuleFinder):
    """Finds only the modules directly in some subpackages: reading all of torch takes ten seconds."""

    def __init__(self, subpackages: tuple[str, ...]) -> None:
        super().__init__()
        self._wanted = [tuple(path.split(".")[1:]) for path in subpackages]

    def submodules(self, module: griffe.Module) -> list[tuple[tuple[str, ...], Path]]:
        """Return the submodules that lead to a wanted subpackage or are directly in one."""
        found = super().submodules(module)
        return [(p, file) for p, file in found if any(p in (w[: len(p)], (*w, p[-1])) for w in self._wanted)]


@cache
def load_module(path: str, *used: str) -> griffe.Module:
    """Return a module, or a package with the modules directly in it; nothing is imported.

    Args:
        path: Its dotted name.
        used: Other parts of the same package that its annotations name.

    Raises:
        ModuleNotFoundError: There is no source for it.
    """
    loader = griffe.GriffeLoader(allow_inspection=False)
    loader.finder = _PartOfPackage((path, *used))
    with griffe.logger.disable():  # about details of a library that it cannot read
        found = loader.load(path, try_relative_path=False)
    assert isinstance(found, griffe.Module)
    return found


def resolve(scope: griffe.Object, name: str) -> griffe.Object | None:
    """Return the object of a name in a scope, or None if its source was not loaded."""
    try:
        return final_object(scope.modules_collection.get_member(scope.resolve(name)))
    except (KeyError, griffe.NameResolutionError):
        return None


def final_object(member: griffe.Object | griffe.Alias) -> griffe.Object | None:
    """Return the object that an import leads to, or None if its source was not loaded."""
    try:
        return member.final_target if isinstance(member, griffe.Alias) else member
    except (griffe.AliasResolutionError, griffe.CyclicAliasError):
        return None
