"""Padding that a model reads in place of its tokens is reported; padding that is masked or packed is not."""

# B = sequences, T = positions, V = vocabulary

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

import gradwatch
from gradwatch.diagnose.rank import diagnose
from gradwatch.events import PADDING_ATTENDED, PADDING_READ
from gradwatch.probe.activations.padding import MAX_STEPS, PaddingReader
from gradwatch.probe.output_reader import ForwardCall
from gradwatch.records import Severity

B, T, V, WIDTH, CLASSES = 32, 40, 50, 16, 4


def padded(*, longest=12, shortest=4):
    """Return tokens that end in zeros, and the number of the others in each sequence."""
    lengths = torch.randint(shortest, longest + 1, (B,))
    lengths[:2] = torch.tensor([shortest, longest])
    return torch.randint(1, V, (B, T)).where(torch.arange(T) < lengths[:, None], 0), lengths


class Recurrent(nn.Module):
    """A recurrent layer over tokens, which is read in one of the ways in which people read it."""

    def __init__(self, read, cell=nn.LSTM, **settings):
        super().__init__()
        self.embed, self.cell = nn.Embedding(V, WIDTH, padding_idx=0), cell(WIDTH, WIDTH, **settings)
        self.read, self.head = read, nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens, lengths):
        x = self.embed(tokens if self.cell.batch_first else tokens.T)
        if self.read == "packed":
            lengths = lengths.clamp(max=T)
            state = self.cell(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))[1]
            return self.head(state[0][-1])
        states = self.cell(x)[0]
        if self.read == "last":
            return self.head(states[:, -1] if self.cell.batch_first else states[-1])
        return self.head(states[torch.arange(len(tokens)), lengths - 1])


class Frames(nn.Module):
    """A recurrent layer over numbers, which is read at the end or at the last frame."""

    def __init__(self, *, at_end):
        super().__init__()
        self.cell, self.head, self.at_end = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, CLASSES), at_end

    def forward(self, frames):
        states, last = self.cell(frames)[0], frames.any(2).sum(1) - 1
        return self.head(states[:, -1] if self.at_end else states[torch.arange(len(frames)), last])


class Pooled(nn.Module):
    """Attention or convolutions over tokens, and a mean."""

    def __init__(self, mask=None):
        super().__init__()
        self.embed, self.mask = nn.Embedding(V, WIDTH), mask
        self.attend = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)
        self.convolve, self.head = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens, lengths):
        x = self.embed(tokens)
        if self.mask is None:
            return self.head(self.convolve(x.mT).relu().mean(2))
        x = self.attend(x, src_key_padding_mask=self.mask(tokens))
        return self.head((x * (tokens != 0)[..., None]).sum(1) / lengths[:, None])


def events_of(model, *, batch=padded, steps=3):
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(steps):
            loss = F.cross_entropy(model(*batch()), torch.randint(CLASSES, (B,)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    kinds = {PADDING_READ.name, PADDING_ATTENDED.name}
    return [event for event in monitor.history.events if event.kind in kinds]


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_a_recurrent_layer_that_is_read_at_its_padding_is_named(cell, batch_first):
    (event,) = events_of(Recurrent("last", cell, batch_first=batch_first))
    assert (event.kind, event.layer, event.step) == (PADDING_READ.name, "cell", 0)
    assert event.values["decades"] > 3
    assert 0.7 < event.values["padding"] < 0.9


@pytest.mark.parametrize("read", ["packed", "its last token"])
def test_a_recurrent_layer_that_is_read_at_its_last_token_is_not_reported(read):
    assert not events_of(Recurrent(read, batch_first=True))


def test_padding_before_the_tokens_is_forgotten_and_not_reported():
    def batch():
        tokens, lengths = padded()
        return tokens.flip(1), lengths

    assert not events_of(Recurrent("last", batch_first=True), batch=batch)


def test_convolutions_and_a_mean_may_read_padding():
    assert not events_of(Pooled())


def test_tokens_that_also_stand_within_a_sequence_are_no_padding():
    def batch():
        tokens, lengths = padded()
        return tokens.where(torch.rand(B, T) < 0.8, 0), lengths

    assert not events_of(Recurrent("last", batch_first=True), batch=batch)


def test_sequences_of_one_length_have_no_padding():
    assert not events_of(Recurrent("last", batch_first=True), batch=lambda: padded(shortest=12))


def test_a_mask_of_the_opposite_meaning_is_reported_with_its_attention():
    (event,) = events_of(Pooled(mask=lambda tokens: tokens != 0))
    assert (event.kind, event.layer, event.step) == (PADDING_ATTENDED.name, "attend.self_attn", 0)


def test_a_mask_of_the_right_meaning_is_not_reported():
    assert not events_of(Pooled(mask=lambda tokens: tokens == 0))


def test_a_model_without_tokens_is_read_at_a_few_steps_only():
    model, reader = nn.Linear(4, 3), PaddingReader(nn.Linear(4, 3))
    for _ in range(MAX_STEPS):
        assert not reader.is_over
        reader.clear()
        reader.watch(ForwardCall(model(torch.randn(8, 4))))
        assert not [*reader.find()]
    assert reader.is_over


def test_what_a_device_sends_later_is_reported_later(monkeypatch):
    class Slow:
        is_ready = False

        def __init__(self, tensors):
            self._arrays = {name: tensor.numpy() for name, tensor in tensors.items()}

        def values(self):
            return self._arrays

    monkeypatch.setattr("gradwatch.probe.activations.padding.HostTransfer", Slow)
    model = Recurrent("last", batch_first=True)
    reader = PaddingReader(model)
    reader.clear()
    scores = model(*padded())
    reader.watch(ForwardCall(scores))
    F.cross_entropy(scores, torch.randint(CLASSES, (B,))).backward()
    assert not [*reader.find()]
    Slow.is_ready = True
    ((kind, layer, _, _),) = reader.find()
    assert (kind, layer) == (PADDING_READ.name, "cell")


def warnings_of(model, *, batch, steps=60):
    torch.manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for _ in range(steps):
            *inputs, classes = batch()
            loss = F.cross_entropy(model(*inputs), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    causes = [diagnosis.cause_id for diagnosis in diagnose(monitor.history)]
    found = [finding for finding in monitor.findings() if finding.severity >= Severity.WARNING]
    return [(finding.kind, finding.layer, finding.onset) for finding in found], causes


def test_the_cause_is_named():
    def batch():
        tokens, lengths = padded(longest=8)
        return tokens, lengths, tokens[:, 0] % CLASSES

    found, (cause, *_) = warnings_of(Recurrent("last", nn.RNN, batch_first=True), batch=batch)
    assert (found, cause) == ([("vanishing-gradient", "cell", 0)], "reads-padding")


@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("at_end", [True, False])
def test_numbers_that_end_in_zeros_are_judged_by_the_gradients_of_the_layer(scale, at_end):
    def batch():
        frames = torch.randn(B, 2 * T, WIDTH) * (padded(longest=8)[0] != 0).repeat(1, 2)[..., None]
        frames[:, T:] = 0
        return scale * frames, frames[:, 0].argmax(1) % CLASSES

    found, causes = warnings_of(Frames(at_end=at_end), batch=batch)
    assert [kind for kind, *_ in found if kind == "vanishing-gradient"] == ["vanishing-gradient"] * at_end
    assert ("reads-padding" in causes) == at_end
