"""Labels that a language model sees, or that are too far ahead, are told at the first step; right ones are not."""

# B = sequences, T = positions, V = vocabulary, H = heads

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gradwatch
from gradwatch.events import SEQUENCE_AXIS, TARGETS_AHEAD, TARGETS_COPIED, TARGETS_VISIBLE
from gradwatch.probe.activations.token_targets import MAX_READS, TokenTargets, shift_of
from gradwatch.probe.output_reader import ForwardCall

B, T, V, WIDTH, H = 8, 24, 30, 32, 4


class Attention(nn.Module):
    """Attention in one of the ways in which people write it."""

    def __init__(self, form, *, mask):
        super().__init__()
        self.form, self.mask = form, mask
        self.project, self.merge = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory=None):
        parts = self.project(x).chunk(3, -1)
        if memory is not None:
            parts = parts[0], *self.project(memory).chunk(3, -1)[1:]
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in parts)
        mask = self.mask(q.shape[2]) if self.mask else None
        if self.form == "function":
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.mT / q.shape[-1] ** 0.5
            mixed = (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v
        return x + self.merge(mixed.transpose(1, 2).flatten(2))


def causal(size):
    return torch.ones(size, size, dtype=torch.bool).tril()


def padding(size):
    return (torch.arange(size) < size - 1).expand(B, 1, size, size)


def prompt(size):
    return causal(size) | (torch.arange(size) < size // 3)


class Model(nn.Module):
    def __init__(self, mix, *, width=WIDTH):
        super().__init__()
        self.embed, self.place = nn.Embedding(V, WIDTH), nn.Embedding(2 * T, WIDTH)
        self.mix, self.head = mix, nn.Linear(width, V)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        mixed = self.mix(self.embed(tokens) + self.place(places))
        return self.head(mixed[0] if isinstance(mixed, tuple) else mixed)


class ReturnsLoss(nn.Module):
    """A model that shifts the labels itself, as those of transformers."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, labels):
        scores = self.model(tokens)
        return F.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), scores


class Translator(nn.Module):
    """An encoder that sees all of its tokens, and a decoder that attends to them."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, WIDTH), nn.Linear(WIDTH, V)
        self.encoder, self.decoder = Attention("function", mask=None), Attention("function", mask=causal)
        self.cross = Attention("function", mask=None)

    def forward(self, both):
        source, target = both
        return self.head(self.cross(self.decoder(self.embed(target)), self.encoder(self.embed(source))))


def of_scores(model, tokens, shift=1):
    return F.cross_entropy(model(tokens[:, :T]).flatten(0, 1), tokens[:, shift : T + shift].flatten())


def of_channels(model, tokens, shift=1):
    return F.cross_entropy(model(tokens[:, :T]).transpose(1, 2), tokens[:, shift : T + shift])


def of_log_probabilities(model, tokens):
    return F.nll_loss(model(tokens[:, :T]).log_softmax(-1).flatten(0, 1), tokens[:, 1 : T + 1].flatten())


def events_of(model, loss_of=of_scores, *, tokens=lambda: torch.randint(0, V, (B, T + 3))):
    """Return the events about labels of a run of two steps."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gradwatch.watch(model, optimizer) as monitor:
        for _ in range(2):
            loss = loss_of(model, tokens())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    kinds = {kind.name for kind in (TARGETS_AHEAD, TARGETS_COPIED, TARGETS_VISIBLE, SEQUENCE_AXIS)}
    return [(e.kind, e.layer, e.step) for e in monitor.history.events if e.kind in kinds]


@pytest.mark.parametrize("loss_of", [of_scores, of_channels, of_log_probabilities])
@pytest.mark.parametrize("form", ["function", "by hand"])
@pytest.mark.parametrize("mask", [None, padding])
def test_an_attention_without_a_causal_mask_is_reported_with_its_layer(form, mask, loss_of):
    model = Model(Attention(form, mask=mask))
    assert events_of(model, loss_of) == [(TARGETS_VISIBLE.name, "mix.project", 0)]


@pytest.mark.parametrize("loss_of", [of_scores, of_channels, of_log_probabilities])
@pytest.mark.parametrize("form", ["function", "by hand"])
@pytest.mark.parametrize("mask", [causal, prompt])
def test_an_attention_that_sees_no_label_is_not(form, mask, loss_of):
    assert not events_of(Model(Attention(form, mask=mask)), loss_of)


@pytest.mark.parametrize("mask", [None, nn.Transformer.generate_square_subsequent_mask(T)])
def test_layers_of_torch_are_read(mask):
    encode = nn.TransformerEncoderLayer(WIDTH, H, WIDTH, dropout=0.0, batch_first=True)
    found = events_of(Model(Masked(encode, mask)))
    assert found == ([(TARGETS_VISIBLE.name, "mix.encode.self_attn", 0)] if mask is None else [])


class Masked(nn.Module):
    def __init__(self, encode, mask):
        super().__init__()
        self.encode, self.mask = encode, mask

    def forward(self, x):
        return self.encode(x, src_mask=self.mask)


@pytest.mark.parametrize("both", [False, True])
def test_a_recurrence_in_both_directions_sees_its_labels(both):
    model = Model(nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=both), width=2 * WIDTH if both else WIDTH)
    assert events_of(model) == ([(TARGETS_VISIBLE.name, "mix", 0)] if both else [])


@pytest.mark.parametrize("mask", [None, causal])
def test_a_model_that_computes_its_loss_shows_the_labels(mask):
    model = ReturnsLoss(Model(Attention("function", mask=mask)))
    found = events_of(model, lambda model, tokens: model(tokens, tokens)[0])
    assert [kind for kind, *_ in found] == ([TARGETS_VISIBLE.name] if mask is None else [])


RECURRENT = {"lstm": nn.LSTM, "gru": nn.GRU}


class SequenceFirst(nn.Module):
    """A model of tokens of shape (positions, sequences)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens.T).transpose(0, 1)


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrence_that_runs_along_the_batch_is_found_by_the_shift_of_the_labels(kind):
    assert events_of(Model(RECURRENT[kind](WIDTH, WIDTH))) == [(SEQUENCE_AXIS.name, "mix", 0)]
    assert not events_of(Model(RECURRENT[kind](WIDTH, WIDTH, batch_first=True)))
    assert not events_of(SequenceFirst(Model(RECURRENT[kind](WIDTH, WIDTH))))
    assert not events_of(Model(RECURRENT[kind](WIDTH, WIDTH)), tokens=lambda: torch.randint(0, V, (T, T + 3)))


def test_an_attention_that_runs_along_the_batch_is_found_by_the_shift_of_the_labels():
    found = events_of(Model(nn.TransformerEncoderLayer(WIDTH, H, WIDTH, dropout=0.0)))
    assert found == [(SEQUENCE_AXIS.name, "mix.self_attn", 0)]


def test_labels_that_are_shifted_two_times_are_reported():
    model = ReturnsLoss(Model(Attention("function", mask=causal)))
    found = events_of(model, lambda model, tokens: model(tokens[:, :-1], tokens[:, 1:])[0])
    assert found == [(TARGETS_AHEAD.name, None, 0)]
    assert events_of(Model(Attention("function", mask=causal)), lambda *both: of_scores(*both, shift=2)) == found


def test_several_heads_that_predict_several_tokens_are_right():
    model = Model(Attention("function", mask=causal))
    assert not events_of(model, lambda *both: of_scores(*both, shift=1) + of_channels(*both, shift=2))


def test_an_encoder_and_a_cross_attention_may_see_all_tokens():
    def loss_of(model, tokens):
        return F.cross_entropy(
            model((tokens.flip(1)[:, :T], tokens[:, :T])).flatten(0, 1), tokens[:, 1 : T + 1].flatten()
        )

    assert not events_of(Translator(), loss_of)


def of_copies(model, tokens):
    return of_scores(model, tokens, shift=0)


class Pool(nn.Module):
    """A code of a whole sequence, from which each position is to be restored."""

    def forward(self, x):
        return x.mean(1, keepdim=True) + torch.linspace(-1, 1, x.shape[1])[:, None]


def test_tokens_that_reach_their_own_labels_are_told():
    assert events_of(Model(Attention("function", mask=None)), of_copies) == [(TARGETS_COPIED.name, "embed", 0)]


def test_tokens_that_are_restored_from_a_code_are_the_task_of_an_autoencoder():
    assert not events_of(Model(Pool()), of_copies)


def test_a_decoder_that_gets_its_labels_is_told_with_its_embedding():
    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.source, self.target = nn.Embedding(V, WIDTH), nn.Embedding(V, WIDTH)
            self.encode = nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.decode, self.head = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, V)

        def forward(self, both):
            state = self.encode(self.source(both[0]))[1]
            return self.head(self.decode(self.target(both[1]), state)[0])

    def loss_of(model, tokens, *, shift):
        labels = tokens.flip(1)
        scores = model((tokens[:, :T], labels[:, :T]))
        return F.cross_entropy(scores.flatten(0, 1), labels[:, shift : shift + T].flatten())

    assert events_of(Decoder(), partial(loss_of, shift=0)) == [(TARGETS_COPIED.name, "target", 0)]
    assert not events_of(Decoder(), partial(loss_of, shift=1))


def test_hidden_tokens_are_learned_from_both_sides():
    def loss_of(model, tokens):
        inputs, labels = tokens[:, :T], tokens[:, :T].clone()
        is_hidden = torch.rand(B, T) < 0.3
        labels[~is_hidden] = -100
        return F.cross_entropy(model(inputs.masked_fill(is_hidden, 0)).flatten(0, 1), labels.flatten())

    assert not events_of(Model(Attention("function", mask=None)), loss_of)


def test_a_text_that_repeats_itself_proves_nothing():
    assert not events_of(
        Model(Attention("function", mask=None)),
        tokens=lambda: torch.arange(T + 3).expand(B, -1) % 2 + torch.arange(B)[:, None],
    )


def test_a_checkpointed_region_is_not_computed_again():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.attend, self.calls = Attention("function", mask=None), 0

        def forward(self, x):
            return checkpoint(self.count, x, use_reentrant=False)

        def count(self, x):
            self.calls += 1
            return self.attend(x)

    mix = Checkpointed()
    events_of(Model(mix))
    assert mix.calls == 4, "two steps, each with a forward pass and one of the backward pass"


def test_a_model_without_tokens_is_read_at_a_few_steps_only():
    model, reader = nn.Linear(4, 3), TokenTargets(nn.Linear(4, 3))
    for _ in range(MAX_READS):
        assert not reader.is_over
        reader.clear()
        reader.watch(ForwardCall(model(torch.randn(8, 4))))
        assert not [*reader.find()]
    assert reader.is_over


def test_labels_are_compared_in_their_places():
    tokens = torch.randint(0, V, (B, T))
    ahead = tokens.roll(-1, 1)
    ahead[:, -1] = -100
    by_one = (1, B * (T - 1))
    assert shift_of(ahead, tokens) == shift_of(ahead.flatten(), tokens) == shift_of(tokens[:, 1:], tokens) == by_one
    assert shift_of(tokens, tokens) == (0, B * T)
    assert shift_of(torch.randint(0, V, (B, T)), tokens) is None
    assert shift_of(torch.randint(0, V, (B,)), tokens) is None, "one label for each text"
    assert shift_of(torch.zeros(B * T, dtype=torch.long), torch.zeros(B, T, dtype=torch.long)) is None
    assert shift_of(ahead[:2, :20], tokens[:2]) is None, "38 labels are too few"
