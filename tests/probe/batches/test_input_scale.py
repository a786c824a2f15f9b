"""A loop that hands no batches over is told all the same that its model is given the same samples again and again."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch.probe.inert_hook import InertHook

X = torch.randn(640, 6, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class Named(nn.Linear):
    """A model that wants its inputs by name."""

    def forward(self, *, x):
        return super().forward(x)


class Parts(nn.ModuleDict):
    """A model of parts, of which the loop calls one after the other."""

    def __init__(self, **others):
        super().__init__({"first": nn.Linear(6, 4), "second": nn.Linear(4, 1), **others})


def one_after_the_other(model, x):
    return model["second"](model["first"](x))


def with_another(other):
    """Return a call of a model whose third part is given something else."""
    return lambda model, x: one_after_the_other(model, x) + model["other"](other()).mean()


def train(rows_of, *, model=None, call=lambda model, x: model(x), hands_over=False, steps=40):
    """Train on the rows of each step, and return the kinds of what was found and the hooks that are left."""
    torch.manual_seed(0)
    model = model or nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with gradwatch.watch(model, optimizer) as monitor:
        for step in range(steps):
            rows = rows_of(step)
            loss = F.mse_loss(call(model, X[rows]), Y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, **({"batch": X[rows]} if hands_over else {}))
    assert not model._forward_pre_hooks
    assert sum(event.kind == "inputs-alike" for event in monitor.history.events) <= 1
    return [(finding.kind, finding.step) for finding in monitor.findings()]


def first(step):
    return torch.arange(32)


def shuffled(step):
    return torch.randperm(32, generator=torch.Generator().manual_seed(step))


def in_order(step):
    return torch.arange(32) + 32 * (step % 10)


def test_the_same_rows_are_found_in_any_order():
    assert train(first) == [("constant-batch", 10)]
    assert train(shuffled) == [("constant-batch", 30)]


def test_inputs_that_are_given_by_name_are_seen():
    assert train(first, model=Named(6, 1), call=lambda model, x: model(x=x)) == [("constant-batch", 10)]


def test_parts_that_a_loop_calls_are_seen_where_the_model_is_not_called():
    assert train(first, model=Parts(), call=one_after_the_other) == [("constant-batch", 15)]
    assert train(in_order, model=Parts(), call=one_after_the_other) == []


def test_of_several_inputs_one_that_is_always_made_anew_is_reported_and_no_grid_nor_all_the_items():
    noise, items, grid = (lambda: torch.randn(32, 6)), torch.randn(64, 6), torch.linspace(0, 1, 64)[:, None]
    six, one = ({"other": nn.Linear(size, 1)} for size in (6, 1))
    assert train(first, model=Parts(**six), call=with_another(noise)) == [("constant-batch", 15)]
    assert train(in_order, model=Parts(**six), call=with_another(lambda: items)) == []
    assert train(in_order, model=Parts(**one), call=with_another(grid.clone)) == []


def test_an_epoch_that_nobody_shuffles_is_none_of_it():
    assert train(in_order) == []


@pytest.mark.parametrize("rows", [75, 512])
def test_what_may_be_all_the_data_is_for_information_or_not_looked_at(rows):
    assert train(lambda step: torch.arange(rows), steps=31) == ([("constant-batch", 10)] if rows < 256 else [])


def test_the_points_of_a_grid_are_all_there_is():
    grid = torch.cartesian_prod(torch.linspace(0, 1, 8), torch.linspace(0, 1, 8))
    assert train(lambda step: torch.arange(64), model=nn.Linear(2, 1), call=lambda model, x: model(grid)) == []


def test_a_batch_that_is_handed_over_is_reported_once():
    assert train(first, hands_over=True) == [("constant-batch", 5)]


def test_a_copy_of_the_model_is_not_looked_at():
    model = nn.Linear(6, 1)
    with gradwatch.watch(model, torch.optim.SGD(model.parameters(), 0.01)):
        kept, copied = (
            [isinstance(hook, InertHook) for hook in it._forward_pre_hooks.values()]
            for it in (model, copy.deepcopy(model))
        )
    assert any(kept)
    assert not any(copied)
