"""Layers with one planted mistake each. The mistake is in the line that ends with the comment `planted`."""

import inspect

import torch
from torch import nn
from torch.nn import functional as F

CALLS = [0]


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(6, 6)


class Squeezes(Base):
    def forward(self, x):
        return self.dense(x)[:, :1].squeeze()  # planted


class AssumesTheBatchSize(Base):
    def forward(self, x):
        return self.dense(x).view(4, 6)  # planted


class LogOfZero(Base):
    def forward(self, x):
        return self.dense(x) + torch.log(x.abs())  # planted


class RootOfZero(Base):
    def forward(self, x):
        squares = (x * x).sum(-1, keepdim=True)
        return self.dense(x) + squares.sqrt()  # planted


class SoftmaxByHand(Base):
    def forward(self, x):
        powers = torch.exp(100 * self.dense(x))  # planted
        return powers / powers.sum(-1, keepdim=True)


class SubtractsInPlace(Base):
    def forward(self, x):
        x.sub_(x.mean(-1, keepdim=True))  # planted
        return self.dense(x)


class WritesThroughAView(Base):
    def forward(self, x):
        flat = x.view(-1)
        flat[0] = 7  # planted
        return self.dense(x)


class ActivatesItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(x)  # planted


class CountsItsCalls(Base):
    def forward(self, x):
        CALLS[0] += 1
        return self.dense(x) + CALLS[0]  # planted


class HoldsAPlainTensor(Base):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(6)

    def forward(self, x):
        return self.dense(x) * self.scale  # planted


class MakesAConstant(Base):
    def forward(self, x):
        ones = torch.ones(6)
        return self.dense(x) * ones  # planted


class HoldsAListOfLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(6, 6), nn.Dropout(0.5)]

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)  # planted
        return x


class KeepsItsHiddenState(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.hidden = nn.RNNCell(6, 6), None

    def forward(self, x):
        self.hidden = self.cell(x, self.hidden)
        return self.hidden


class AveragesInEvaluation(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)  # planted
        return self.dense(x - self.mean)


class Collects(Base):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x)
        return self.dense(x)


class SoftmaxOverTheBatch(Base):
    def forward(self, x):
        return torch.softmax(self.dense(x), 0)  # planted


class DividesByTheLargest(Base):
    def forward(self, x):
        h = self.dense(x)
        return h / h.abs().max()  # planted


class ReshapesInsteadOfTransposing(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(6, 6)

    def forward(self, x):
        samples, steps, width = x.shape
        steps_first = x.reshape(steps, samples, width)  # planted
        return self.rnn(steps_first)[0].transpose(0, 1)


class ReadsTheBatchAsSteps(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(6, 6)

    def forward(self, x):
        return self.rnn(x)[0]  # planted


class RollsTheBatch(Base):
    def forward(self, x):
        return self.dense(torch.cat([x[1:], x[:1]]))  # planted


class GatesByAColumn(Base):
    def forward(self, x):
        gate = self.dense(x)[:, :1]
        return gate * x.mean(1)  # planted


class DropsAlways(Base):
    def forward(self, x):
        return F.dropout(self.dense(x), 0.3)  # planted


class DropsAttentionAlways(Base):
    def forward(self, x):
        h = self.dense(x)
        return F.scaled_dot_product_attention(h, h, h, dropout_p=0.2)  # planted


class KeepsItsPartsTraining(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def train(self, mode=True):
        self.training = mode
        return self

    def forward(self, x):
        return self.norm(x)


FLAT, SEQUENCE = (4, 6), (4, 3, 6)
BAD = (
    (Squeezes, FLAT, "shapes", "`squeeze` in Squeezes drops an axis of size 1"),
    (AssumesTheBatchSize, FLAT, "shapes", "a batch of 1 raises RuntimeError: shape '[4, 6]' is invalid"),
    (LogOfZero, FLAT, "extremes", "zeros: a gradient is not finite"),
    (RootOfZero, FLAT, "extremes", "a gradient is not finite, from the gradient of `sqrt`"),
    (SoftmaxByHand, FLAT, "extremes", "huge values (10000): the output is not finite, from `exp`"),
    (SubtractsInPlace, FLAT, "input", "input 0 is changed in place by `sub_`"),
    (WritesThroughAView, FLAT, "input", "input 0 is changed in place"),
    (ActivatesItsInput, FLAT, "input", "by `relu_` in `act` (ReLU)"),
    (CountsItsCalls, FLAT, "deterministic", "first in `add` in CountsItsCalls"),
    (HoldsAPlainTensor, FLAT, "dtype", "in bfloat16 the output is float32: `mul`"),
    (HoldsAPlainTensor, FLAT, "device", "leaves `scale` behind, a plain tensor: use register_buffer"),
    (MakesAConstant, FLAT, "device", "not on the expected device meta"),
    (HoldsAListOfLayers, FLAT, "dtype", "leaves `layers` behind, layers in a plain container"),
    (KeepsItsHiddenState, FLAT, "state", "depends on the calls before it; they change `hidden`"),
    (AveragesInEvaluation, FLAT, "state", "they change `mean`"),
    (Collects, FLAT, "state", "`seen` grows with every call"),
    (SoftmaxOverTheBatch, FLAT, "samples", "`softmax` in SoftmaxOverTheBatch mixes the samples"),
    (DividesByTheLargest, FLAT, "samples", "`div` in DividesByTheLargest mixes the samples"),
    (ReshapesInsteadOfTransposing, SEQUENCE, "samples", "as a reshape instead of a transpose does"),
    (ReadsTheBatchAsSteps, SEQUENCE, "samples", "in `rnn` (RNN) mixes the samples of the batch; if axis 1"),
    (RollsTheBatch, FLAT, "samples", "`cat` in RollsTheBatch puts a sample where another one belongs"),
    (GatesByAColumn, FLAT, "broadcast", "`mul` broadcasts (5, 1) with (5,) to (5, 5)"),
    (DropsAlways, FLAT, "modes", "drops values in eval mode too"),
    (DropsAttentionAlways, SEQUENCE, "modes", "drops values in eval mode too"),
    (KeepsItsPartsTraining, FLAT, "modes", "`norm` stays in training mode after model.eval()"),
)
"""The layer, the shape of its input, the property that fails, and a part of the text."""


def planted_line(layer):
    """Return the line of the mistake, or 0 if no single line makes it."""
    lines, first = inspect.getsourcelines(layer)
    return next((first + i for i, text in enumerate(lines) if text.rstrip().endswith("# planted")), 0)
