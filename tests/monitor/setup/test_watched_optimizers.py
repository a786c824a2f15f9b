"""A second monitor of one optimizer is a mistake that the loop is told of."""

import warnings

import pytest
import torch
from torch import nn

import gradwatch


@pytest.fixture
def made():
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_second_monitor_is_told(made):
    with gradwatch.watch(*made, on_finding=None), pytest.warns(RuntimeWarning, match=r"call watch\(\) once"):
        gradwatch.watch(*made, on_finding=None).close()


def test_one_after_the_other_is_not(made):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            gradwatch.watch(*made, on_finding=None).close()
        with gradwatch.watch(*made, on_finding=None):
            other = nn.Linear(3, 1)
            gradwatch.watch(other, torch.optim.SGD(other.parameters(), lr=0.1), on_finding=None).close()

    assert told == []
