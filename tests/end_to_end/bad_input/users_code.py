"""A user's own module, in which things go wrong."""

import warnings

import torch
from torch import nn
from torch.utils.data import TensorDataset


class Linear(nn.Module):
    def __init__(self, outputs=10, stride=1):
        super().__init__()
        self.head = nn.Linear(64, outputs)
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        return self.head(images.flatten(1))


class Pair(Linear):
    def forward(self, images):
        return super().forward(images), images


class Buggy(Linear):
    def __init__(self, after=0):
        super().__init__()
        self.after = after

    def forward(self, images):
        outputs = super().forward(images)
        if self.calls > self.after:
            raise RuntimeError("my own bug")
        return outputs


class Warning_(Linear):
    def forward(self, images):
        warnings.warn("my own\n   warning", stacklevel=1)
        return super().forward(images)


class Frozen(Linear):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class Channels(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images):
        return self.conv(images)


def number():
    return 3


def failing():
    return {}["k"]


def empty():
    return TensorDataset(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))


def per_sample(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def detached(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets).detach()


def plain(outputs, targets):
    return 3.0


def alone(outputs):
    return outputs


constant = 3


class InPlace(Linear):
    def forward(self, images):
        hidden = torch.sigmoid(images.flatten(1))
        outputs = self.head(hidden)
        gates = torch.sigmoid(outputs)
        gates += 1
        return outputs * gates
