"""Functions that drop or normalise by the batch in evaluation mode are seen, and whoever looks on changes nothing."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradwatch


class Net(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.body, self.head = Body(between), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(x))


class Body(nn.Module):
    def __init__(self, between):
        super().__init__()
        self.linear, self.between, self.drop = nn.Linear(8, 8), between, nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))

    def forward(self, x):
        return self.between(self, self.linear(x))


def attend(module, x):
    q = x[None, None]
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)[0, 0]


ACTIVE = {
    "dropout": lambda _, x: F.dropout(x, 0.5),
    "dropout without a probability": lambda _, x: F.dropout(x),
    "dropout that is said to train": lambda _, x: F.dropout(x, p=0.1, training=True),
    "attention": attend,
    "batch normalisation": lambda m, x: F.batch_norm(x, m.mean, m.var, training=True),
}
QUIET = {
    "dropout that knows the mode": lambda m, x: F.dropout(x, 0.5, m.training),
    "dropout as a module": lambda m, x: m.drop(x),
    "dropout of nothing": lambda _, x: F.dropout(x, 0.0),
    "statistics of the batch, where there are no others": lambda _, x: F.batch_norm(x, None, None, training=True),
    "noise": lambda _, x: x + torch.randn_like(x),
}


def trained(model, *, watched=True, samples=1):
    """Return the losses of a training that is validated three times, and what was found."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses, found = [], ()
    watcher = gradwatch.watch(model, optimizer) if watched else None
    held_out = torch.randn(16, 8)
    for step in range(60):
        model.train()
        loss = F.cross_entropy(model(torch.randn(16, 8)), torch.arange(16) % 3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = None
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                value = sum(F.cross_entropy(model(held_out), torch.arange(16) % 3) for _ in range(samples)) / samples
        losses += [loss.item()] + ([value.item()] if value is not None else [])
        if watcher:
            watcher.step(loss, val_loss=value)
    if watcher:
        found = tuple((f.layer, str(f.severity)) for f in watcher.findings() if f.kind == "train-eval-mismatch")
        watcher.close()
    return losses, found


def made(between):
    torch.manual_seed(0)
    return Net(between)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_function_that_is_active_in_evaluation_is_found_in_the_module_that_calls_it(name):
    assert trained(made(ACTIVE[name]))[1] == (("body", "warning"),)


@pytest.mark.parametrize("name", QUIET)
def test_what_knows_the_mode_is_quiet(name):
    assert trained(made(QUIET[name]))[1] == ()


def test_several_passes_over_the_same_inputs_are_for_information():
    assert trained(made(ACTIVE["dropout"]), samples=4)[1] == (("body", "info"),)


@pytest.mark.parametrize("name", [*ACTIVE, *QUIET])
def test_losses_and_validations_are_the_same_to_the_last_bit(name):
    between = {**ACTIVE, **QUIET}[name]
    assert trained(made(between))[0] == trained(made(between), watched=False)[0]


def test_an_evaluation_that_raises_ends_the_look_and_leaves_no_hook():
    model = made(lambda m, x: F.dropout(x, 0.5))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer) as watcher:
        for value in (1.0, 0.9):
            F.cross_entropy(model(torch.randn(4, 8)), torch.zeros(4, dtype=torch.long)).backward()
            optimizer.step()
            watcher.step(1.0, val_loss=value)
        model.eval()
        with torch.no_grad(), pytest.raises(RuntimeError, match="shapes"):
            model(torch.randn(4, 5))
        assert not torch._C._len_torch_function_stack(), "nobody looks on any more"
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_models_with_code_of_their_own_for_evaluation_are_left_alone():
    class Attending(Net):
        def __init__(self):
            super().__init__(ACTIVE["dropout"])
            self.attention = nn.MultiheadAttention(8, 2)

    assert trained(Attending())[1] == ()


@pytest.mark.parametrize(("factor", "offset", "is_told"), [(255.0, 0.0, True), (1.0, 3.0, True), (1.2, 0.1, False)])
def test_validation_inputs_of_another_scale_are_reported(factor, offset, is_told):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    with gradwatch.watch(model, optimizer) as monitor:
        for step in range(40):
            model.train()
            inputs = torch.randn(32, 8)
            loss = (model(inputs) - inputs[:, :1]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            model.eval()
            with torch.no_grad():
                held_out = torch.randn(32, 8)
                outputs = model(factor * held_out + offset)
            val_loss = (outputs - held_out[:, :1]).square().mean() if step % 10 == 9 else None
            monitor.step(loss, val_loss=val_loss)

    told = [event for event in monitor.history.events if event.kind == "inputs-differ"]
    assert bool(told) is is_told
    if told:
        (event,) = told
        assert event.values["shift"] == pytest.approx(offset, abs=0.3 * factor)
        assert event.values["log of spread"] == pytest.approx(math.log(factor), abs=0.2)
