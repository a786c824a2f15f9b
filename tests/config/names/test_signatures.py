"""Signatures read from source, compared with what Python itself says of them."""

import dataclasses
import inspect

import pytest

from gradwatch.config.names.signatures import read_signature, required_inputs
from gradwatch.config.names.sources import final_object, load_module
from gradwatch.config.names.yaml_types import UNKNOWN

BASE = '''
class Base:
    """A base.

    Args:
        root: Where files are.
    """
    def __init__(self, root: str, size: int = 3, **kwargs): ...
'''

MAIN = '''
from functools import partial
from .base import Base

EPS = 1e-7

class Inherits(Base):
    """Inherits everything. More is said of it here."""

class Forwards(Base):
    def __init__(self, split: str, **kwargs):
        super().__init__("fixed", **kwargs)

class Loss:
    def __init__(self, weight: Tensor | None = None): ...
    def forward(self, input, target, extra=None): ...

class Inner:
    def __init__(self, block, layers: list[int], num_classes: int = 10, norm: Callable | None = None): ...
    @classmethod
    def of(cls, depth: int, ratio: float = 0.5, **kwargs): ...

def _make(block, layers, progress, **kwargs):
    size = kwargs.pop("image_size", 224)
    norm = kwargs.pop("norm_layer", partial(f))
    return Inner(block, layers, **kwargs)

def resnet(*, progress: bool = True, **kwargs) -> Inner:
    """Build it.

    Args:
        progress (bool, optional): Show a bar
            while it loads.
    """
    Inner.of(depth=3, **kwargs)
    return _make(Block, [1, 2], progress, **kwargs)

def open_ended(**kwargs):
    return elsewhere.make(**kwargs)

def swallows(x: int = 1, **kwargs): ...

def needs(function: Callable, eps: float = EPS, other=None, later: float = compute()): ...
'''


@pytest.fixture
def source(make_package):
    return load_module(make_package({"base.py": BASE, "main.py": MAIN}).name).modules["main"]


def read(module, name, **options):
    """Return the signature of what a module defines or imports by that name."""
    return read_signature(final_object(module[name]), **options)


def names(signature):
    return [p.name for p in signature.parameters]


def test_a_class_without_init_has_that_of_its_base(source):
    signature = read(source, "Inherits")

    assert names(signature) == ["root", "size"], "the base class's parameters, without self"
    assert [p.required for p in signature.parameters] == [True, False]
    assert signature.summary == "Inherits everything."


def test_keywords_that_are_passed_to_the_base_are_those_that_are_not_given(source):
    assert names(read(source, "Forwards")) == ["split", "size"], "root is given by position"


def test_keywords_are_followed_through_functions_class_methods_and_pops(source):
    signature = read(source, "resnet")

    assert names(signature) == ["progress", "ratio", "image_size", "num_classes"]
    assert not signature.is_open
    assert signature.parameters[0].doc == "Show a bar while it loads."
    assert signature.parameters[2].default == 224


def test_keywords_that_go_out_of_sight_leave_a_signature_open(source):
    assert read(source, "open_ended").is_open


def test_keywords_that_go_nowhere_do_not(source):
    signature = read(source, "swallows")

    assert (names(signature), signature.is_open) == (["x"], False)


def test_what_yaml_cannot_say_is_left_out_and_makes_unusable_where_it_is_needed(source):
    signature = read(source, "needs")

    assert names(signature) == ["eps", "other", "later"]
    assert signature.unusable == "needs 'function', which YAML cannot say"


def test_defaults_are_values_where_they_can_be_told(source):
    eps, other, later = read(source, "needs").parameters

    assert (eps.default, other.default, later.default) == (1e-7, None, UNKNOWN)
    assert (eps.shown_default(), other.shown_default(), later.shown_default()) == ("1.0e-07", "null", "compute()")


def test_hidden_parameters_are_not_for_a_config(source):
    assert names(read(source, "Inherits", hidden=("root",))) == ["size"]


def test_a_type_can_be_given_instead_of_the_annotation(source):
    signature = read(source, "needs", types={"function": list})

    assert names(signature)[0] == "function"
    assert not signature.unusable


def test_inputs_of_a_module_are_those_that_forward_must_have(source):
    assert required_inputs(source["Loss"]) == ("input", "target")


def test_fields_of_a_dataclass_are_parameters_but_class_variables_are_not(load_text):
    text = """
from dataclasses import dataclass, field
from typing import ClassVar, final

@dataclass(frozen=True)
class Base:
    every: int = 1

@final
@dataclass(frozen=True)
class Detector(Base):
    kind: ClassVar[str] = "a"
    decades: float = 4.0
    names: list[str] = field(default_factory=list)
    need: int = field(kw_only=True)
"""
    module = load_text(text)

    signature = read(module, "Detector")

    assert {p.name: p.required for p in signature.parameters} == {
        "every": False,
        "decades": False,
        "names": False,
        "need": True,
    }


def optimizers():
    import torch

    return [c for c in vars(torch.optim).values() if isinstance(c, type) and c is not torch.optim.Optimizer]


@pytest.mark.parametrize("cls", optimizers(), ids=lambda c: c.__name__)
def test_reading_an_optimizer_agrees_with_inspecting_it(cls):
    parameters = inspect.signature(cls).parameters

    signature = read(load_module("torch.optim"), cls.__name__)

    assert names(signature) == list(parameters), "same names in the same order"
    for parameter in signature.parameters:
        inspected = parameters[parameter.name].default
        assert parameter.required == (inspected is inspect.Parameter.empty)
        assert parameter.required or parameter.default == inspected


@pytest.mark.parametrize("name", ["CIFAR100", "FashionMNIST", "EMNIST", "FakeData", "ImageFolder", "SVHN"])
def test_every_keyword_that_is_read_of_a_dataset_is_one_that_it_accepts(name):
    from torchvision import datasets

    cls = getattr(datasets, name)
    accepted = {key for base in cls.__mro__ if "__init__" in vars(base) for key in inspect.signature(base).parameters}

    found = set(names(read(load_module("torchvision.datasets"), name)))

    assert found <= accepted
    assert "root" in found or name == "FakeData"


def test_a_torchvision_model_can_be_built_with_the_keywords_that_are_read():
    from torchvision import models

    signature = read(load_module("torchvision.models"), "resnet18")
    defaults = {p.name: p.default for p in signature.parameters}

    model = models.resnet18(**defaults | {"num_classes": 3, "width_per_group": 64})

    assert model.fc.out_features == 3


def test_dataclasses_of_this_project_are_read_as_they_are():
    from gradwatch import records

    signature = read(load_module("gradwatch.records"), "Quantity")

    assert [p.name for p in signature.parameters] == [f.name for f in dataclasses.fields(records.Quantity)]


def test_a_docstring_that_is_assigned_further_down_is_read_too():
    assert read(load_module("torch.optim"), "AdamW").summary.startswith("Implements AdamW algorithm")


def test_the_summary_is_the_first_sentence_without_markup(load_text):
    text = '''
def build():
    """Return a :class:`~torch.nn.Module` of ``depth`` layers, see `ResNet <https://arxiv.org>`_. It has another."""
'''
    module = load_text(text)

    assert read(module, "build").summary == "Return a Module of depth layers, see ResNet."


def test_nothing_is_imported_to_read_a_signature(load_text):
    text = "def build(*, depth: int = 2): ...\nraise RuntimeError\n"
    module = load_text(text)

    assert names(read(module, "build")) == ["depth"]


def test_an_annotation_in_quotes_is_read_like_any_other(load_text):
    module = load_text("def build(*, depth: 'int | None' = 2): ...")

    assert read(module, "build").parameters[0].type == int | None
