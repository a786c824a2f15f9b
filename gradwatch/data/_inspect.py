"""Inspect a dataset: check that it is usable, and infer the spec that a model needs."""

from __future__ import annotations

import copy
from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from gradwatch.data._labels import labels_of, refuse_unlikely_classes
from gradwatch.data._memory import InMemory
from gradwatch.data._randomness import preserved, seed_global
from gradwatch.data._sample_files import read_sample
from gradwatch.errors import GradwatchError
from gradwatch.records import DataSpec

RETURN_SPLITS = "return gradwatch.data.Splits(train, val, DataSpec(...)) from the factory"


def as_dataset(found: Any) -> Dataset[Any]:
    """Return a dataset unchanged, or a plain TensorDataset of two tensors as the faster `InMemory`."""
    # `type is`, not isinstance: a subclass may have its own __getitem__
    if type(found) is TensorDataset and len(found.tensors) == 2:
        return InMemory(*found.tensors)
    _require_dataset(found)
    dataset: Dataset[Any] = found
    return dataset


def check_dataset(dataset: Any, spec: DataSpec) -> None:
    """Raise a GradwatchError if a dataset is not usable; the caller adds the name of the dataset."""
    _require_dataset(dataset)
    if is_empty(dataset):
        raise GradwatchError("is empty, expected at least one sample; check its files and data.val_fraction")
    inputs, _ = first_sample(dataset)
    if isinstance(inputs, Tensor) and tuple(inputs.shape) != spec.input_shape:
        raise GradwatchError(
            f"the inputs of the first sample have shape {tuple(inputs.shape)}, expected {spec.input_shape}"
        )
    # labels in memory are cheap to check; labels of other datasets need a pass over all samples
    if isinstance(dataset, InMemory) and spec.kind == "classes":
        _check_labels(dataset.targets, spec.outputs)


def is_empty(dataset: Any) -> bool:
    """Return whether a dataset has no samples; False for a stream, which shows this only when it is read."""
    return not isinstance(dataset, IterableDataset) and not len(dataset)


def first_sample(dataset: Any) -> tuple[Any, Any]:
    """Return inputs and targets of sample 0, without changing the global random generators."""
    with preserved():
        seed_global(0)
        sample = _first_of_stream(dataset) if isinstance(dataset, IterableDataset) else read_sample(dataset, 0)
    if not isinstance(sample, (tuple, list)) or len(sample) != 2:
        length = f" of {len(sample)}" if isinstance(sample, (tuple, list, dict)) else ""
        raise GradwatchError(f"a sample is a {type(sample).__name__}{length}, expected a pair (inputs, targets)")
    inputs, targets = sample
    if type(inputs).__module__.partition(".")[0] == "PIL":  # by name, so that PIL need not be imported
        raise GradwatchError(
            "the inputs are a PIL image, expected a tensor; end its transforms with ToImage() and "
            "ToDtype(torch.float32, scale=True)"
        )
    return inputs, targets


def infer_spec(dataset: Any) -> DataSpec:
    """Infer the kind of the targets from the first sample and from usual attributes of datasets.

    Raises:
        GradwatchError: The dataset is empty, or its targets are ambiguous.
    """
    if is_empty(dataset):
        raise GradwatchError("the training part is empty, expected at least one sample")
    inputs, targets = (_as_tensor(part) for part in first_sample(dataset))
    shape = tuple(inputs.shape)
    if targets.is_floating_point():
        return DataSpec(input_shape=shape, outputs=targets.shape[-1] if targets.ndim else 1, kind="values")
    if targets.ndim == 0:
        if (labels_N := labels_of(dataset)) is not None:
            remedy = f"float targets for a regression; or, if they are classes, {RETURN_SPLITS}"
            refuse_unlikely_classes(labels_N, place="the training part", remedy=remedy)
        return DataSpec(input_shape=shape, outputs=count_classes(dataset), kind="classes")
    # a whole number for each whole number: the next token at each position
    if targets.shape == inputs.shape and targets.ndim == 1 and not inputs.is_floating_point():
        return DataSpec(input_shape=shape, outputs=_count_tokens(dataset), kind="tokens")
    raise GradwatchError(
        f"cannot tell what targets of shape {tuple(targets.shape)} and {targets.dtype} mean for inputs of shape "
        f"{shape} and {inputs.dtype}; {RETURN_SPLITS}"
    )


def count_classes(dataset: Any) -> int:
    """Return the number of classes that a dataset states, or the highest stored label + 1."""
    for attribute in ("num_classes", "vocab_size"):
        if isinstance(found := getattr(dataset, attribute, None), int):
            return found
    classes, is_stream = getattr(dataset, "classes", None), isinstance(dataset, IterableDataset)
    if isinstance(classes, Sized):
        return len(classes)
    for attribute in ("targets", "labels", "_labels"):
        labels = getattr(dataset, attribute, None)
        # labels of another number belong to something other than the samples
        if labels is not None and not is_stream and len(labels) == len(dataset):
            return int(torch.as_tensor(labels).max()) + 1
    raise GradwatchError(
        f"cannot tell how many classes {type(dataset).__name__} has; give it an attribute `classes`, or {RETURN_SPLITS}"
    )


def _count_tokens(dataset: Any) -> int:
    if isinstance(dataset, InMemory):
        return int(max(dataset.inputs.max(), dataset.targets.max())) + 1
    return count_classes(dataset)


def _first_of_stream(dataset: Any) -> Any:
    # a dataset that keeps its own position must begin with the same sample again
    state = copy.deepcopy(dataset.state_dict()) if hasattr(dataset, "state_dict") else None
    try:
        return next(iter(dataset))
    except StopIteration:
        raise GradwatchError("is empty, expected a stream that yields at least one sample") from None
    finally:
        if state is not None and hasattr(dataset, "load_state_dict"):
            dataset.load_state_dict(state)


def _require_dataset(found: Any) -> None:
    if isinstance(found, IterableDataset):
        return
    if not (hasattr(found, "__getitem__") and hasattr(found, "__len__")):
        raise GradwatchError(
            f"got {type(found).__name__}, expected a map-style dataset (with __len__ and __getitem__), or a stream: a "
            "subclass of torch.utils.data.IterableDataset"
        )


def _as_tensor(part: Any) -> Tensor:
    try:
        return torch.as_tensor(part)
    except (TypeError, ValueError, RuntimeError) as error:
        raise GradwatchError(f"cannot tell what a {type(part).__name__} in a sample means; {RETURN_SPLITS}") from error


def _check_labels(targets: Tensor, outputs: int) -> None:
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or high >= outputs:
        raise GradwatchError(f"the labels run from {low} to {high}, expected 0 to {outputs - 1}")
