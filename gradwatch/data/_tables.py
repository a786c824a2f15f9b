"""Convert columns of numbers and labels to samples: classes or values, validation part, standardized features."""

# N = samples, F = features, W = width of the target

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from gradwatch.data import Splits
from gradwatch.data._labels import class_names, could_be_classes, listed, refuse_unlikely_classes
from gradwatch.data._memory import InMemory
from gradwatch.data._split import random_split, stratified_split
from gradwatch.errors import GradwatchError
from gradwatch.records import DataSpec

Array = NDArray[Any]
Kind = Literal["classes", "values"]


class Choice(NamedTuple):
    """The kind of targets, the reason if it was guessed, and notes for the user."""

    kind: Kind
    guess: str = ""
    notes: tuple[str, ...] = ()


def choose_kind(targets_N: Array, asked: Literal["auto", "classes", "values"], *, place: str) -> Choice:
    """Return the kind of targets: by default, integers, booleans and strings are classes, and floats are values.

    Args:
        targets_N: Labels of any type, shape (N,), or values, shape (N,) or (N, W).
        asked: The kind that the user asked for.
        place: The targets in the user's words, such as `column 'price'`.

    Raises:
        GradwatchError: Most labels occur once, so that they cannot be classes.
    """
    if asked != "auto":
        return Choice(asked)
    kind = targets_N.dtype.kind
    if kind == "f":
        guess = f"fractions in {place}"
        is_whole = targets_N.size == len(targets_N) and bool((targets_N == np.floor(targets_N)).all())
        if not (is_whole and could_be_classes(targets_N)):
            return Choice("values", guess)
        labels = np.unique(targets_N)
        note = (
            f"data.kind: {place} is read as values, for a regression: its {len(labels):,} different numbers are "
            f"stored as fractions ({listed(labels)}); set data.kind: values if that is right, else data.kind: classes"
        )
        return Choice("values", guess, (note,))
    words = kind not in "iub"
    if targets_N.size == len(targets_N):  # other shapes are refused by `encode`
        meant = "a column of labels" if words else "data.kind: values, to predict the number"
        remedy = f"{meant}; or data.kind: classes, if they are"
        refuse_unlikely_classes(targets_N, place=f"data.kind: {place}", remedy=remedy)
    return Choice("classes", f"{'words' if words else 'whole numbers'} in {place}")


def encode(targets_N: Array, kind: Kind) -> tuple[Array, int, tuple[str, ...]]:
    """Convert targets to the form that a loss expects.

    Args:
        targets_N: Labels of any type, shape (N,), or values, shape (N,) or (N, W).
        kind: Kind of the targets.

    Returns:
        Class numbers in the sorted order of the labels, int64, shape (N,), the number of classes, and their labels; or
        values, float32, shape (N, W), W, and no labels.

    Raises:
        GradwatchError: Values are not real numbers, or there is not one label per sample, or only one class.
    """
    if kind == "classes":
        return _encode_classes(targets_N)
    if targets_N.dtype.kind not in "fiub":
        raise GradwatchError(f"data.kind: got values, but the targets are {targets_N.dtype}; expected real numbers")
    values = targets_N.astype(np.float32).reshape(len(targets_N), -1)
    return values, values.shape[1], ()


def _encode_classes(targets_N: Array) -> tuple[Array, int, tuple[str, ...]]:
    if targets_N.size != len(targets_N):  # (N, 1) is allowed, and flattened below
        raise GradwatchError(
            f"data.targets: got classes of shape {targets_N.shape}, expected one label per sample; take the argmax of "
            "one-hot rows first, and for several values per sample set kind: values"
        )
    labels, numbers_N = np.unique(targets_N, return_inverse=True)
    if len(labels) < 2:
        raise GradwatchError(
            f"data: every target is {labels[0]!r}, expected at least two classes; is this the right target?"
        )
    return numbers_N.reshape(-1).astype(np.int64), len(labels), class_names(labels.tolist())


def held_out(targets_N: Array, kind: Kind, *, val_fraction: float, seed: int) -> tuple[Array, Array]:
    """Return the indices of the training and the validation part; classes are split within each label."""
    if kind == "classes":
        return stratified_split(targets_N, val_fraction=val_fraction, seed=seed)
    return random_split(len(targets_N), val_fraction=val_fraction, seed=seed)


def standardize(train: Array, val: Array) -> tuple[Array, Array]:
    """Subtract the training mean from both parts, and divide them by the training standard deviation.

    A feature that is constant in the training part is only shifted.
    """
    # statistics of the training part alone: the validation part must not leak into training
    mean, deviation = train.mean(axis=0), train.std(axis=0)
    deviation[deviation == 0] = 1.0
    return (train - mean) / deviation, (val - mean) / deviation


def splits(
    train: tuple[Array, Array],
    val: tuple[Array, Array],
    *,
    choice: Choice,
    outputs: int,
    classes: tuple[str, ...],
    standardized: bool,
) -> Splits:
    """Convert both parts to datasets in memory; an empty validation part becomes None.

    Args:
        train: Inputs and encoded targets.
        val: Inputs and encoded targets for validation.
        choice: Kind of the targets.
        outputs: Number of classes, or width of the targets.
        classes: Names of the classes, if there are any.
        standardized: Whether to standardize the inputs.
    """
    (train_x, train_y), (val_x, val_y) = train, val
    if not len(train_x):
        raise GradwatchError("data: the training part is empty, expected at least one sample")
    if standardized:
        # in float64, which also turns uint8 inputs into numbers that can be negative
        train_x, val_x = standardize(train_x.astype(np.float64), val_x.astype(np.float64))
    return Splits(
        _dataset(train_x, train_y),
        _dataset(val_x, val_y) if len(val_x) else None,
        DataSpec(input_shape=train_x.shape[1:], outputs=outputs, kind=choice.kind),
        classes=classes,
        guess=choice.guess,
        notes=choice.notes,
    )


def _dataset(inputs: Array, targets: Array) -> InMemory:
    kept = inputs if inputs.dtype == np.uint8 else inputs.astype(np.float32)  # InMemory scales uint8 when it reads
    return InMemory(torch.from_numpy(np.ascontiguousarray(kept)), torch.from_numpy(np.ascontiguousarray(targets)))
