"""What changes weights or moments between two updates is noticed at its step, and updates themselves are not."""

import torch
from torch import nn

from gradwatch.monitor.ranks.changes import MAX_EVENTS, ChangeWatch


def train(steps, between, *, dtype=torch.float32):
    """Train, call a function before each step, and return the kinds and steps of the events."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    model.register_parameter("scale", nn.Parameter(torch.ones(1, dtype=dtype)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    events = []
    watch = ChangeWatch(optimizer, events.append)
    hooks = watch.attach(0)
    for step in range(steps):
        between(step, model, optimizer)
        (model(torch.randn(6, 4)) * model.scale).square().mean().backward()
        watch.compare()
        optimizer.step()
        optimizer.zero_grad()
        watch.step += 1
    for hook in hooks:
        hook.remove()
    optimizer.load_state_dict(optimizer.state_dict())  # no longer observed
    return [(event.kind, event.step, dict(event.values)) for event in events]


def test_a_training_without_changes_has_no_event():
    assert train(5, lambda *_: None) == []


def test_a_change_of_two_parameters_is_dated_by_the_next_step():
    def change(step, model, optimizer):
        if step == 3:
            model[0].weight.data.mul_(1.1)
            with torch.no_grad():
                model[2].bias.add_(1)

    assert train(5, change) == [("rank-weights-changed", 3, {"parameters": 2.0})]


def test_a_weight_that_is_nan_has_not_changed():
    def spoil(step, model, optimizer):
        if step == 1:
            with torch.no_grad():
                model[0].weight.fill_(torch.nan)

    assert train(5, spoil) == [("rank-weights-changed", 1, {"parameters": 1.0})]


def test_changes_of_weights_of_several_formats_are_counted():
    def change(step, model, optimizer):
        if step == 3:
            with torch.no_grad():
                model[0].weight.mul_(1.1)

    assert train(5, change, dtype=torch.float64) == [("rank-weights-changed", 3, {"parameters": 1.0})]


def test_storages_stay_resizable():
    model = nn.Linear(2, 1)

    ChangeWatch(torch.optim.SGD(model.parameters(), lr=0.1), print).attach(0)

    assert model.weight.untyped_storage().resizable()


def test_a_state_that_the_optimizer_loads_is_dated_by_the_next_step():
    def load(step, model, optimizer):
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())

    assert train(5, load) == [("rank-optimizer-loaded", 2, {})]


def test_a_loop_that_bounds_its_weights_makes_few_events():
    def bound(step, model, optimizer):
        with torch.no_grad():
            model[2].weight.mul_(0.9)

    assert len(train(20, bound)) == MAX_EVENTS
