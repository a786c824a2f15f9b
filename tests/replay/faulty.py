"""Data and models, each ill in one way, for configs by target."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

BAD = 77
"""Index of the sample that is not like the others."""


def data(*, bad=None):
    """Return 256 samples of 8 numbers and their class, one of two; one sample is multiplied by `bad`."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(256, 8, generator=generator)
    targets = (inputs.sum(1) > 0).long()
    if bad is not None:
        inputs[BAD] *= float(bad)
    return TensorDataset(inputs, targets)


class Two(nn.Module):
    """Two layers, with something between them that may be ill.

    Args:
        scale: Factor on what goes into the second layer.
        dropout: Fraction that is dropped.
        share: Divide by the sum of positive parts, which is zero where there are none.
    """

    def __init__(self, *, scale=1.0, dropout=0.0, share=False):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(dropout)
        self.second = nn.Linear(16, 2)
        self.scale = scale
        self.share = share

    def forward(self, inputs):
        hidden = self.dropout(self.norm(self.first(inputs)))
        if self.share:
            hidden = (hidden - 1.5).relu()
            hidden = hidden / hidden.sum(1, keepdim=True)  # here
        return self.second(hidden * self.scale)
