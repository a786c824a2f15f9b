"""List everything that a config may name: MODELS, DATA, OPTIMIZERS and so on."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

import griffe

from gradwatch.config.names.signatures import Signature, read_signature, required_inputs
from gradwatch.config.names.sources import final_object, load_module
from gradwatch.config.names.vocabulary import Entry, Vocabulary
from gradwatch.detect import detector_classes
from gradwatch.render import SINKS as SINK_CLASSES

PACKAGE = "gradwatch"
"""Package with our own models, optimizers and data."""

GIVEN_BY_HARNESS = {
    "model": ("spec", "name", "progress"),
    "dataset": ("name", "train"),
    "optimizer": ("params",),
    "schedule": ("optimizer", "last_epoch"),
    "loss": ("size_average", "reduce", "device", "dtype"),  # the first two are deprecated spellings of `reduction`
    "transform": (),
    "detector": (),
    "sink": ("changed_text", "config_text", "console", "directory", "hparams", "log_format", "purge_step", "run_dir"),
}
"""Parameters that a config cannot set, by kind of function or class."""

FILLED_IN = {"CosineAnnealingLR": "T_max"}
"""Required parameters that the harness sets to the length of the run if a config omits them."""

TYPES: dict[str, dict[str, Any]] = {
    "transform": {"transforms": list[Any]},  # checked as transforms themselves
    "loss": {"reduction": Literal["mean", "sum"]},  # a step needs one number as its loss
}
"""Types of parameters instead of their annotations, by kind of function or class."""

UNUSABLE = {
    "CutMix": "mixes the samples of a batch, and a transform sees one of them",
    "MixUp": "mixes the samples of a batch, and a transform sees one of them",
    "PhotoTour": "needs a setting called 'name', which here is that of the dataset",
}
"""Names that a config cannot use, for a reason that is not in their signatures."""

NOT_OFFERED = ("LRScheduler", "NLLLoss2d", "Optimizer", "Transform", "VisionDataset")
"""Base classes, and a deprecated one."""


@cache
def _plugins(package: str, noun: str) -> tuple[Entry, ...]:
    """Return the modules of a package that have a function `build`."""
    modules = sorted(load_module(package).modules.items())
    return tuple(
        Entry(name=name, read=partial(_read, module.functions["build"], noun, called=name), is_own=True)
        for name, module in modules
        if not name.startswith("_") and "build" in module.functions
    )


def _detectors() -> tuple[Entry, ...]:
    """Return the detectors of this package and of other packages' entry points, sorted by code."""
    entries = [
        Entry(
            name=cls.kind,
            read=partial(_read_class, f"{cls.__module__}:{cls.__name__}", "detector", called=cls.kind),
            aliases=(cls.code,),
            is_own=cls.__module__.startswith(f"{PACKAGE}."),
        )
        for cls in detector_classes()
    ]
    return tuple(sorted(entries, key=lambda entry: entry.aliases))


def _sinks() -> tuple[Entry, ...]:
    return tuple(
        Entry(name=name, read=partial(_read_class, place, "sink", called=name), is_own=True)
        for name, place in sorted(SINK_CLASSES.items())
    )


@cache
def _torchvision_models() -> tuple[Entry, ...]:
    """Return the classification models that torchvision registers by decorating their builders."""
    # from the defining modules: `torchvision.models.alexnet` is a module, which hides the function of that name
    modules = sorted(load_module("torchvision.models").modules.items())
    return tuple(
        Entry(name=name, read=partial(_read, function, "model", wrapper=f"{PACKAGE}.models._torchvision"))
        for _, module in modules
        for name, function in module.functions.items()
        if not function.is_alias and any("register_model" in str(d.value) for d in function.decorators)
    )


@cache
def _classes(module: str, noun: str, *, used: tuple[str, ...] = (), wrapper: str = "") -> tuple[Entry, ...]:
    """Return the classes that a module or package defines and offers.

    Args:
        module: Dotted name.
        noun: Kind of the classes.
        used: Other parts of the same package that annotations name.
        wrapper: Our module that builds them, or empty; its settings are added to theirs.
    """
    return tuple(
        Entry(name=name, read=partial(_read, found, noun, wrapper=wrapper))
        for name, member in load_module(module, *used).members.items()
        if isinstance(found := final_object(member), griffe.Class)
        and found.path.startswith(f"{module}.")  # not the classes that the module imports
        and name[0] != "_"
        and name not in NOT_OFFERED
    )


def _read_class(place: str, noun: str, *, called: str) -> Signature:
    """Return the signature of a class of ours by its place, such as `gradwatch.render.html:Html`."""
    module, _, name = place.partition(":")
    found = final_object(load_module(module)[name])
    assert found, "a class that was imported has a source"
    return _read(found, noun, called=called)


@cache
def _read(found: griffe.Object, noun: str, *, called: str = "", wrapper: str = "") -> Signature:
    """Return the signature that a config sees, with the settings that our builder adds."""
    signature = read_signature(found, called=called, hidden=GIVEN_BY_HARNESS[noun], types=TYPES.get(noun, {}))
    added = _read(load_module(wrapper).functions["build"], noun).parameters if wrapper else ()
    # `added` twice: the first sets the order, the last wins, so the builder's parameters come first and have priority
    by_name = {p.name: p for p in (*added, *signature.parameters, *added)}
    if filled := by_name.get(FILLED_IN.get(found.name, "")):
        by_name[filled.name] = replace(filled, required=False)
    reason = signature.unusable or UNUSABLE.get(found.name, "")
    inputs = required_inputs(found) if noun == "loss" else ()
    if len(inputs) > 2:  # such as TripletMarginLoss
        reason = f"takes {len(inputs)} inputs ({', '.join(inputs)}), but a model has outputs and targets to give"
    return replace(signature, parameters=tuple(by_name.values()), unusable=reason)


MODELS = Vocabulary(
    noun="model",
    plural="models",
    used_in="model.name",
    own=lambda: _plugins(f"{PACKAGE}.models", "model"),
    library=_torchvision_models,
    library_noun="a classification model of torchvision",
)
DATA = Vocabulary(
    noun="dataset",
    plural="data",
    used_in="data.name",
    own=lambda: _plugins(f"{PACKAGE}.data", "dataset"),
    library=lambda: _classes("torchvision.datasets", "dataset", wrapper=f"{PACKAGE}.data._torchvision"),
    library_noun="a dataset of torchvision",
)
TRANSFORMS = Vocabulary(
    noun="transform",
    plural="transforms",
    used_in="data.transform` and `data.augment",
    library=lambda: _classes(
        "torchvision.transforms.v2",
        "transform",
        used=("torchvision.transforms", "torchvision.transforms.v2.functional", "torchvision.tv_tensors"),
    ),
    library_noun="a class of torchvision.transforms.v2",
)
OPTIMIZERS = Vocabulary(
    noun="optimizer",
    plural="optimizers",
    used_in="optim.name",
    own=lambda: _plugins(f"{PACKAGE}.optimizers", "optimizer"),
    library=lambda: _classes("torch.optim", "optimizer"),
    usual=("AdamW", "Adam", "SGD"),
)
SCHEDULES = Vocabulary(
    noun="schedule",
    plural="schedules",
    used_in="schedule.name",
    library=lambda: _classes("torch.optim.lr_scheduler", "schedule"),
    suffix="LR",
)
LOSSES = Vocabulary(
    noun="loss",
    plural="losses",
    used_in="loss.name",
    library=lambda: _classes("torch.nn.modules.loss", "loss"),
    suffix="Loss",
)
DETECTORS = Vocabulary(noun="detector", plural="detectors", used_in="detect", own=_detectors)
SINKS = Vocabulary(noun="sink", plural="sinks", used_in="sinks", own=_sinks)

ALL = (MODELS, DATA, TRANSFORMS, OPTIMIZERS, SCHEDULES, LOSSES, DETECTORS, SINKS)
