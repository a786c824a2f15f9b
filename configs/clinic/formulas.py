"""Formulas as people write them: one that is singular where the model is sure, and one that is not."""

import torch
from torch import Tensor, nn


def log_of_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of (N, C) logits by its formula. Where softmax rounds to 0, it takes the log of zero."""
    one_hot = nn.functional.one_hot(targets, logits.shape[-1])
    return -(one_hot * torch.softmax(logits, dim=-1).log()).sum(-1).mean()


def log_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the same cross entropy, in the form that has no singular point."""
    one_hot = nn.functional.one_hot(targets, logits.shape[-1])
    return -(one_hot * torch.log_softmax(logits, dim=-1)).sum(-1).mean()


def mean_of_a_mean(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy divided by the batch once more, as where a mean is taken for a sum."""
    return nn.functional.cross_entropy(logits, targets) / len(targets)
