"""Modules side by side are found where they are alike and none lies behind another."""

import pytest
import torch
from torch import nn

from gradwatch.probe.graph.reader import Tape
from gradwatch.probe.parameters import describe

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Parts(nn.Module):
    """Some modules, of which the output is the sum, or each the input of the next."""

    def __init__(self, *, chained, sizes=(8, 8, 8)):
        super().__init__()
        self.parts = nn.ModuleList(nn.Sequential(nn.Linear(8, n), nn.ReLU(), nn.Linear(n, 8)) for n in sizes)
        self.chained = chained

    def forward(self, x):
        if not self.chained:
            return sum(part(x) for part in self.parts)
        for part in self.parts:
            x = x + part(x)
        return x


def side_by_side(model):
    """Return what the tape of a loss says stands side by side."""
    events = Tape(model, *describe(model)).read(model(X).square().mean(), step=0)
    return [(event.layer, event.values) for event in events if event.kind == "tape-side-by-side"]


def test_experts_stand_side_by_side():
    assert side_by_side(Parts(chained=False)) == [("parts", {"modules": 3.0})]


def test_blocks_with_shortcuts_lie_behind_one_another():
    assert side_by_side(Parts(chained=True)) == []


@pytest.mark.parametrize("sizes", [(8, 8), (8, 8, 4)], ids=["two", "one of another size"])
def test_fewer_than_three_that_are_alike_are_no_group(sizes):
    assert side_by_side(Parts(chained=False, sizes=sizes)) == []
