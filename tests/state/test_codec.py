"""A state that goes through JSON and tensors comes back with the same types and the same bits."""

import collections
import enum
import json
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from gradwatch.errors import CheckpointError
from gradwatch.state import codec as state_tree

pytestmark = pytest.mark.filterwarnings("ignore:.*support is experimental")
DTYPES = sorted(
    {
        d
        for d in vars(torch).values()
        if isinstance(d, torch.dtype) and not re.search(r"quint|qint|bits|(int|uint)[1-7]$", str(d))
    },
    key=str,
)


def through_text(state):
    data, tensors = state_tree.encode(state)
    text = json.dumps(data, allow_nan=False)
    return state_tree.decode(json.loads(text), {name: t.detach().clone().contiguous() for name, t in tensors.items()})


def bits(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).tolist()


def assert_same(found, expected, place="state"):
    assert type(found) is type(expected), place
    if isinstance(expected, dict):
        assert list(found) == list(expected), f"{place}: keys or their order"
        assert [type(key) for key in found] == [type(key) for key in expected], place
        for key in expected:
            assert_same(found[key], expected[key], f"{place}[{key!r}]")
        assert getattr(found, "default_factory", None) is getattr(expected, "default_factory", None), place
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), place
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{place}[{i}]")
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        assert bits(found) == bits(expected), place
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), place
        assert found.tobytes() == expected.tobytes(), place
    elif isinstance(expected, float):
        assert struct.pack(">d", found) == struct.pack(">d", expected), place
    else:
        assert found == expected, place


def tensor_of(dtype, shape, seed):
    """Return a tensor of any bit pattern."""
    count = math.prod(shape) * torch.empty(1, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    raw = torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
TENSORS = st.builds(tensor_of, st.sampled_from(DTYPES), SHAPES, st.integers(0, 1000))
ARRAYS = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.sampled_from(["<f4", ">f8", "<i8", "u1", "?", "c16", "<f2", "U5", "S3", "M8[s]", "m8[ns]", "f16"]),
    SHAPES,
    st.integers(0, 1000),
)
SCALARS = st.sampled_from([np.float64(0.1), np.float32("nan"), np.int64(-3), np.bool_(True), np.str_("x")])
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), TENSORS, ARRAYS, SCALARS)
KEYS = st.one_of(st.text(max_size=3), st.integers(-3, 3), st.just("!"))


def containers(children):
    mappings = st.dictionaries(KEYS, children, max_size=4)
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        mappings,
        mappings.map(collections.OrderedDict),
        st.dictionaries(KEYS, st.integers()).map(collections.Counter),
    )


@settings(max_examples=300)
@given(st.recursive(LEAVES, containers, max_leaves=12))
def test_any_state_comes_back_exactly(state):
    assert_same(through_text(state), state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (3, 4)])
def test_every_dtype_comes_back_bit_for_bit(dtype, shape):
    tensor = tensor_of(dtype, shape, seed=1)
    assert_same(through_text([tensor]), [tensor])


@pytest.mark.parametrize("value", [0.0, -0.0, math.nan, -math.nan, math.inf, -math.inf, 5e-324, 0.1, 1e308])
def test_floats_come_back_with_every_bit(value):
    assert struct.pack(">d", through_text(value)) == struct.pack(">d", value)


def test_views_come_back_as_their_values():
    base = torch.arange(12.0).reshape(3, 4)
    state = {
        "t": base.t(),
        "row": base[1],
        "step": base[::2],
        "conj": torch.tensor([1 + 2j]).conj(),
        "imag": base.to(torch.complex64).conj().imag,
    }
    assert_same(through_text(state), state)


def test_tied_tensors_are_stored_once_and_come_back_tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    data, tensors = state_tree.encode(model.state_dict())

    assert len(tensors) == 3, "one weight and two biases"
    back = state_tree.decode(json.loads(json.dumps(data)), tensors)
    assert back["0.weight"] is back["1.weight"]


def test_empty_tensors_are_not_taken_for_tied():
    a, b = torch.empty(0), torch.empty(0)
    back = through_text({"a": a, "b": b})
    assert back["a"] is not back["b"]


def test_the_versions_of_modules_survive():
    state = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict()
    back = through_text({"model": state})["model"]
    assert back._metadata == state._metadata
    assert type(back._metadata) is collections.OrderedDict


def test_tensors_are_named_by_their_place():
    _, tensors = state_tree.encode({"model": {"conv.weight": torch.ones(1)}, "optimizer": {0: [torch.ones(1)]}})
    assert list(tensors) == ["model/conv.weight", "optimizer/0/0"]


def test_names_that_collide_or_are_reserved_stay_apart():
    state = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}, "__metadata__": torch.tensor(3)}
    assert_same(through_text(state), state)


OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD", "Adafactor")


@pytest.mark.parametrize("name", [*OPTIMIZERS, "LBFGS"])
def test_the_state_of_every_optimizer_comes_back(name):
    model = nn.Linear(3, 2)
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    state = optimizer.state_dict()
    assert_same(through_text(state), state)


SCHEDULES = {
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [1, 1, 3]},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 5},
    "CosineAnnealingWarmRestarts": {"T_0": 5},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 10},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2},
    "ReduceLROnPlateau": {},
    "LinearLR": {},
    "PolynomialLR": {},
    "ConstantLR": {},
    "LambdaLR": {"lr_lambda": lambda step: 1.0},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_state_of_schedules_comes_back(name):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    schedule = getattr(lr_scheduler, name)(optimizer, **SCHEDULES[name])
    optimizer.step()
    schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    state = schedule.state_dict()
    assert_same(through_text(state), state)


class Colour(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (object(), "a builtins.object"),
        ({1, 2}, "a builtins.set"),
        (Path("x"), "Path"),
        (lambda: 1, "function"),
        (b"x", "a builtins.bytes"),
        (Colour.RED, "Colour"),
        (torch.float32, "dtype"),
        (nn.Parameter(torch.ones(1)), "Parameter"),
        (torch.ones(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (np.array([None]), "dtype object"),
        (np.zeros(1, [("a", "f4")]), "NumPy array of dtype"),
        ({True: 1}, "a key True of type bool, expected str or int"),
        ({(1, 2): 1}, r"a key \(1, 2\) of type tuple"),
        (collections.defaultdict(set), "a collections.defaultdict"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named_by_its_place(value, what):
    with pytest.raises(CheckpointError, match=rf"^state\['optimizer'\]\['state'\]\[0\]\[1\] is or has .*{what}"):
        state_tree.encode({"optimizer": {"state": {0: [1, value]}}})
