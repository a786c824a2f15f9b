"""Datasets, one file each; a file is found by its name and builds with keyword arguments from YAML."""

# B = samples of a batch; torch is imported where it is used: listing the names of datasets needs none

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from gradwatch.errors import GradwatchError
from gradwatch.records import DataSpec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset


@dataclass(frozen=True, slots=True)
class Splits:
    """The samples to learn from, those to validate on, and what a model must know of them.

    Args:
        train: Map-style dataset of (inputs, targets).
        val: The same for validation, or None where there is none.
        spec: Shape of the inputs, and what is to be predicted.
    """

    train: Dataset[Any]
    val: Dataset[Any] | None
    spec: DataSpec


@runtime_checkable
class Batched(Protocol):
    """A dataset that reads a whole batch in one go, without randomness: `is_random` is False."""

    is_random: bool

    def __len__(self) -> int: ...

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples, stacked as `default_collate` would stack them."""
        ...


def from_target(result: object) -> Splits:
    """Return what a data factory of the user's gave as splits, and find out the spec where it did not say.

    Args:
        result: Splits, a pair (training dataset, validation dataset or None), or a training dataset alone.
    """
    from gradwatch.data import _inspect

    if isinstance(result, Splits):
        return result
    found = tuple(result) if isinstance(result, (tuple, list)) and len(result) == 2 else (result, None)
    try:
        train = _inspect.as_dataset(found[0])
        val = None if found[1] is None else _inspect.as_dataset(found[1])
        return Splits(train, val, _inspect.infer_spec(train))
    except GradwatchError as error:
        raise GradwatchError(f"data.target: {error}") from error


def check(splits: Splits, name: str) -> None:
    """Make sure that both parts can be trained with: map-style, not empty, samples of inputs and targets.

    Args:
        splits: What a data plugin or factory gave.
        name: What the user calls it, such as `digits`.
    """
    from gradwatch.data import _inspect

    for part, dataset in (("training", splits.train), ("validation", splits.val)):
        if dataset is None:
            continue
        try:
            _inspect.check_dataset(dataset, splits.spec)
        except GradwatchError as error:
            raise GradwatchError(f"data: {name}, {part} part: {error}") from error
