"""Small data that comes with Python and scikit-learn, for the scripts of this set."""

from __future__ import annotations

import pydoc_data.topics
import re
from collections.abc import Iterator

import numpy as np
import sklearn.datasets
import torch
from torch import Tensor, nn

Split = tuple[Tensor, Tensor, Tensor, Tensor]
"""Inputs and targets for training, then for testing."""


def split(x: Tensor, y: Tensor, test: float = 0.25, seed: int = 11) -> Split:
    """Return a shuffled split."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    cut = int(len(x) * (1 - test))
    return x[order[:cut]], y[order[:cut]], x[order[cut:]], y[order[cut:]]


def digits(*, raw: bool = False) -> Split:
    """Return 8x8 digits as rows of 64 values in 0..1; if raw, in 0..255."""
    x, y = sklearn.datasets.load_digits(return_X_y=True)
    return split(torch.tensor(x, dtype=torch.float32) / 16 * (255 if raw else 1), torch.tensor(y))


def table(name: str, *, raw: bool = False) -> Split:
    """Return one of the tables of scikit-learn: `wine`, `breast_cancer` or `diabetes`; raw, or standardized."""
    x, y = getattr(sklearn.datasets, f"load_{name}")(return_X_y=True)
    inputs = torch.tensor(x, dtype=torch.float32)
    if not raw:
        inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    targets = torch.tensor(y, dtype=torch.float32 if name == "diabetes" else torch.int64)
    return split(inputs, targets)


def text() -> str:
    """Return the help texts of Python, in the order of their names."""
    topics = pydoc_data.topics.topics
    return re.sub(r"[^\x20-\x7e\n]", "", "\n".join(topics[name] for name in sorted(topics)))


def characters(size: int, start: int = 20_000) -> tuple[Tensor, int]:
    """Return a part of the text as the numbers of its characters, and how many characters there are."""
    part = text()[start : start + size]
    numbers = {c: i for i, c in enumerate(sorted(set(part)))}
    return torch.tensor([numbers[c] for c in part]), len(numbers)


def words(size: int, vocabulary: int) -> Tensor:
    """Return a part of the text as the numbers of its words; 0 stands for the rare ones."""
    part = re.findall(r"[a-z]+|[^a-z\s]", text().lower())[:size]
    names, counts = np.unique(part, return_counts=True)
    frequent = names[np.argsort(-counts, kind="stable")][: vocabulary - 1]
    numbers = {str(word): i + 1 for i, word in enumerate(frequent)}
    return torch.tensor([numbers.get(word, 0) for word in part])


def indices(n: int, size: int, seed: int = 5) -> Iterator[Tensor]:
    """Yield batches of indices for ever; each pass over the data has an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(n, generator=generator)
        yield from (order[i : i + size] for i in range(0, n - size + 1, size))


def windows(sequence: Tensor, length: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return a batch of windows of a sequence, and the same windows one place further."""
    starts = torch.randint(len(sequence) - length - 1, (size,), generator=generator)
    places = starts[:, None] + torch.arange(length)
    return sequence[places], sequence[places + 1]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the accuracy in evaluation mode; the mode of the model stays as it was."""
    was_training = model.training
    model.eval()
    correct = (model(x).argmax(1) == y).float().mean().item()
    model.train(was_training)
    return correct
