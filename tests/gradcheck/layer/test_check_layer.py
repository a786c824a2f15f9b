"""A planted mistake fails its property with its line, and healthy layers fail none."""

import re

import pytest
import torch
from gradcheck_layers.bad_layers import BAD, CALLS, FLAT, GatesByAColumn, SubtractsInPlace, planted_line
from torch import nn
from torch.nn import functional as F

import gradwatch
from gradwatch.errors import GradwatchError
from gradwatch.gradcheck.layer.check_layer import PROPERTIES
from gradwatch.gradcheck.layer.trial import LayerTrial


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out, self.drop = nn.Linear(8, 24), nn.Linear(8, 8), nn.Dropout(0.1)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.into(x).view(b, t, 3, 2, 4).permute(2, 0, 3, 1, 4)
        future = torch.triu(torch.full((t, t), -torch.inf, device=x.device, dtype=x.dtype), 1)
        weights = self.drop((q @ k.transpose(-1, -2) / 2 + future).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, d))


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.1)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.skip, self.head = nn.Conv2d(3, 8, 1), nn.Linear(8, 4)

    def forward(self, x):
        h = F.relu(self.norms[0](self.first(x)))
        h = F.relu(self.norms[1](self.second(h)) + self.skip(x))
        return self.head(h.mean((2, 3)))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 8, padding_idx=0), nn.Embedding(9, 8)
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.2)

    def forward(self, words):
        places = self.places(torch.arange(words.shape[1], device=words.device))
        return self.drop(self.norm(self.words(words) + places))


class SamplesNoise(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(6, 6)
        self.calls, self.last = 0, None

    def forward(self, x):
        self.calls += 1
        self.last = self.dense(x).softmax(-1)
        return self.last + torch.randn_like(x)


class Similarities(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(6, 5)

    def forward(self, x):
        z = F.normalize(self.dense(x), dim=-1)
        return z @ z.T


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.gate, self.down = nn.RMSNorm(6), nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return x + self.down(F.silu(self.gate(self.norm(x))) * self.up(x))


def image():
    return torch.randn(4, 3, 8, 6)


def words():
    return torch.randint(0, 20, (4, 3))


HEALTHY = {
    "perceptron": lambda: (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2)), FLAT),
    "convolution": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2), nn.Flatten()), image()),
    "transposed_convolution": lambda: (nn.ConvTranspose2d(3, 4, 3), image()),
    "batch_norm": lambda: (nn.BatchNorm1d(6), FLAT),
    "batch_norm_without_running_statistics": lambda: (nn.BatchNorm2d(3, track_running_stats=False), image()),
    "layer_norm": lambda: (nn.LayerNorm(6), FLAT),
    "group_norm": lambda: (nn.GroupNorm(3, 3), image()),
    "instance_norm": lambda: (nn.InstanceNorm2d(3, affine=True), image()),
    "local_response_norm": lambda: (nn.LocalResponseNorm(2), image()),
    "gru": lambda: (nn.GRU(6, 8, batch_first=True), (4, 3, 6)),
    "recurrence_with_a_hidden_state": lambda: (nn.RNN(6, 8, batch_first=True), (4, 3, 6), (1, 4, 8)),
    "lstm_with_steps_first": lambda: (nn.LSTM(6, 8), (2, 4, 6)),
    "recurrent_cell": lambda: (nn.GRUCell(6, 8), FLAT, (4, 8)),
    "embedding": lambda: (nn.Embedding(20, 8), words()),
    "bag_of_words": lambda: (nn.EmbeddingBag(20, 8), words()),
    "tokens": lambda: (Tokens(), words()),
    "attention": lambda: (Attention(), (4, 3, 8)),
    "torch_attention": lambda: (SelfAttention(), (4, 3, 8)),
    "transformer_layer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (4, 3, 8)),
    "transformer_layer_with_steps_first": lambda: (nn.TransformerEncoderLayer(8, 2, 16), (3, 4, 8)),
    "residual_network": lambda: (Residual(), image()),
    "gated": lambda: (Gated(), FLAT),
    "noise": lambda: (SamplesNoise(), FLAT),
    "bilinear": lambda: (nn.Bilinear(6, 6, 2), FLAT, FLAT),
    "spectral_norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4)), FLAT),
    "cosine": lambda: (nn.CosineSimilarity(), FLAT, FLAT),
    "alpha_dropout": lambda: (nn.AlphaDropout(0.2), FLAT),
    "similarities": lambda: (Similarities(), FLAT),
    "as_many_outputs_as_samples": lambda: (nn.Linear(6, 5), FLAT),
    "loss": lambda: (nn.CrossEntropyLoss(), FLAT, torch.randint(0, 6, (4,))),
}
UNKNOWN = {
    "similarities": {"samples"},  # a result belongs to two samples
    "loss": {"samples"},  # its result has no samples
    "local_response_norm": {"dtype"},  # torch has no average pooling in bfloat16 on a CPU
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_layer_fails_no_property(name):
    layer, *inputs = HEALTHY[name]()

    found = gradwatch.check_layer(layer, *(torch.randn(i) if isinstance(i, tuple) else i for i in inputs))

    assert not found.is_wrong, str(found)
    unknown = {p.name for p in found.properties if p.outcome == "cannot tell"}
    assert unknown == UNKNOWN.get(name, set())


@pytest.mark.parametrize(("kind", "shape", "name", "text"), BAD, ids=[f"{k.__name__}-{n}" for k, _, n, _ in BAD])
def test_a_planted_mistake_fails_its_property_with_its_line(kind, shape, name, text):
    trial = LayerTrial(kind(), (torch.randn(shape),), batch_axis=None)

    found = PROPERTIES[name](trial)

    assert found.outcome == "fails"
    assert text in found.text
    if line := planted_line(kind):
        assert (found.place.file.endswith("bad_layers.py"), found.place.line) == (True, line)


def test_what_equal_calls_do_differently_is_blamed_on_nothing_else():
    class Clock(nn.Linear):
        def forward(self, x):
            CALLS[0] += 1
            return super().forward(x) + CALLS[0]

    found = gradwatch.check_layer(Clock(6, 6), torch.randn(FLAT))

    assert found.is_wrong
    assert [p.name for p in found.properties if p.outcome == "fails"] == ["deterministic"]
    assert {p.name for p in found.properties if p.outcome == "cannot tell"} >= {"state", "samples", "modes"}


def test_batch_normalization_and_dropout_are_named_as_what_they_are():
    found = gradwatch.check_layer(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)), torch.randn(FLAT))

    assert found["samples"].text == "`1` takes statistics over the batch in training, as it should"
    assert found["modes"].text == "training and evaluation differ by `1`, `2`"


def test_the_layer_its_input_and_the_random_state_stay_as_they_are():
    layer, x = SubtractsInPlace(), torch.randn(FLAT)
    before = [p.clone() for p in layer.parameters()]
    kept, state = x.clone(), torch.get_rng_state()

    gradwatch.check_layer(layer, x)

    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and torch.equal(p, b) for p, b in zip(layer.parameters(), before, strict=True))
    assert layer.training


def test_the_text_is_a_table_with_the_source_line():
    text = str(gradwatch.check_layer(GatesByAColumn(), torch.randn(FLAT)))

    head, *rows = text.splitlines()
    assert re.match(r"GatesByAColumn: \d of 10 properties hold, in ", head)
    assert any(row.startswith("  broadcast      fails        `mul`") for row in rows)
    assert any(
        row.endswith(f"bad_layers.py:{planted_line(GatesByAColumn)}: return gate * x.mean(1)  # planted")
        for row in rows
    )


def test_the_axis_of_the_samples_can_be_given():
    class StepsFirst(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(6, 6)

        def forward(self, x):
            return self.rnn(x)[0]

    found = gradwatch.check_layer(StepsFirst(), torch.randn(2, 4, 6), batch_axis=1)

    assert not found.is_wrong


@pytest.mark.parametrize(
    ("layer", "x", "message"),
    [
        (nn.Linear(6, 2), torch.randn(1, 6), "the input has 1 sample along axis 0, expected at least 2"),
        (nn.Linear(6, 2), torch.randn(4, 5), "Linear does not take these inputs: RuntimeError"),
        (torch.tanh, torch.randn(4, 5), "expected a torch.nn.Module"),
        (nn.LazyLinear(2), torch.randn(4, 5), "call it once before the check"),
    ],
)
def test_a_mistake_in_the_call_is_an_error(layer, x, message):
    with pytest.raises(GradwatchError, match=message):
        gradwatch.check_layer(layer, x)
