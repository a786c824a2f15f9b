"""Unregistered layers are found if nothing moves them, and parameters of another learner between model and loss."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gradwatch
from gradwatch.probe.graph.graph import Graph
from gradwatch.probe.graph.reader import LossGraphReader
from gradwatch.probe.graph.unregistered import find_adversary
from gradwatch.probe.parameters import list_parameters

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Hidden(nn.Module):
    def __init__(self, container):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.layers = container([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x):
        x = self.first(x)
        layers = self.layers.values() if isinstance(self.layers, dict) else self.layers
        for layer in layers:
            x = F.relu(layer(x[:, :8]))
        return self.last(x)


def found(model, *, optimizers=(), other=None, steps=9, x=X):
    """Train with the optimizers and return the layers that are recorded as unregistered."""
    reader, events = LossGraphReader(model, *list_parameters(model)), []
    for step in range(steps):
        out = model(x) if other is None else other(model(x))
        loss = out.square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        events += reader.read(loss, step=step)
    return [event.layer for event in events if event.kind == "parameters-unregistered"]


@pytest.mark.parametrize("container", [list, tuple, lambda layers: dict(enumerate(layers))])
def test_layers_in_a_plain_container_are_found(container):
    model = Hidden(container)
    assert found(model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.01)]) == ["layers"]


class Own(nn.Module):
    """A layer with a weight of its own, at points where it is differentiated."""

    def __init__(self, weight, points=X):
        super().__init__()
        self.first, self.last, self.weight = nn.Linear(8, 8), nn.Linear(8, 1), weight
        self.points = points

    def forward(self, x):
        weight = self.weight["w"] if isinstance(self.weight, dict) else self.weight
        return self.last(F.relu(self.first(self.points * 2) @ weight))


def plain():
    return torch.full((8, 8), 0.1, requires_grad=True)


@pytest.mark.parametrize(
    "weight", [plain(), {"w": plain()}, nn.Parameter(plain().detach()).clone()], ids=["plain", "in a dict", "a copy"]
)
def test_a_tensor_that_is_no_parameter_is_found(weight):
    model = Own(weight)
    assert found(model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.01)]) == ["weight"]


def test_a_layer_that_the_first_forward_pass_makes_is_found():
    class Late(nn.Sequential):
        def forward(self, x):
            if len(self) == 2:
                self.append(nn.Linear(8, 1))
            return super().forward(x)

    model = Late(nn.Linear(8, 8), nn.ReLU())
    assert found(model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.01)]) == ["2"]


@pytest.mark.parametrize(
    "batch",
    [
        lambda points: points,
        lambda points: torch.stack([points[i] for i in range(16)]),
        lambda points: points + points.square(),
        lambda points: torch.cat([points[:, :4], torch.stack([points[i, 4:] for i in range(16)])], dim=1),
    ],
    ids=["as they are", "collated one by one", "with their squares", "joined"],
)
def test_points_that_a_layer_reads_are_no_parameters(batch):
    class Solution(Own):
        def forward(self, x):
            self.points = batch(x)
            return super().forward(x)

    model = Solution(nn.Parameter(plain().detach()))
    points = X.clone().requires_grad_()
    assert found(model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.01)], x=points) == []


def test_a_tensor_that_is_moved_by_hand_is_none():
    class ByHand:
        def step(self):
            model.weight.data -= 0.01 * model.weight.grad

    model = Own(plain())
    assert found(model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.01), ByHand()]) == []


def test_a_module_list_is_registered():
    model = Hidden(nn.ModuleList)
    assert found(model, optimizers=[torch.optim.SGD(model.parameters(), lr=0.01)]) == []


def test_layers_that_another_optimizer_moves_are_no_strays():
    model = Hidden(list)
    hidden = [param for layer in model.layers for param in layer.parameters()]
    assert found(model, optimizers=[torch.optim.SGD([*model.parameters(), *hidden], lr=0.01)]) == []


def test_a_critic_that_the_model_does_not_hold_is_none_of_its_business():
    assert found(nn.Linear(8, 4), other=nn.Linear(4, 1)) == []


def test_one_look_says_nothing():
    assert found(Hidden(list), steps=8) == []


def test_a_backbone_given_as_a_generator_that_was_used_up_is_found_and_one_left_out_is_for_information():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    backbone = (p for p in model[0].parameters())
    assert sum(p.numel() for p in backbone) == 72, "which uses it up"
    groups = [{"params": list(backbone)}, {"params": model[2].parameters()}]

    assert severities(model, torch.optim.SGD(groups, 0.1)) == [("0", "warning")]
    assert severities(model, torch.optim.SGD(model[2].parameters(), 0.1)) == [("0", "info")]


def severities(model, optimizer):
    """Train and return which layers are called not optimized, and how gravely."""
    with gradwatch.watch(model, optimizer) as monitor:
        for _ in range(12):
            loss = (model(X) - 1).square().mean()
            loss.backward()
            optimizer.step()
            model.zero_grad()
            monitor.step(loss)
    return [(f.layer, str(f.severity)) for f in monitor.findings() if f.kind == "not-optimized"]


def has_adversary(loss, model, *held):
    """Return whether an adversary is found, if optimizers hold further parameters next to the model's."""
    index = {param: i for i, param in enumerate(model.parameters())}
    return bool(list(find_adversary(Graph(loss), index, {id(p) for p in (*index, *held)})))


def test_the_critic_of_a_generator_is_an_adversary():
    generator, critic = nn.Linear(8, 8), nn.Linear(8, 1)
    assert has_adversary(-critic(generator(X)).mean(), generator)


def test_a_judge_whose_weights_need_no_gradient_is_no_adversary():
    generator, judge = nn.Linear(8, 8), nn.Linear(8, 1).requires_grad_(False)
    assert not has_adversary(judge(generator(X)).mean(), generator)


def test_what_the_same_optimizer_moves_is_no_adversary():
    model, scale = nn.Linear(8, 1), nn.Parameter(torch.ones(()))
    assert not has_adversary((model(X) * scale).mean(), model, scale)


def test_an_encoder_before_the_model_is_no_adversary():
    encoder, head = nn.Linear(8, 8), nn.Linear(8, 1)
    assert not has_adversary(head(encoder(X)).mean(), head)


class Positions(nn.Module):
    """Patches with positions that `forward` makes, with a copy of them as the second argument of the head."""

    def __init__(self, *, keeps):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.place = nn.Parameter(torch.zeros(8)) if keeps else None

    def forward(self, x):
        place = nn.Parameter(torch.randn(8)) if self.place is None else self.place
        return self.last(F.relu(self.first(x) + place))


def test_a_parameter_that_each_forward_pass_makes_is_found():
    events = []
    for keeps in (False, True):
        model = Positions(keeps=keeps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
            for _ in range(12):
                loss = model(X).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.step(loss)
        events += [event.text for event in monitor.history.events if event.kind == "parameters-unregistered"]

    assert events == ["the loss uses a parameter of shape (8,), which each forward pass makes again"]


def test_a_factor_of_the_outputs_that_a_penalty_differentiates_by_is_none():
    model = Positions(keeps=True)
    reader, events = LossGraphReader(model, *list_parameters(model)), []
    for step in range(9):  # as in invariant risk minimization
        factor = nn.Parameter(torch.ones(1))
        risk = F.softplus(model(X) * factor).mean()
        (penalty,) = torch.autograd.grad(risk, factor, create_graph=True)
        loss = risk + penalty.square().sum()
        loss.backward()
        events += reader.read(loss, step=step)

    assert "parameters-unregistered" not in {event.kind for event in events}


def test_the_parameters_of_a_copy_of_the_model_are_not():
    model = Hidden(nn.ModuleList)
    reader, events = LossGraphReader(model, *list_parameters(model)), []
    for step in range(9):  # as in meta-learning
        loss = copy.deepcopy(model)(X).square().mean()
        loss.backward()
        events += reader.read(loss, step=step)

    assert "parameters-unregistered" not in {event.kind for event in events}
