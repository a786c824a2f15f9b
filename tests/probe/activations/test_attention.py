"""The largest logit and the entropy of attention equal the obvious formula, however the attention is written."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradwatch.probe.activations import attention
from gradwatch.probe.activations.probe import ActivationProbe
from gradwatch.probe.device import sync

SAMPLES, HEADS, TOKENS, WIDTH = 3, 4, 16, 32
MAX_LOGIT, ENTROPY = 4, 5
QUERIES = slice(8, None)  # the second half of 16 tokens are 8 queries


class Attention(nn.Module):
    """Attention as a function of queries, keys and values, each of shape (B, H, T, D)."""

    def __init__(self, function, *, key_heads=HEADS):
        super().__init__()
        torch.manual_seed(0)
        self.function, self.key_heads = function, key_heads
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.key, self.value = (nn.Linear(WIDTH, WIDTH // HEADS * key_heads) for _ in range(2))

    def heads(self, x):
        counts = (HEADS, self.key_heads, self.key_heads)
        layers = (self.query, self.key, self.value)
        return [f(x).unflatten(-1, (n, -1)).transpose(1, 2) for f, n in zip(layers, counts, strict=True)]

    def forward(self, x):
        return self.out(self.function(*self.heads(x)).transpose(1, 2).flatten(2))


def inputs(scale=6.0):
    return scale * torch.randn(SAMPLES, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def masked(allowed, *, value=-math.inf):
    return torch.zeros(allowed.shape).masked_fill(~allowed, value)


CAUSAL = torch.ones(TOKENS, TOKENS).tril().bool()
PADDED = (torch.arange(TOKENS) < 12).expand(TOKENS, TOKENS)
EVERYTHING = torch.ones(TOKENS, TOKENS).bool()


def by_hand(q, k, v):
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    return scores.masked_fill(~CAUSAL, -math.inf).softmax(-1) @ v


def scaled_before(q, k, v):
    return ((q * q.shape[-1] ** -0.5) @ k.mT + masked(CAUSAL)).softmax(-1) @ v


def by_einsum(q, k, v):
    return torch.einsum("bhqd,bhkd->bhqk", q, k).div(math.sqrt(q.shape[-1])).softmax(-1) @ v


WRITTEN = {
    "one kernel": (F.scaled_dot_product_attention, EVERYTHING),
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), CAUSAL),
    "a mask of booleans": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=PADDED), PADDED),
    "a mask of numbers": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=masked(PADDED)), PADDED),
    "with dropout": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1), CAUSAL),
    "by hand": (by_hand, CAUSAL),
    "a scale before the product": (scaled_before, CAUSAL),
}


def look(model, run=None):
    """Return name, kind and statistics of the only activation of a model, after its second step."""
    with ActivationProbe(model) as probe:
        probe.find_functions(lambda infos: True)
        for _ in range(2):
            probe.arm()
            (run or (lambda: model(inputs()).square().sum().backward()))()
            row_SA = probe.read()
        return [(i.name, i.module_type, column) for i, column in zip(probe.infos, sync.to_host(row_SA).T, strict=True)]


def expected(model, allowed):
    """Largest logit and smallest entropy, query by query."""
    q, k, _ = (part.detach() for part in model.heads(inputs()))
    largest, entropy_H = -math.inf, []
    for h in range(HEADS):
        entropies = []
        for b in range(SAMPLES):
            for i in range(TOKENS)[QUERIES]:
                logits = (k[b, h * k.shape[1] // HEADS] @ q[b, h, i])[allowed[i]] / math.sqrt(WIDTH // HEADS)
                weights = logits.softmax(0)
                largest = max(largest, logits.max().item())
                entropies.append(torch.special.entr(weights).sum().item() / math.log(len(logits)))
        entropy_H.append(np.mean(entropies))
    return largest, min(entropy_H)


@pytest.mark.parametrize("name", WRITTEN)
def test_attention_is_read_as_the_obvious_formula_says(name):
    function, allowed = WRITTEN[name]
    model = Attention(function)

    ((found, kind, row_S),) = look(model)

    is_by_hand = function in (by_hand, scaled_before)
    assert kind == ("Softmax" if is_by_hand else "Attention")
    assert found.endswith(f".{kind.lower()}")
    np.testing.assert_allclose(row_S[[MAX_LOGIT, ENTROPY]], expected(model, allowed), rtol=1e-4)


def test_a_product_of_unknown_layout_shows_the_entropy_only():
    model = Attention(by_einsum)

    ((_, _, row_S),) = look(model)

    assert np.isnan(row_S[MAX_LOGIT]), "its rows may be keys"
    assert row_S[ENTROPY] == pytest.approx(expected(model, EVERYTHING)[1], rel=1e-4)


def test_heads_of_queries_may_share_a_head_of_keys():
    model = Attention(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), key_heads=2)

    ((_, _, row_S),) = look(model)

    np.testing.assert_allclose(row_S[[MAX_LOGIT, ENTROPY]], expected(model, EVERYTHING), rtol=1e-4)


@pytest.mark.parametrize("needs_weights", [True, False])
def test_multihead_attention_is_read_with_and_without_its_weights(needs_weights):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.out = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.Linear(WIDTH, 2)

        def forward(self, x):
            return self.out(self.inner(x, x, x, need_weights=needs_weights)[0])

    model = Layer()
    small, large = (
        look(model, lambda s=scale: model(inputs(s)).square().sum().backward())[0][2] for scale in (0.01, 30.0)
    )

    assert small[MAX_LOGIT] < 0.1
    assert small[ENTROPY] == pytest.approx(1, abs=0.01)
    assert large[MAX_LOGIT] > 100
    assert large[ENTROPY] < 0.2


def test_micro_batches_count_by_their_extremes():
    model = Attention(F.scaled_dot_product_attention)

    def step(*scales):
        return look(model, lambda: [model(inputs(s)).square().sum().backward() for s in scales])[0][2]

    both, small, large = step(0.1, 6.0), step(0.1), step(6.0)

    assert both[MAX_LOGIT] == large[MAX_LOGIT] > small[MAX_LOGIT]
    assert both[ENTROPY] == large[ENTROPY] < small[ENTROPY]


def test_a_single_key_leaves_no_choice():
    model = Attention(lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :1], v[:, :, :1]))

    ((_, _, row_S),) = look(model)

    assert np.isfinite(row_S[MAX_LOGIT])
    assert np.isnan(row_S[ENTROPY])


def test_a_sequence_of_one_position_has_no_next_one():
    # several features of one row attend to each other, and each looks up a single category
    weights = torch.randn(2, 1, 3, 3, requires_grad=True).softmax(-1)

    assert not attention.sees_next_position(
        weights.grad_fn, lambda node, name: getattr(node, f"_saved_{name}"), positions=1
    )


def test_a_checkpointed_region_is_not_read():
    model = Attention(F.scaled_dot_product_attention)
    forward = model.forward
    model.forward = lambda x: checkpoint(forward, x, use_reentrant=False).relu()

    ((_, kind, _),) = look(model)

    assert kind == "ReLU", "of the two functions, only the one outside of the region is read"


@pytest.mark.parametrize("count", [1, 2, 7, 16, 100, 1024])
def test_the_last_queries_are_sampled(count):
    rows = range(count)[attention._rows(count)]

    assert rows[-1] == count - 1
    assert rows[0] >= (count - 1) // 2, "they have half of the keys or more"
    assert len(rows) == min(attention.MAX_QUERIES, (count + 1) // 2)
