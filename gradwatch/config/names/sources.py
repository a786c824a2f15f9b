"""Read Python sources with griffe, which imports nothing, so that a config mistake is found without torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import final

import griffe

SUFFIXES = (".py", ".pyi")


@final
class _PartOfPackage(griffe.ModuleFinder):
    """Finds only the modules directly in some subpackages: to look for all files of torch takes most of a second."""

    def __init__(self, subpackages: tuple[str, ...]) -> None:
        super().__init__()
        self._wanted = [tuple(path.split(".")[1:]) for path in subpackages]

    def submodules(self, module: griffe.Module) -> list[tuple[tuple[str, ...], Path]]:
        """Return the submodules on the path to a wanted subpackage or directly in one."""
        file = module.filepath
        folders = file if isinstance(file, list) else [file.parent] if file.stem == "__init__" else []
        found = {item for folder in folders for parts in self._wanted for item in _modules_around(folder, parts)}
        return sorted(found, key=lambda item: (len(item[0]), item))


def _modules_around(folder: Path, parts: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Path]]:
    """Yield the modules on the path to a part of a package, and those directly in this part, with their files."""
    for depth in range(1, len(parts) + 1):
        yield from _with_file(folder.joinpath(*parts[:depth]), parts[:depth])
    inside = folder.joinpath(*parts)
    names = {entry.stem for entry in inside.iterdir()} - {"__init__"} if inside.is_dir() else set[str]()
    for name in names:
        yield from _with_file(inside / name, (*parts, name))


def _with_file(place: Path, parts: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Path]]:
    """Yield a module with each of its files; a second file has the annotations."""
    files = [place / f"__init__{suffix}" for suffix in SUFFIXES]
    files += [place.with_name(f"{place.name}{suffix}") for suffix in SUFFIXES]
    yield from ((parts, file) for file in files if file.is_file())


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
