"""Transform and augment samples of any dataset, with transforms named as in torchvision.transforms.v2."""

# B = samples of a batch

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset
from torchvision.transforms import v2

from gradwatch import plugins
from gradwatch.data import Batched, Splits
from gradwatch.data._inspect import first_sample, is_empty
from gradwatch.data._labels import labels_of
from gradwatch.errors import GradwatchError, did_you_mean

Name = str | Mapping[str, Any]
Step = Callable[[Any], Any]

BATCHWISE = (
    v2.CenterCrop,
    v2.ConvertImageDtype,
    v2.Grayscale,
    v2.Identity,
    v2.Normalize,
    v2.Pad,
    v2.Resize,
    v2.RGB,
    v2.ToDtype,
    v2.ToImage,
    v2.ToPureTensor,
)
"""Transforms without randomness that give the same result for a stack of images as for each image."""

MIXING = ("CutMix", "MixUp")
"""Transforms that mix the samples and labels of a batch; they cannot work on the inputs of one sample."""

WRITTEN: dict[str, dict[str, Any]] = {
    "dtype": {name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype)},
    "interpolation": {mode.value: mode for mode in v2.InterpolationMode},
    "policy": {policy.value: policy for policy in v2.AutoAugmentPolicy},
}
"""Keyword arguments whose values YAML can only name, and the values by name."""


@final
@dataclass(frozen=True, slots=True)
class Chain:
    """Transforms, applied one after the other."""

    steps: tuple[Step, ...]

    def __call__(self, inputs: Any) -> Any:
        """Apply the transforms to the inputs of one sample, or of a batch if they are batchwise."""
        for step in self.steps:
            inputs = step(inputs)
        # a tv_tensors.Image would slow down every operation of the model
        return inputs.as_subclass(Tensor) if isinstance(inputs, Tensor) else inputs

    @property
    def batchwise(self) -> bool:
        """Whether the chain, without randomness, gives the same result for a stack of images as for each image."""
        return all(type(step) in BATCHWISE for step in self.steps)  # `type`: a subclass may be random


class PerSample(Dataset[tuple[Any, Any]]):
    """A dataset with inputs that are transformed sample by sample.

    Args:
        base: Returns (inputs, targets) for an index.
        chain: Transforms of the inputs.
    """

    def __init__(self, base: Any, chain: Chain) -> None:
        self.base = base
        self.chain = chain
        self.is_random = not chain.batchwise or bool(getattr(base, "is_random", True))

    def __len__(self) -> int:
        return len(self.base)

    def locate(self, index: int) -> tuple[Any, int]:
        """Return the dataset that reads a sample, and the index of the sample in it."""
        return self.base, index

    def class_numbers(self) -> NDArray[np.int64] | None:
        """Return the class number of each sample, or None if that needs a pass over the samples."""
        return labels_of(self.base)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        inputs, targets = self.base[index]
        return self.chain(inputs), targets


@final
class PerBatch(PerSample):
    """A `Batched` dataset with inputs that batchwise transforms change a whole batch at a time."""

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the samples, stacked."""
        inputs, targets = self.base.batch(indices_B)
        return self.chain(inputs), targets


@final
class TransformedStream(IterableDataset[tuple[Any, Any]]):
    """A stream with inputs that are transformed sample by sample.

    Args:
        base: Yields (inputs, targets).
        chain: Transforms of the inputs.
    """

    FROM_BASE = ("state_dict", "load_state_dict", "set_epoch", "is_sharded")
    """Optional attributes of a stream, which this one has if its base has them."""

    def __init__(self, base: Any, chain: Chain) -> None:
        self.base = base
        self.chain = chain
        self.is_random = not chain.batchwise or bool(getattr(base, "is_random", True))
        if hasattr(base, "shard"):
            self.shard = self._shard

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for inputs, targets in self.base:
            yield self.chain(inputs), targets

    def __getattr__(self, name: str) -> Any:
        if name in self.FROM_BASE:
            return getattr(self.base, name)
        raise AttributeError(name)

    def _shard(self, *, num_shards: int, index: int) -> TransformedStream:
        return TransformedStream(self.base.shard(num_shards=num_shards, index=index), self.chain)


def apply(splits: Splits, *, transform: Sequence[Name] = (), augment: Sequence[Name] = ()) -> Splits:
    """Return the splits with transformed inputs, and with the spec of the transformed inputs.

    Args:
        splits: Inputs are float32 images of shape (C, H, W) from 0 to 1, or any tensors that the transforms accept.
        transform: Transforms of both parts, in this order.
        augment: Transforms of the training samples only, before `transform`: they see the colors of an image, and a
            normalization comes last.

    Raises:
        GradwatchError: A transform fails on the first sample, or the parts get different shapes.
    """
    after, before = compose(transform, key="data.transform"), compose(augment, key="data.augment")
    used = [key for key, names in (("data.augment", augment), ("data.transform", transform)) if names]
    if not used:
        return splits
    train = _wrap(splits.train, Chain(before.steps + after.steps))
    val = None if splits.val is None else _wrap(splits.val, after)
    shape = _try(train, key=" and ".join(used))
    # one model gets both parts, so their inputs need one shape
    if val is not None and (val_shape := _try(val, key="data.transform")) != shape:
        raise GradwatchError(
            f"data.augment: makes inputs of shape {shape}, but validation has {val_shape}; expected one shape, "
            "so add a Resize or CenterCrop to data.transform"
        )
    return replace(splits, train=train, val=val, spec=replace(splits.spec, input_shape=shape))


def compose(names: Sequence[Name], *, key: str = "data.transform") -> Chain:
    """Return a chain of the named transforms.

    Args:
        names: Each is one of three: the name of a class of torchvision.transforms.v2, such as `RandomHorizontalFlip`;
            a mapping from the name to its keyword arguments, such as `{RandomCrop: {size: 32, padding: 4}}`; or a
            mapping with `target`, such as `{target: package.module:factory, strength: 2}`. A factory returns a
            callable.
        key: Key of the names in the config, for messages.

    Raises:
        GradwatchError: A name is unknown, or its keyword arguments are rejected.
    """
    return Chain(tuple(_step(name, key=f"{key}[{i}]") for i, name in enumerate(names)))


def _step(name: Name, *, key: str) -> Step:
    """Return one transform from `name`, `{name: keywords}` or `{target: ..., keywords}`."""
    if isinstance(name, Mapping) and "target" in name:
        options = {str(k): v for k, v in name.items() if k != "target"}
        return _call(plugins.target(str(name["target"]), key=f"{key}.target"), options, name=name["target"], key=key)
    if isinstance(name, Mapping):
        if len(name) != 1:
            raise GradwatchError(f"{key}: got {dict(name)}, expected one name with its keyword arguments")
        ((name, options),) = name.items()
    else:
        options = {}
    if name in MIXING:
        raise GradwatchError(f"{key}: {name} mixes the samples of a batch, expected a transform of one image")
    known = [n for n in dir(v2) if isinstance(c := getattr(v2, n), type) and issubclass(c, v2.Transform)]
    if name not in known:
        raise GradwatchError(
            f"{key}: got '{name}', expected a class of torchvision.transforms.v2{did_you_mean(str(name), known)}"
        )
    # `or {}`: a YAML mapping `{RandomHorizontalFlip: }` has null as its arguments
    return _call(getattr(v2, name), _converted(options or {}, key=f"{key}.{name}"), name=name, key=key)


def _call(factory: Callable[..., Any], options: dict[str, Any], *, name: str, key: str) -> Step:
    try:
        step = factory(**options)
    except (TypeError, ValueError) as error:
        raise GradwatchError(f"{key}: {name}: {error}") from error
    if not callable(step):
        raise GradwatchError(f"{key}: {name} returned a {type(step).__name__}, expected a callable of one input")
    return step  # type: ignore[no-any-return]  # what users' factories return is known only by calling it


def _converted(options: Mapping[str, Any], *, key: str) -> dict[str, Any]:
    """Return keyword arguments with named values and inner transforms replaced by the objects."""
    converted = dict(options)
    for name, value in options.items():
        if name == "transforms":  # of a container such as RandomApply
            converted[name] = list(compose(value, key=f"{key}.transforms").steps)
        elif name in WRITTEN and isinstance(value, str):
            if value not in WRITTEN[name]:
                known = WRITTEN[name]
                near = did_you_mean(value, known)
                raise GradwatchError(f"{key}.{name}: got '{value}', expected one of {', '.join(known)}{near}")
            converted[name] = WRITTEN[name][value]
    return converted


def _wrap(base: Dataset[Any], chain: Chain) -> Dataset[Any]:
    if not chain.steps:
        return base  # nothing to apply, so no extra call per sample or batch
    if isinstance(base, IterableDataset):
        return TransformedStream(base, chain)
    return PerBatch(base, chain) if chain.batchwise and isinstance(base, Batched) else PerSample(base, chain)


def _try(dataset: Dataset[Any], *, key: str) -> tuple[int, ...]:
    """Return the shape of the first transformed sample, or raise an error about its transforms."""
    if is_empty(dataset):
        raise GradwatchError("data: a part is empty, expected at least one sample")
    try:
        inputs, _ = first_sample(dataset)
    except GradwatchError:
        raise
    except Exception as error:  # transforms may raise any exception
        raise GradwatchError(f"{key}: failed on the first sample: {error}") from error
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        found = inputs.dtype if isinstance(inputs, Tensor) else type(inputs).__name__
        raise GradwatchError(
            f"{key}: made {found}, expected a floating-point tensor; end with "
            "{ToDtype: {dtype: float32, scale: true}}"
        )
    return tuple(inputs.shape)
