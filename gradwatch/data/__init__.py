"""Define datasets, one file each: the file's name is the dataset's name, and its keyword arguments come from YAML."""

# B = samples of a batch; torch is imported inside functions, since listing the names of datasets does not need it

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from gradwatch.errors import GradwatchError
from gradwatch.records import DataInfo, DataSpec

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset


@dataclass(frozen=True, slots=True)
class Splits:
    """Training samples, validation samples, and their shape and kind for the model.

    Args:
        train: Map-style dataset of (inputs, targets), or an IterableDataset.
        val: Dataset of the same kind for validation, or None.
        spec: Shape of the inputs, and kind of the targets.
        classes: Names of the classes in the order of their numbers; empty if they have none.
        guess: Reason for a guessed kind of the targets, such as `whole numbers in column 'age'`; empty if the user set
            it.
        notes: Sentences about the data that the user must know before training, such as about folders left out.
        vocabulary: Texts of the tokens in the order of their numbers; empty if they have none.
        features: Names of the inputs, such as the columns of a table; empty if they have none.
    """

    train: Dataset[Any]
    val: Dataset[Any] | None
    spec: DataSpec
    classes: tuple[str, ...] = ()
    guess: str = ""
    notes: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    def info(self, name: str) -> DataInfo:
        """Return the size and kind of the data, for the description of the run."""
        return DataInfo(
            name=name,
            samples=_length(self.train),
            held_out=0 if self.val is None else _length(self.val),
            kind=self.spec.kind,
            outputs=self.spec.outputs,
            guess=self.guess,
        )


def _length(dataset: Dataset[Any]) -> int | None:
    from torch.utils.data import IterableDataset

    return None if isinstance(dataset, IterableDataset) else len(cast("Sized", dataset))


@runtime_checkable
class Batched(Protocol):
    """A dataset that reads a whole batch in one call, without randomness: `is_random` is False."""

    is_random: bool

    def __len__(self) -> int: ...

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples, stacked as by `default_collate`."""
        ...


def from_target(result: object) -> Splits:
    """Convert the result of a user's data factory to splits, and infer the spec if the factory gave none.

    Args:
        result: Splits, a pair (training dataset, validation dataset or None), or a training dataset alone.

    Raises:
        GradwatchError: The result is not a dataset, or its spec cannot be inferred.
    """
    from gradwatch.data import _inspect
    from gradwatch.data._labels import shared_numbers

    if isinstance(result, Splits):
        return result
    found = tuple(result) if isinstance(result, (tuple, list)) and len(result) == 2 else (result, None)
    try:
        train = _inspect.as_dataset(found[0])
        val = None if found[1] is None else _inspect.as_dataset(found[1])
        places = ("the training part", "the validation part")
        if shared_numbers(train, val, places=places, key="class_to_idx") is not None:
            raise GradwatchError(
                "class_to_idx: the validation part numbers the classes differently than the training part, expected "
                "one number for each class; give both parts folders with the same names"
            )
        return Splits(train, val, _inspect.infer_spec(train), guess="the type of the targets")
    except GradwatchError as error:
        raise GradwatchError(f"data.target: {error}") from error


def check(splits: Splits, name: str) -> Splits:
    """Check that both parts are usable: datasets, not empty, with samples of inputs and targets.

    Args:
        splits: Result of a data plugin or factory.
        name: The user's name for the data, such as `digits`.

    Returns:
        The splits, with a note for each part that lacks classes.

    Raises:
        GradwatchError: A part is not usable.
    """
    from gradwatch.data import _inspect
    from gradwatch.data._labels import missing_classes

    for part, dataset in (("training", splits.train), ("validation", splits.val)):
        if dataset is None:
            continue
        try:
            _inspect.check_dataset(dataset, splits.spec)
        except GradwatchError as error:
            raise GradwatchError(f"data: {name}, {part} part: {str(error).removeprefix('data: ')}") from error
    return replace(splits, notes=splits.notes + missing_classes(splits))
