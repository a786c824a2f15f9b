"""Judge the labels of samples: whether they can be classes, and whether both parts have the same classes."""

# N = samples, K = classes

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from gradwatch.data import Splits
from gradwatch.errors import GradwatchError, did_you_mean

Labels = NDArray[Any]
LABEL_LISTS = ("targets", "labels", "_labels")
"""Attributes of datasets that hold the label of each sample."""
MAX_NAMES = 6  # classes to name in a message


def could_be_classes(labels_N: Labels) -> bool:
    """Return whether labels may be classes. They may not if most of them occur once, as prices or identifiers do."""
    counts_K = np.unique(labels_N, return_counts=True)[1]
    return int((counts_K == 1).sum()) * 2 <= len(counts_K)


def refuse_unlikely_classes(labels_N: Labels, *, place: str, remedy: str) -> None:
    """Raise a GradwatchError if labels that are considered classes cannot be classes.

    Args:
        labels_N: Label of each sample.
        place: The labels in the user's words, such as `column 'price'`.
        remedy: What to do, after `expected`.
    """
    if not could_be_classes(labels_N):
        count = len(np.unique(labels_N))
        raise GradwatchError(
            f"{place} has {count:,} different labels in {len(labels_N):,} samples, and most of them occur only once, "
            f"so they cannot be learned as classes; expected {remedy}"
        )


def labels_of(dataset: Any) -> NDArray[np.int64] | None:
    """Return the class number of each sample, shape (N,), or None if that needs a pass over the samples."""
    if isinstance(dataset, IterableDataset):
        return None
    if isinstance(dataset, Subset):
        labels_N = labels_of(dataset.dataset)
        return None if labels_N is None else labels_N[np.asarray(dataset.indices, np.int64)]
    if hasattr(dataset, "class_numbers"):  # of the wrappers in this package
        numbers_N: NDArray[np.int64] | None = dataset.class_numbers()
        return numbers_N
    for attribute in LABEL_LISTS:
        stored = getattr(dataset, attribute, None)
        try:
            labels = np.asarray(stored.cpu() if isinstance(stored, Tensor) else stored)
        except (TypeError, ValueError):  # not one label for each sample
            continue
        # labels of another number belong to something other than the samples
        if labels.shape == (len(dataset),) and labels.dtype.kind in "iu":
            return labels.astype(np.int64)
    return None


def shared_numbers(train: Any, val: Any, *, places: tuple[str, str], key: str) -> NDArray[np.int64] | None:
    """Return the training part's number of each class number of the validation part; None if they agree already.

    Args:
        train: Dataset that may map names of classes to numbers, in `class_to_idx`.
        val: Dataset of the validation part.
        places: The parts in the user's words, such as their folders.
        key: Config key for messages.

    Raises:
        GradwatchError: The validation part has classes that the training part lacks.
    """
    for attribute in ("wnid_to_idx", "class_to_idx"):  # ImageNet: names of classes are not unique, its ids are
        ours, theirs = getattr(train, attribute, None), getattr(val, attribute, None)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            break
    else:
        return None
    if unknown := [name for name in theirs if name not in ours]:
        near = did_you_mean(str(unknown[0]), map(str, ours))
        raise GradwatchError(
            f"{key}: {places[1]} has {_count(len(unknown))} that {places[0]} lacks: {listed(unknown)}; expected only "
            f"classes of the training part ({listed(ours)}){near}; rename or remove the others"
        )
    if all(ours[name] == number for name, number in theirs.items()):
        return None
    shared_K = np.zeros(max(theirs.values()) + 1, np.int64)
    for name, number in theirs.items():
        shared_K[number] = ours[name]
    return shared_K


def missing_classes(splits: Splits) -> tuple[str, ...]:
    """Return a sentence for each part of the data that lacks classes, as far as labels are known without reading."""
    if splits.spec.kind != "classes":
        return ()
    train_N, val_N = labels_of(splits.train), labels_of(splits.val) if splits.val is not None else None
    if train_N is None:
        return ()
    total = splits.spec.outputs
    trained = set(train_N.tolist())
    found: list[str] = []
    if len(trained) < total:
        absent = [k for k in range(total) if k not in trained]
        found.append(f"no training sample belongs to {_of(absent, total, splits.classes)}")
    if val_N is not None:
        validated = set(val_N.tolist())
        if unseen := sorted(validated - trained):
            found.append(
                f"validation has {_count(len(unseen))} without a training sample, which counts as wrong: "
                f"{listed(_names(unseen, splits.classes))}"
            )
        if absent := sorted(trained - validated):
            found.append(f"no validation sample belongs to {_of(absent, total, splits.classes)}")
    return tuple(f"data: {text}" for text in found)


def class_names(names: Iterable[Any]) -> tuple[str, ...]:
    """Return names of classes as text; for a class of ImageNet with several names, return the first."""
    return tuple(str(name[0] if isinstance(name, (tuple, list)) and name else name) for name in names)


def listed(names: Iterable[Any]) -> str:
    """Return the first names, and how many follow."""
    texts = [str(name) for name in names]
    more = f" and {len(texts) - MAX_NAMES:,} more" if len(texts) > MAX_NAMES else ""
    return ", ".join(texts[:MAX_NAMES]) + more


def _of(numbers: Sequence[int], total: int, classes: Sequence[str]) -> str:
    return f"{len(numbers):,} of {total:,} classes: {listed(_names(numbers, classes))}"


def _names(numbers: Sequence[int], classes: Sequence[str]) -> list[str]:
    return [classes[k] if k < len(classes) else str(k) for k in numbers]


def _count(number: int) -> str:
    return "a class" if number == 1 else f"{number:,} classes"
