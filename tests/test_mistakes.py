"""Each mistake that a check can name has a code of its own, which stands in its text and its JSON."""

from collections import Counter

import pytest
import torch
from gradient_cases.every_case import CASES
from torch import nn

import gradwatch
from gradwatch.detect import detectors
from gradwatch.mistakes import IN_GRADIENTS, MISTAKES, code_of, page_of


def test_codes_are_unique():
    codes = Counter([m.code for m in MISTAKES.values()] + [d.code for d in detectors()])

    assert [code for code, count in codes.items() if count > 1] == []
    assert not set(MISTAKES) & {d.kind for d in detectors()}


def test_every_kind_that_is_named_has_a_code():
    assert {case.kind for case in CASES if case.kind} <= set(IN_GRADIENTS)


def test_an_unknown_mistake_has_neither_code_nor_page():
    assert (code_of("nonsense"), page_of("nonsense")) == (None, None)


class Doubled(torch.autograd.Function):
    """The identity with a gradient of 2."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


@pytest.mark.filterwarnings("ignore")
def test_the_code_stands_in_the_text_and_in_the_json():
    model = nn.Linear(4, 2)

    found = gradwatch.check(lambda x: Doubled.apply(model(x)).square().mean(), torch.randn(8, 4), model=model)

    assert "is 2 times too large (GW801)" in str(found)
    assert [fault["code"] for fault in found.to_json()["faults"]] == ["GW801"]
