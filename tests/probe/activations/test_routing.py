"""The tokens of each expert are counted however a router is written, and nothing else counts as a router."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gradwatch.probe.activations.probe import ActivationProbe
from gradwatch.probe.device import sync

TOKENS, WIDTH, EXPERTS = 24, 8, 4


class Mixture(nn.Module):
    """A router, experts, and a function of both and of the inputs."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.first, self.gate, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.batch = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x):
        x = self.first(x)
        return self.head(x + self.function(self, x))


def largest(model, x):
    weight, chosen = model.gate(x).softmax(-1).max(-1)
    out = torch.zeros_like(x)
    for i, expert in enumerate(model.experts):
        mine = (chosen == i).nonzero()[:, 0]
        out = out.index_put((mine,), weight[mine, None] * expert(x[mine]))
    return out


def dispatched(model, x, weight_NK, chosen_NK):
    out = torch.zeros_like(x)
    for i, expert in enumerate(model.experts):
        token, place = torch.where(chosen_NK == i)
        out = out.index_add(0, token, expert(x[token]) * weight_NK[token, place, None])
    return out


def two_largest(model, x):
    weight, chosen = model.gate(x).softmax(-1, dtype=torch.float32).topk(2, dim=-1)
    return dispatched(model, x, weight / weight.sum(-1, keepdim=True), chosen)


def softmax_of_the_chosen(model, x):
    logits, chosen = model.gate(x).topk(2, dim=-1)
    return dispatched(model, x, logits.softmax(-1), chosen)


def sigmoid_with_a_bias_for_the_choice(model, x):
    scores = model.gate(x).sigmoid()
    chosen = (scores.detach() + torch.tensor([0.0, 0.1, 0.0, 0.0])).topk(2, dim=-1).indices
    weight = scores.gather(-1, chosen)
    return dispatched(model, x, 2.5 * weight / (weight.sum(-1, keepdim=True) + 1e-20), chosen)


def scattered(model, x):
    logits, chosen = (model.gate(x) + 0.1 * torch.randn(TOKENS, EXPERTS)).topk(2, dim=-1)
    weight = torch.full((TOKENS, EXPERTS), -torch.inf).scatter(-1, chosen, logits).softmax(-1)
    return sum(weight[:, i, None] * expert(x) for i, expert in enumerate(model.experts))


def experts_in_one_tensor(model, x):
    weight, _ = model.gate(x).softmax(-1).topk(2, dim=-1)
    return (torch.einsum("nd,kde->nke", x, model.batch[:2]) * weight[..., None]).sum(1)


def gumbel(model, x):
    weight = F.gumbel_softmax(model.gate(x), hard=True)
    return sum(weight[:, i : i + 1] * expert(x) for i, expert in enumerate(model.experts))


ROUTERS = [
    largest,
    two_largest,
    softmax_of_the_chosen,
    sigmoid_with_a_bias_for_the_choice,
    scattered,
    experts_in_one_tensor,
    gumbel,
]


def soft(model, x):
    weight = model.gate(x).softmax(-1)
    return sum(weight[:, i, None] * expert(x) for i, expert in enumerate(model.experts))


def experts_choose_tokens(model, x):
    weight, chosen = model.gate(x).softmax(-1).T.topk(6, dim=-1)
    out = torch.zeros_like(x)
    for i, expert in enumerate(model.experts):
        out = out.index_add(0, chosen[i], weight[i, :, None] * expert(x[chosen[i]]))
    return out


def by_hash(model, x):
    return sum((torch.arange(TOKENS) % EXPERTS == i)[:, None] * expert(x) for i, expert in enumerate(model.experts))


def attention(model, x):
    scores = (model.gate(x) @ model.gate(x).T).softmax(-1)
    return scores.max(-1, keepdim=True).values * (scores @ model.experts[0](x))


def largest_token(model, x):
    return model.experts[0](x) * model.gate(x).max(0).values.sum()


def confident_head(model, x):
    return model.gate(x).softmax(-1).max(-1, keepdim=True).values * torch.ones(TOKENS, WIDTH)


def squeeze_and_excite(model, x):
    return model.experts[0](x) * model.experts[1](x.mean(0)).sigmoid()


OTHERS = [soft, experts_choose_tokens, by_hash, attention, largest_token, confident_head, squeeze_and_excite]


def probed(model):
    probe, names = ActivationProbe(model), []
    probe.find_functions(lambda infos: names.extend(infos) or True)
    probe.arm()
    output = model(torch.randn(TOKENS, WIDTH))
    row = probe.read()
    del output  # what the probe reads is in its graph
    if row is None:
        return []
    row_SA = sync.to_host(row)
    return [(info, row_S, dead) for info, row_S, dead in zip(names, row_SA.T, probe.packed_units(), strict=True)]


@pytest.mark.parametrize("function", ROUTERS)
def test_the_tokens_of_each_expert_are_counted(function, monkeypatch):
    chosen = []
    for name in ("max", "topk"):
        true = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *a, true=true, **k: chosen.append(true(*a, **k)) or chosen[-1])
    hard = F.gumbel_softmax
    monkeypatch.setattr(F, "gumbel_softmax", lambda *a, **k: chosen.append(hard(*a, **k)) or chosen[-1])

    found = [(info, row_S, dead) for info, row_S, dead in probed(Mixture(function)) if info.module_type == "Routing"]

    places = chosen[-1].argmax(-1) if function is gumbel else chosen[-1][1]
    tokens_E = np.bincount(places.flatten(), minlength=EXPERTS)
    ((info, row_S, dead),) = found
    assert info.name == "gate.routing"
    np.testing.assert_allclose(row_S[:4], [np.mean(tokens_E == 0), np.nan, tokens_E.mean(), tokens_E.std()], rtol=1e-6)
    assert list(dead.flags()) == list(tokens_E == 0)


@pytest.mark.parametrize("function", OTHERS)
def test_nothing_else_is_a_router(function):
    assert not [info for info, _, _ in probed(Mixture(function)) if info.module_type == "Routing"]
