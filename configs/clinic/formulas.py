"""Formulas as people write them: one that is singular where the model is sure, one that is not, one that is small."""

import torch
from torch import Tensor, nn


def likelihood_by_hand(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of each class against the rest, by its formula.

    Above 17, a float32 sigmoid is exactly 1, so this takes the log of zero as soon as the model is sure.
    """
    y = nn.functional.one_hot(targets, logits.shape[-1])
    p = torch.sigmoid(logits)
    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()


def likelihood(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the same number in the form that has no singular point."""
    y = nn.functional.one_hot(targets, logits.shape[-1])
    return nn.functional.binary_cross_entropy_with_logits(logits, y.float())


class WeightedCrossEntropy(nn.Module):
    """Cross entropy times a weight, as one term of a larger loss is weighted.

    Args:
        weight: Factor on the loss, and so on every gradient.
    """

    def __init__(self, *, weight: float) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the weighted mean over the batch."""
        return self.weight * nn.functional.cross_entropy(logits, targets)
