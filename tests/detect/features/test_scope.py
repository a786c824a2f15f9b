"""What is ill is named by the smallest name that stands for all of it."""

import dataclasses

import numpy as np
import pytest
import torch

from gradwatch.detect.features.scope import affected_modules, module_of
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.probe.parameters import list_parameters
from gradwatch.records import Finding, LayerInfo, Severity

NAMES = (
    "stem.weight",
    "body.0.fc.weight",
    "body.0.fc.bias",
    "body.0.norm.weight",
    "body.1.fc.weight",
    "head.weight",
    "scale",
)


@pytest.fixture
def history() -> History:
    layers = tuple(
        LayerInfo(
            name=name,
            module=name.rpartition(".")[0],
            module_type="Linear",
            shape=(4, 4),
            dtype="float32",
            trainable=name != "head.weight",
            group=0,
        )
        for name in NAMES
    )
    return History(dataclasses.replace(Synthetic(layers=1, steps=1).info, layers=layers))


def name(history: History, *ill: str) -> list[str | None]:
    return [layer for layer, _ in affected_modules(history, np.isin(NAMES, ill), kind="dead-layer")]


def test_one_tensor_has_its_own_name(history):
    assert name(history, "body.1.fc.weight") == ["body.1.fc.weight"]
    assert name(history, "scale") == ["scale"]


def test_a_module_of_which_all_is_ill_has_the_module_s_name(history):
    assert name(history, "body.0.fc.weight", "body.0.fc.bias") == ["body.0.fc"]
    assert name(history, "body.0.fc.weight", "body.0.fc.bias", "body.0.norm.weight") == ["body.0"]
    assert name(history, *NAMES[1:5]) == ["body"]


def test_parts_of_modules_are_named_apart(history):
    assert name(history, "body.0.fc.bias", "body.1.fc.weight") == ["body.0.fc.bias", "body.1.fc.weight"]


def test_everything_that_trains_is_the_whole_run(history):
    assert name(history, *(n for n in NAMES if n != "head.weight")) == [None]
    assert name(history, *NAMES) == [None], "what does not train does not count"


def test_nothing_ill_has_no_name(history):
    assert name(history) == []
    assert name(history, "head.weight") == []


def test_what_was_named_before_is_not_named_again_in_other_words(history):
    known = Finding(code="", kind="dead-layer", layer="body.0", step=0, severity=Severity.WARNING, message="")
    history.findings.append(known)

    assert name(history, "body.0.fc.weight") == [], "it lies inside"
    assert name(history, *NAMES[1:5]) == [], "it lies around"
    assert name(history, "body.1.fc.weight") == ["body.1.fc.weight"]
    assert name(history, *NAMES[1:4]) == ["body.0"], "the same again may be graver now"
    assert name(history, *NAMES) == [None], "the whole run is news"


def test_a_tensor_stands_for_its_module_where_that_has_more(history):
    assert module_of(history, NAMES.index("body.0.fc.bias")) == "body.0.fc"
    assert module_of(history, NAMES.index("stem.weight")) == "stem.weight"
    assert module_of(history, NAMES.index("scale")) == "scale"


def test_a_layer_of_a_recurrent_module_is_named_by_its_tensor():
    model = torch.nn.ModuleDict({"encoder": torch.nn.LSTM(3, 4, num_layers=2), "gate": torch.nn.GRU(4, 4)})
    info = dataclasses.replace(Synthetic(layers=1, steps=1).info, layers=list_parameters(model)[1])

    assert module_of(History(info), 4) == "encoder.weight_ih_l1"
    assert module_of(History(info), 8) == "gate", "it has one layer, and stands for it"
