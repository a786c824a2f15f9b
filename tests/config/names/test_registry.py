"""What can be named: in a small package made here, in torch, in torchvision, and in gradwatch itself."""

import dataclasses
import inspect

import pytest

from gradwatch import plugins
from gradwatch.config.names import registry
from gradwatch.config.names.yaml_types import Unwritable
from gradwatch.config.sections.base import Section
from gradwatch.config.wording import settings
from gradwatch.render import SINKS


def names(vocabulary):
    return [e.name for e in vocabulary.own()]


def test_a_plugin_is_a_public_file_with_a_function_build(package):
    (package / "models" / "notes.py").write_text("TEXT = 'no build here'\n")

    assert names(registry.MODELS) == ["cnn", "mlp"], "neither notes nor _parts"


def test_a_detector_is_a_class_with_a_code_and_a_kind(package):
    (entry,) = registry.DETECTORS.own()

    assert (entry.name, entry.aliases) == ("dead-layer", ("GW103",))
    assert [p.name for p in entry.read().parameters] == ["every", "decades"]


def test_a_sink_has_the_settings_of_its_class_that_the_harness_does_not_give(package):
    assert names(registry.SINKS) == ["tensorboard", "terminal"]
    assert [p.name for p in registry.SINKS.find("terminal").read().parameters] == ["every"], (
        "the harness gives the console"
    )


def test_detectors_of_other_packages_are_found_by_their_entry_points(tmp_path, monkeypatch):
    (tmp_path / "others.py").write_text(
        "class Odd:\n    code = 'XX001'\n    kind = 'odd'\n    def __init__(self, x=1): ...\n"
    )
    info = tmp_path / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gradwatch.detectors]\nodd = others:Odd\n")
    monkeypatch.syspath_prepend(tmp_path)

    entry = registry.DETECTORS.find("odd")

    assert entry is not None
    assert not entry.is_own
    assert [p.name for p in entry.read().parameters] == ["x"]


@pytest.mark.parametrize(
    ("vocabulary", "spelling", "name"),
    [
        (registry.OPTIMIZERS, "adamw", "AdamW"),
        (registry.OPTIMIZERS, "sgd", "SGD"),
        (registry.SCHEDULES, "cosine_annealing", "CosineAnnealingLR"),
        (registry.SCHEDULES, "ReduceLROnPlateau", "ReduceLROnPlateau"),
        (registry.LOSSES, "cross_entropy", "CrossEntropyLoss"),
        (registry.LOSSES, "mse", "MSELoss"),
        (registry.DATA, "fashion_mnist", "FashionMNIST"),
        (registry.DATA, "imagefolder", "ImageFolder"),
        (registry.MODELS, "ResNet18", "resnet18"),
        (registry.MODELS, "vit_b_16", "vit_b_16"),
        (registry.TRANSFORMS, "random_horizontal_flip", "RandomHorizontalFlip"),
    ],
)
def test_what_torch_and_torchvision_offer_is_known(vocabulary, spelling, name):
    entry = vocabulary.find(spelling)

    assert entry is not None
    assert entry.name == name


def test_all_classification_models_of_torchvision_are_known():
    from torchvision import models

    ours = {e.name for e in registry.MODELS.library()}

    assert ours == {name for name in models.list_models() if hasattr(models, name)}


def test_every_sink_that_can_be_made_is_known():
    assert set(names(registry.SINKS)) == set(SINKS)


def test_all_transforms_of_torchvision_are_known():
    from torchvision.transforms import v2

    theirs = {n for n, c in vars(v2).items() if isinstance(c, type) and issubclass(c, v2.Transform)} - {"Transform"}

    assert {e.name for e in registry.TRANSFORMS.library()} == theirs


def test_all_losses_and_schedules_of_torch_are_known():
    from torch import nn
    from torch.optim import lr_scheduler

    losses = {n for n in dir(nn) if n.endswith("Loss")}
    schedules = {n for n in lr_scheduler.__all__ if n != "LRScheduler"}

    assert {e.name for e in registry.LOSSES.library()} >= losses - {"AdaptiveLogSoftmaxWithLoss"}
    assert {e.name for e in registry.SCHEDULES.library()} == schedules


@pytest.mark.parametrize(
    ("vocabulary", "name", "reason"),
    [
        (registry.LOSSES, "triplet_margin", "takes 3 inputs"),
        (registry.LOSSES, "ctc", "takes 4 inputs"),
        (registry.SCHEDULES, "lambda", "needs 'lr_lambda'"),
        (registry.TRANSFORMS, "MixUp", "mixes the samples of a batch"),
    ],
)
def test_what_cannot_work_from_a_config_says_why(vocabulary, name, reason):
    assert reason in vocabulary.find(name).read().unusable


def test_a_type_that_is_narrowed_for_losses_is_as_annotated_elsewhere(package):
    (package / "models" / "squeeze.py").write_text("def build(spec, *, reduction: int = 16): ...")

    (reduction,) = registry.MODELS.find("squeeze").read().parameters

    assert reduction.type is int


def test_the_harness_fills_in_how_long_a_cosine_is():
    parameters = {p.name: p for p in registry.SCHEDULES.find("cosine_annealing").read().parameters}

    assert not parameters["T_max"].required
    assert "last_epoch" not in parameters


def test_a_torchvision_dataset_also_takes_the_settings_of_its_wrapper(package):
    parameters = {p.name: p for p in registry.DATA.find("MNIST").read().parameters}

    assert list(parameters) == ["root", "val_split", "download"], "neither name nor train"
    assert not parameters["root"].required, "the wrapper has a default for it"


VOCABULARIES = {"models": registry.MODELS, "optimizers": registry.OPTIMIZERS, "data": registry.DATA}
PLUGINS = [(kind, name) for kind in VOCABULARIES for name in plugins.names(f"gradwatch.{kind}")]


@pytest.mark.parametrize(("kind", "name"), PLUGINS)
def test_every_keyword_of_every_plugin_can_be_set_from_a_config(kind, name):
    build = plugins.load(f"gradwatch.{kind}", name).build
    keywords = [p for p in inspect.signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY]

    signature = VOCABULARIES[kind].find(name).read()

    assert [p.name for p in signature.parameters] == [p.name for p in keywords]
    for read, inspected in zip(signature.parameters, keywords, strict=True):
        assert read.required == (inspected.default is inspect.Parameter.empty)
        assert read.required or read.default == inspected.default
        assert read.doc, f"{name}: the docstring says nothing of {read.name}"


@pytest.mark.parametrize(("kind", "name"), PLUGINS)
def test_no_keyword_of_a_plugin_is_hidden_by_a_setting_of_its_section(kind, name):
    from gradwatch.config.sections.named import DataSection, ModelSection, OptimSection

    section: type[Section] = {"models": ModelSection, "optimizers": OptimSection, "data": DataSection}[kind]
    keywords = inspect.signature(plugins.load(f"gradwatch.{kind}", name).build).parameters

    assert not keywords.keys() & set(settings(section))


def test_every_threshold_of_every_detector_can_be_set_from_a_config():
    from gradwatch.detect import detectors

    for detector in detectors():
        entry = registry.DETECTORS.find(detector.kind)
        assert entry is not None, f"{detector.kind} is not found"
        read = {p.name: p for p in entry.read().parameters}
        fields = {f.name: f for f in dataclasses.fields(detector)}
        assert read.keys() == fields.keys(), detector.kind
        for name, parameter in read.items():
            assert parameter.type is not Unwritable
            assert parameter.default == fields[name].default, f"{detector.kind}.{name}"
