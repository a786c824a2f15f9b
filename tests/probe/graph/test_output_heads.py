"""Output heads that share a trunk are found, and numbered modules of equal shape that run in parallel."""

import pytest
import torch
from torch import nn

from gradwatch.probe.graph.reader import LossGraphReader
from gradwatch.probe.parameters import list_parameters

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Tasks(nn.Module):
    def __init__(self, shared=True):
        super().__init__()
        self.trunk, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mask, self.depth = nn.Linear(8, 2), nn.Linear(8, 1)
        self.shared = shared

    def forward(self, x):
        h = self.trunk(x).relu()
        return self.mask(h), self.depth(h if self.shared else self.other(x).relu())


def heads(model, loss_of):
    """Return the weights of the heads in the graph of a loss."""
    events = LossGraphReader(model, *list_parameters(model)).read(loss_of(model), step=0)
    return [name for event in events if event.kind == "graph-heads" for name in event.values]


def both(model):
    mask, depth = model(X)
    return mask.square().mean() + depth.square().mean()


def test_two_heads_on_a_trunk_are_found_by_their_weights():
    assert heads(Tasks(), both) == ["mask.weight", "depth.weight"]


def test_convolutions_are_heads_too():
    trunk, one, other = (nn.Conv2d(1, 1, 3, padding=1) for _ in range(3))
    model = nn.ModuleDict({"trunk": trunk, "one": one, "other": other})
    image = torch.ones(2, 1, 5, 5)
    assert heads(model, lambda m: one(trunk(image)).mean() - other(trunk(image)).mean()) == [
        "one.weight",
        "other.weight",
    ]


def test_towers_that_share_nothing_do_not_compete_and_are_reported():
    model = Tasks(shared=False)
    events = LossGraphReader(model, *list_parameters(model)).read(both(model), step=0)
    (towers,) = [event for event in events if event.kind in ("graph-heads", "graph-towers")]
    assert towers.kind == "graph-towers"
    assert {frozenset(n for n, part in towers.values.items() if part == k) for k in (0, 1)} == {
        frozenset({"trunk.weight", "mask.weight"}),
        frozenset({"other.weight", "depth.weight"}),
    }


def test_heads_that_share_a_layer_with_one_of_two_others_are_one_part():
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
    a, b, c = (layer(X) for layer in model[:3])
    loss = sum(head(x).mean() for head, x in zip(model[3:], (a, b, a + b + c), strict=True))
    events = LossGraphReader(model, *list_parameters(model)).read(loss, step=0)
    assert [event.kind for event in events if event.kind in ("graph-heads", "graph-towers")] == []


def test_one_output_layer_is_no_pair_of_heads():
    assert heads(Tasks(), lambda m: m(X)[0].square().mean()) == []


def test_a_latent_in_the_loss_is_no_head_beside_its_decoder():
    model = Tasks()
    decoder = nn.Linear(2, 8)
    parts = nn.ModuleDict({"encoder": model, "decoder": decoder})

    def bound(_):
        mean, log_var = model(X)
        error = (decoder(mean * log_var.exp()) - X).square().mean()
        return error + mean.square().mean() - log_var.mean()

    assert heads(parts, bound) == []


def test_a_penalty_on_the_weights_makes_no_heads():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    assert heads(model, lambda m: m(X).mean() + sum(p.square().sum() for p in m.parameters())) == []


class Parts(nn.Module):
    """Modules whose outputs are summed, or each the input of the next."""

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
    """Return parent and number of the parallel modules in the graph of a loss."""
    events = LossGraphReader(model, *list_parameters(model)).read(model(X).square().mean(), step=0)
    return [(event.layer, event.values) for event in events if event.kind == "graph-side-by-side"]


def test_experts_run_side_by_side():
    assert side_by_side(Parts(chained=False)) == [("parts", {"modules": 3.0})]


def test_blocks_with_shortcuts_run_one_after_the_other():
    assert side_by_side(Parts(chained=True)) == []


@pytest.mark.parametrize("sizes", [(8, 8), (8, 8, 4)], ids=["two", "one of another size"])
def test_fewer_than_three_that_are_alike_are_no_group(sizes):
    assert side_by_side(Parts(chained=False, sizes=sizes)) == []


class Backwards(nn.Module):
    """Layers that are registered from the output to the input, with one beside them."""

    def __init__(self):
        super().__init__()
        self.last, self.middle, self.first, self.wide = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        return self.last(self.middle(self.first(x).relu()).relu()) + self.wide(x)


def depths(model, loss_of):
    """Return the depth of each weight, or None if the order is as expected."""
    events = LossGraphReader(model, *list_parameters(model)).read(loss_of(model), step=0)
    return next((event.values for event in events if event.kind == "graph-depths"), None)


def test_layers_that_are_registered_in_another_order_have_a_depth():
    expected = {"last.weight": 1, "middle.weight": 2, "first.weight": 3, "wide.weight": 1}
    assert depths(Backwards(), lambda model: model(X).mean()) == expected


def test_layers_in_order_need_no_depth():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    assert depths(model, lambda model: model(X).mean()) is None


def test_a_penalty_of_derivatives_leaves_layers_in_order():
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def penalty(model):
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().mean()

    assert depths(model, penalty) is None


def test_parallel_layers_of_one_depth_are_in_order():
    model = Tasks(shared=False)
    assert depths(model, both) is None


def test_a_weight_that_is_used_again_has_the_depth_of_its_first_use():
    model = Backwards()
    looped = depths(model, lambda m: m.last(m.middle(m.middle(m.first(X)).relu()).relu()).mean())
    assert looped == {"last.weight": 1, "middle.weight": 3, "first.weight": 4}
