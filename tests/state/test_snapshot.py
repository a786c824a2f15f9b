"""A snapshot gives back what it took, whatever has become of the live state since, and uses its memory again."""

import collections

import pytest
import torch
from torch import nn

from gradwatch.state.snapshot import Snapshot, num_bytes


def state_of(model, optimizer):
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": (3, (1,) * 625, None)}


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_it_keeps_what_was_while_the_training_goes_on():
    model, optimizer = trained()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    moment = optimizer.state[model[0].weight]["exp_avg"].clone()
    snapshot = Snapshot()

    snapshot.take(state_of(model, optimizer))
    step(model, optimizer)
    kept = snapshot.read()

    assert type(kept["model"]) is collections.OrderedDict
    assert kept["model"]._metadata == model.state_dict()._metadata
    assert all(torch.equal(kept["model"][name], value) for name, value in expected.items())
    assert torch.equal(kept["optimizer"]["state"][0]["exp_avg"], moment)
    assert kept["random"] == (3, (1,) * 625, None)
    assert kept["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]


def test_taken_again_it_uses_the_same_memory():
    model, optimizer = trained()
    snapshot = Snapshot()
    snapshot.take(state_of(model, optimizer))
    before = [tensor.data_ptr() for tensor in snapshot.read()["model"].values()]

    step(model, optimizer)
    snapshot.take(state_of(model, optimizer))

    kept = snapshot.read()["model"]
    assert [tensor.data_ptr() for tensor in kept.values()] == before
    assert all(torch.equal(kept[name], value) for name, value in model.state_dict().items())


def test_a_state_that_has_grown_or_changed_its_shape_is_taken_whole():
    snapshot = Snapshot()
    snapshot.take({"a": torch.ones(3)})

    snapshot.take({"a": torch.arange(4.0), "b": [torch.zeros(2, dtype=torch.int64)]})

    kept = snapshot.read()
    assert torch.equal(kept["a"], torch.arange(4.0))
    assert torch.equal(kept["b"][0], torch.zeros(2, dtype=torch.int64))


def test_one_tensor_under_two_names_is_held_once_and_stays_one():
    shared = torch.randn(100)
    snapshot = Snapshot()

    snapshot.take({"encoder": shared, "decoder": shared.detach(), "part": shared[:50]})

    kept = snapshot.read()
    assert kept["encoder"] is kept["decoder"]
    assert num_bytes(snapshot.read()) == num_bytes({"a": shared, "b": shared[:50]}) == 600


def test_strides_are_kept():
    weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    snapshot = Snapshot()

    snapshot.take([weight])

    assert snapshot.read()[0].stride() == weight.stride()
    assert torch.equal(snapshot.read()[0], weight)


def test_counters_of_a_schedule_are_copied():
    counter = collections.Counter({3: 1})
    snapshot = Snapshot()

    snapshot.take({"milestones": counter})
    counter[5] = 2

    assert snapshot.read()["milestones"] == collections.Counter({3: 1})


class Interrupting(torch.Tensor):
    """A tensor at which Ctrl-C comes."""

    def data_ptr(self):
        raise KeyboardInterrupt


def test_what_was_interrupted_is_no_snapshot():
    snapshot = Snapshot()
    snapshot.take({"a": torch.ones(2), "b": torch.ones(2)})

    with pytest.raises(KeyboardInterrupt):
        snapshot.take({"a": torch.zeros(2), "b": torch.ones(2).as_subclass(Interrupting)})

    assert snapshot.read() is None
