"""Everything that a config may name, found by reading folders and sources: MODELS, DATA, OPTIMIZERS and so on."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from gradwatch.config import signatures
from gradwatch.config.signatures import Signature
from gradwatch.config.source import load, locate
from gradwatch.config.vocabulary import Entry, Vocabulary

PACKAGE = Path(__file__).parents[1]

GIVEN_BY_HARNESS = {
    "model": ("spec", "name", "progress"),
    "dataset": ("name", "train"),
    "optimizer": ("params",),
    "schedule": ("optimizer", "last_epoch"),
    "loss": ("size_average", "reduce", "device", "dtype"),  # the first two are deprecated spellings of `reduction`
    "transform": (),
    "detector": (),
    "sink": ("config_text", "console", "directory", "hparams", "log_format", "purge_step", "run_dir"),
}
"""Parameters that no config sets, by what they are parameters of."""

FILLED_IN = {"CosineAnnealingLR": "T_max"}
"""Parameters without default that the harness fills in with the length of the run where a config leaves them out."""

TYPES: dict[str, dict[str, Any]] = {
    "transform": {"transforms": list[Any]},  # checked as transforms themselves
    "loss": {"reduction": Literal["mean", "sum"]},  # a step needs one number as its loss
}
"""Types of parameters that say more or less than their annotations, by what they are parameters of."""

UNUSABLE = {
    "CutMix": "mixes the samples of a batch, and a transform sees one of them",
    "MixUp": "mixes the samples of a batch, and a transform sees one of them",
    "PhotoTour": "needs a setting called 'name', which here is that of the dataset",
}
"""What cannot work from a config, and why, beside what its signature tells."""

DEPRECATED = ("NLLLoss2d",)


@cache
def _plugins(folder: Path, noun: str) -> tuple[Entry, ...]:
    """Return the files of a folder that have a function `build`."""
    return tuple(
        Entry(name=path.stem, read=partial(_read, path, "build", noun, called=path.stem), is_own=True)
        for path in _files(folder)
        if any(isinstance(node, ast.FunctionDef) and node.name == "build" for node in load(path).tree.body)
    )


@cache
def _detectors(folder: Path) -> tuple[Entry, ...]:
    """Return the detectors in a folder and those that other packages offer as entry points, in the order of codes."""
    made = [_detector(path, node, is_own=True) for path in _files(folder) for node in _classes(path)]
    for point in importlib.metadata.entry_points(group="gradwatch.detectors"):
        path = locate(point.module)
        found = load(path).find(point.attr) if path else None
        if found and isinstance(found[1], ast.ClassDef):
            made.append(_detector(found[0].path, found[1], is_own=False))
    return tuple(sorted(filter(None, made), key=lambda entry: entry.aliases))


def _detector(path: Path, node: ast.ClassDef, *, is_own: bool) -> Entry | None:
    """Return the entry of a detector's class, or None for a class that is none."""
    texts = signatures.constants(node)
    if not {"code", "kind"} <= texts.keys():
        return None
    read = partial(_read, path, node.name, "detector", called=texts["kind"])
    return Entry(name=texts["kind"], read=read, aliases=(texts["code"],), is_own=is_own)


@cache
def _sinks(folder: Path) -> tuple[Entry, ...]:
    """Return the files of a folder with a class that has the methods of a sink."""
    return tuple(
        Entry(name=_sink_name(path), read=partial(_read, path, node.name, "sink", called=_sink_name(path)), is_own=True)
        for path in _files(folder)
        for node in _classes(path)
        if {"write", "report", "close"} <= {m.name for m in node.body if isinstance(m, ast.FunctionDef)}
    )


def _sink_name(path: Path) -> str:
    name = path.parent.name if path.stem == "sink" else path.stem
    return "html" if name == "report" else name


@cache
def _torchvision_models(wrapper: Path) -> tuple[Entry, ...]:
    """Return the classification models that torchvision registers by decorating their builders."""
    return tuple(
        Entry(name=node.name, read=partial(_wrapped, path, node.name, "model", wrapper))
        for path in _taken_whole(locate("torchvision.models"))
        for node in load(path).tree.body
        if isinstance(node, ast.FunctionDef) and any("register_model" in ast.unparse(d) for d in node.decorator_list)
    )


@cache
def _torchvision_datasets(wrapper: Path) -> tuple[Entry, ...]:
    return tuple(
        Entry(name=name, read=partial(_wrapped, path, name, "dataset", wrapper))
        for name, path in _imported("torchvision.datasets")
        if name[0].isupper() and name != "VisionDataset"  # the base of all others
    )


@cache
def _imported_classes(module: str, noun: str, *, base: str) -> tuple[Entry, ...]:
    """Return the classes that a package takes from its own files, but for the base of them all."""
    return tuple(
        Entry(name=name, read=partial(_read, path, name, noun))
        for name, path in _imported(module)
        if name[0].isupper() and name != base and path.is_relative_to(_folder(module))
    )


@cache
def _listed_classes(module: str, noun: str, *, base: str = "") -> tuple[Entry, ...]:
    """Return the classes in the `__all__` of the module that defines them, but for the base of them all."""
    path = locate(module)
    found = load(path).find("__all__") if path else None
    if not path or not found or not isinstance(found[1], ast.List):
        return ()
    names = [name for name in ast.literal_eval(found[1]) if name not in (base, *DEPRECATED)]
    return tuple(Entry(name=name, read=partial(_read, path, name, noun)) for name in names)


def _read(path: Path, name: str, noun: str, *, called: str = "") -> Signature:
    """Return the signature as far as a config is concerned."""
    hidden, types = GIVEN_BY_HARNESS[noun], TYPES.get(noun, {})
    signature = signatures.read(load(path), name, called=called, hidden=hidden, types=types)
    parameters = tuple(replace(p, required=p.required and FILLED_IN.get(name) != p.name) for p in signature.parameters)
    reason = signature.unusable or UNUSABLE.get(name, "")
    inputs = signatures.inputs(load(path), name) if noun == "loss" else ()
    if len(inputs) > 2:
        reason = f"takes {len(inputs)} inputs ({', '.join(inputs)}), but a model has outputs and targets to give"
    return replace(signature, parameters=parameters, unusable=reason)


def _wrapped(path: Path, name: str, noun: str, wrapper: Path) -> Signature:
    """Return the signature of something of torchvision's, with the settings that our builder of it adds."""
    signature = _read(path, name, noun)
    if not wrapper.is_file():
        return signature
    added = _read(wrapper, "build", noun).parameters
    names = {p.name for p in added}
    return replace(signature, parameters=(*added, *(p for p in signature.parameters if p.name not in names)))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if not path.name.startswith("_"))


def _classes(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in load(path).tree.body if isinstance(node, ast.ClassDef))


def _imported(module: str) -> list[tuple[str, Path]]:
    path = locate(module)
    return [(n, p) for n, p in load(path).imported() if n[0] != "_"] if path else []


def _taken_whole(path: Path | None) -> Iterator[Path]:
    """Yield the files of which a file imports everything, and those of which they do."""
    for name, inner in load(path).imported() if path else ():
        if name == "*":
            yield inner
            yield from _taken_whole(inner)


def _folder(module: str) -> Path:
    path = locate(module)
    assert path, "only called with a module that was found"
    return path.parent


MODELS = Vocabulary(
    noun="model",
    plural="models",
    own=lambda: _plugins(PACKAGE / "models", "model"),
    library=lambda: _torchvision_models(PACKAGE / "models" / "_torchvision.py"),
    library_noun="a classification model of torchvision",
)
DATA = Vocabulary(
    noun="dataset",
    plural="data",
    own=lambda: _plugins(PACKAGE / "data", "dataset"),
    library=lambda: _torchvision_datasets(PACKAGE / "data" / "_torchvision.py"),
    library_noun="a dataset of torchvision",
)
TRANSFORMS = Vocabulary(
    noun="transform",
    plural="transforms",
    library=lambda: _imported_classes("torchvision.transforms.v2", "transform", base="Transform"),
    library_noun="a class of torchvision.transforms.v2",
)
OPTIMIZERS = Vocabulary(
    noun="optimizer",
    plural="optimizers",
    library=lambda: _imported_classes("torch.optim", "optimizer", base="Optimizer"),
)
SCHEDULES = Vocabulary(
    noun="schedule",
    plural="schedules",
    library=lambda: _listed_classes("torch.optim.lr_scheduler", "schedule", base="LRScheduler"),
    suffix="LR",
)
LOSSES = Vocabulary(
    noun="loss",
    plural="losses",
    library=lambda: _listed_classes("torch.nn.modules.loss", "loss"),
    suffix="Loss",
)
DETECTORS = Vocabulary(noun="detector", plural="detectors", own=lambda: _detectors(PACKAGE / "detect"))
SINKS = Vocabulary(noun="sink", plural="sinks", own=lambda: _sinks(PACKAGE / "render"))

ALL = (MODELS, DATA, TRANSFORMS, OPTIMIZERS, SCHEDULES, LOSSES, DETECTORS, SINKS)
