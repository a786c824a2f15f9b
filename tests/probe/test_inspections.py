"""Inspections in a whole loop: whatever the loop hands over, free after the first steps, and without a trace."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradwatch
from gradwatch.monitor import Monitor
from gradwatch.probe import inspections as module
from gradwatch.probe.graph import reader
from gradwatch.probe.graph.graph import Graph
from gradwatch.probe.inspections import Inspections
from gradwatch.probe.parameters import list_parameters
from gradwatch.records import RunInfo

STEPS = 12


def make(*last):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3), *last)


def train(model, *, criterion=F.cross_entropy, hand_over=lambda loss: loss, watcher=None, optimizer=None, steps=STEPS):
    """Train, with a validation now and then, and return the losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)  # of the dropout
    losses = []
    for step in range(steps):
        x = torch.randn(8, 6, generator=generator)
        loss = criterion(model(x), torch.arange(8) % 3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if watcher:
            watcher.step(hand_over(loss), batch=x, val_loss=validated(model) if step % 4 == 3 else None)
        elif step % 4 == 3:
            validated(model)
    return losses


def validated(model):
    model.eval()
    with torch.no_grad():
        loss = F.cross_entropy(model(torch.ones(4, 6)), torch.zeros(4, dtype=torch.long))
    model.train()
    return loss


def watched(model, *, criterion=F.cross_entropy, told=None, hand_over=lambda loss: loss):
    """Train under watch, and return the losses and the monitor."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, loss_fn=told) as watcher:
        losses = train(model, criterion=criterion, hand_over=hand_over, watcher=watcher, optimizer=optimizer)
    return losses, watcher


def kinds(watcher):
    return {finding.kind for finding in watcher.findings()}


def test_training_is_the_same_to_the_last_bit():
    plain, model, twin = nn.CrossEntropyLoss(), make(nn.Softmax(1)), make(nn.Softmax(1))
    expected = train(twin, criterion=plain)
    losses, watcher = watched(model, criterion=plain, told=plain)

    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
    assert "probabilities-into-loss" in kinds(watcher), "and yet the graph was read"


@pytest.mark.parametrize("told", [None, F.cross_entropy, nn.CrossEntropyLoss()], ids=["nothing", "function", "module"])
def test_a_loss_is_read_however_it_is_handed_over(told):
    criterion = told or F.cross_entropy
    as_tensor = watched(make(nn.Softmax(1)), criterion=criterion, told=told)[1]
    assert "probabilities-into-loss" in kinds(as_tensor)
    assert "graph-unread" not in {event.kind for event in as_tensor.history.events}

    as_number = watched(make(nn.Softmax(1)), criterion=criterion, told=told, hand_over=lambda loss: loss.item())[1]
    assert ("probabilities-into-loss" in kinds(as_number)) == isinstance(told, nn.Module)
    unread = [event.step for event in as_number.history.events if event.kind == "graph-unread"]
    assert unread == ([] if isinstance(told, nn.Module) else [1]), "it is said that nothing was read"


def test_a_part_of_the_loss_is_not_taken_for_all_of_it():
    """The criterion does not reach what a penalty does."""
    model = nn.ModuleDict({"body": make(), "side": nn.Linear(6, 1)})
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, loss_fn=criterion) as watcher:
        for _ in range(STEPS):
            x = torch.randn(8, 6)
            loss = criterion(model["body"](x), torch.arange(8) % 3) + model["side"](x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watcher.step(loss.item())
    kinds = {event.kind for event in watcher.history.events if event.kind.startswith("graph-")}
    assert kinds == {"graph-chance", "graph-classes"}, "nothing is said to be cut off"


def test_the_name_of_the_loss_stands_in_the_run(tmp_path):
    model = make()
    gradwatch.watch(model, torch.optim.SGD(model.parameters()), run=tmp_path / "run", loss_fn=nn.NLLLoss()).close()
    assert gradwatch.load_run(tmp_path / "run").info.loss == "NLLLoss"

    older = gradwatch.load_run(tmp_path / "run").info.to_json()
    del older["loss"]
    assert RunInfo.from_json(older).loss == "", "a run of an older gradwatch"
    for loss_fn, name in ((F.mse_loss, "mse_loss"), (None, "")):
        with gradwatch.watch(model, torch.optim.SGD(model.parameters()), loss_fn=loss_fn) as watcher:
            assert watcher.history.info.loss == name


def test_after_the_first_steps_no_graph_is_walked(monkeypatch):
    looked = []
    monkeypatch.setattr(reader, "Graph", lambda loss: looked.append(loss.grad_fn.name()) or Graph(loss))
    criterion = nn.CrossEntropyLoss()
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, loss_fn=criterion) as watcher:
        train(model, criterion=criterion, watcher=watcher, optimizer=optimizer, steps=9)
        assert len(looked) >= 3
        assert not criterion._forward_hooks, "nor is the loss function watched any longer"
        looked.clear()
        train(model, criterion=criterion, watcher=watcher, optimizer=optimizer, steps=9)
    assert looked == []


@pytest.mark.parametrize("fails", [False, True])
def test_all_hooks_are_gone_in_the_end(fails):
    model, criterion = make(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        with gradwatch.watch(model, optimizer, loss_fn=criterion) as watcher:
            train(model, criterion=criterion, watcher=watcher, optimizer=optimizer, steps=2)
            assert criterion._forward_hooks
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert not criterion._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(part._forward_pre_hooks for part in model.modules())


def test_neither_graph_nor_batch_is_kept():
    model, criterion = make(nn.Softmax(1)), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, loss_fn=criterion) as watcher:
        x = torch.randn(8, 6)
        loss = criterion(model(x), torch.arange(8) % 3)
        loss.backward()
        optimizer.step()
        watcher.step(loss, batch=x)
        references = [weakref.ref(x), weakref.ref(loss)]
        del x, loss
        gc.collect()
        assert [reference() for reference in references] == [None, None]


def test_what_cannot_be_read_is_said_once_and_training_goes_on(monkeypatch):
    def broken(*_):
        raise RuntimeError("an unheard-of node")

    monkeypatch.setattr(reader, "Graph", broken)
    criterion = nn.CrossEntropyLoss()
    with pytest.warns(RuntimeWarning, match=r"the graph of the loss failed \(RuntimeError: an unheard") as caught:
        losses, watcher = watched(make(), criterion=criterion, told=criterion)
    assert len(caught) == 1
    assert losses == train(make(), criterion=criterion)
    assert len(watcher.history["loss"]) == STEPS
    assert not criterion._forward_hooks


@pytest.mark.parametrize("name", ["find_heads", "find_chance_loss", "find_adversary", "match_divergence"])
def test_a_rule_that_raises_costs_no_other_rule(name, monkeypatch):
    def broken(*_, **__):
        raise IndexError("list index out of range")

    monkeypatch.setattr(reader, name, broken)
    criterion = nn.CrossEntropyLoss()
    with pytest.warns(RuntimeWarning, match=r"in the graph of the loss failed \(IndexError") as caught:
        _, watcher = watched(make(nn.Softmax(1)), criterion=criterion)
    assert len(caught) == 1
    assert "probabilities-into-loss" in kinds(watcher)
    assert [event.kind for event in watcher.history.events].count("left-out") == 1


def test_a_model_that_takes_no_hooks_is_watched_without(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no hooks here")

    monkeypatch.setattr(module, "TrainEvalModes", broken)
    with pytest.warns(RuntimeWarning, match=r"autograd graph and modes failed \(RuntimeError: no hooks here\)"):
        _, watcher = watched(make())
    assert isinstance(watcher, Monitor)
    assert len(watcher.history["loss"]) == STEPS


def test_copies_are_not_watched():
    model, criterion = make(nn.Softmax(1)), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(model, optimizer, loss_fn=criterion) as watcher:
        twin, their_criterion = copy.deepcopy((model, criterion))
        torch.save(model, io.BytesIO())
        twin.eval()
        train(twin, criterion=their_criterion, steps=4)
        assert not watcher.history.events
        train(model, criterion=criterion, watcher=watcher, optimizer=optimizer)
    assert kinds(watcher) == {"probabilities-into-loss"}


def test_what_was_said_before_is_no_news():
    model = make(nn.Softmax(1))
    params, layers = list_parameters(model)
    context = {"params": params, "layers": layers, "optimizers": []}
    loss = F.cross_entropy(model(torch.randn(8, 6)), torch.arange(8) % 3)
    first = Inspections(model, **context).read(loss, step=0, is_validated=False, is_non_finite=False)
    assert {event.kind for event in first} == {"graph-chance", "graph-probabilities"}

    again = Inspections(model, **context, known=first).read(loss, step=0, is_validated=False, is_non_finite=False)
    assert again == []


def test_a_compiled_model_says_nothing_of_its_inside_and_trains_on():
    model = make(nn.Softmax(1))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with gradwatch.watch(compiled, optimizer) as watcher:
        losses = train(compiled, watcher=watcher, optimizer=optimizer, steps=4)
    torch._dynamo.reset()
    assert losses == pytest.approx(train(make(nn.Softmax(1)), steps=4), abs=1e-5)
    kinds = [event.kind for event in watcher.history.events if event.kind.startswith("graph-")]
    assert kinds == ["graph-chance"], "of the loss, which is not compiled"
