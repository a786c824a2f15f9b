"""Load any image classification dataset of torchvision by its class name, as float32 images with labels."""

# N = samples

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import datasets
from torchvision.transforms.v2 import functional

from gradwatch.data import Splits
from gradwatch.data._image_folder import PictureFolder
from gradwatch.data._inspect import count_classes, first_sample
from gradwatch.data._labels import class_names, labels_of, listed, shared_numbers
from gradwatch.data._memory import InMemory
from gradwatch.data._split import random_split
from gradwatch.errors import GradwatchError, did_you_mean
from gradwatch.paths import user_path
from gradwatch.records import DataSpec

Numbers = NDArray[np.int64]
VAL_FRACTION = 0.1  # held out if a dataset has no validation part
VAL_SPLITS = ("val", "valid", "validation", "test")  # the names of torchvision's classes, and of folders


@final
class Images(Dataset[tuple[Tensor, int]]):
    """Selected images of a torchvision dataset, decoded when they are read.

    Args:
        base: Returns (PIL image, label) for an index.
        indices_N: Indices of the selected samples; None selects all.
        numbers_K: The class number to return for each label of `base`, shape (K,); None returns the labels.
    """

    is_random = False

    def __init__(self, base: Any, indices_N: Numbers | None = None, numbers_K: Numbers | None = None) -> None:
        self.base = base
        self.indices_N = np.arange(len(base)) if indices_N is None else indices_N
        self.numbers_K = numbers_K

    def __len__(self) -> int:
        return len(self.indices_N)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.base[int(self.indices_N[index])]
        scaled = functional.to_dtype(functional.to_image(image), torch.float32, scale=True)
        if self.numbers_K is not None:
            label = int(self.numbers_K[label])
        return scaled.as_subclass(Tensor), label  # a tv_tensors.Image would slow down every operation of the model

    def locate(self, index: int) -> tuple[Any, int]:
        """Return the dataset that reads a sample, and the index of the sample in it."""
        return self.base, int(self.indices_N[index])

    def class_numbers(self) -> Numbers | None:
        """Return the class number of each sample, or None if that needs a pass over the samples."""
        labels_N = labels_of(self.base)
        if labels_N is None:
            return None
        chosen_N = labels_N[self.indices_N]
        return chosen_N if self.numbers_K is None else self.numbers_K[chosen_N]


def build(
    *,
    name: str,
    root: str = "data",
    download: bool = False,
    val_fraction: float | None = None,
    val_split: str | None = None,
    split_seed: int = 0,
    outputs: int | None = None,
    **options: Any,
) -> Splits:
    """Return the images of a torchvision dataset as float32, shape (C, H, W), from 0 to 1, with class numbers.

    Args:
        name: Class of torchvision.datasets, such as `CIFAR10`. An `ImageFolder` whose root holds `train` and one of
            `val`, `valid`, `validation`, `test` takes these as its parts.
        root: Folder of the files.
        download: Download missing files.
        val_fraction: Fraction of the training samples that is held out for validation; null takes the dataset's own
            validation or test part if it has one, else a tenth.
        val_split: Name of the validation part of a class that takes a `split`. With `split` alone, samples are held out
            of that part.
        split_seed: Seed of the choice that `val_fraction` makes.
        outputs: Number of classes, if the dataset does not say.
        options: Further keyword arguments of the class, such as `split: balanced` or `size: 200`.
    """
    cls = _class(name)
    accepted = _parameters(cls)
    shared = {"root": str(user_path(root)), "download": download}
    options |= {key: value for key, value in shared.items() if key in accepted}  # some classes have no `download`
    train, val = _parts(cls, options, own_val=val_fraction is None, val_split=val_split)
    if val is None:
        fraction = VAL_FRACTION if val_fraction is None else val_fraction
        kept, held_out = _held_out(train, fraction, split_seed)
        train_set, val_set = _images(train, kept), _images(train, held_out) if len(held_out) else None
    else:
        places = (_place(train, "training"), _place(val, "validation"))
        train_set = _images(train)
        val_set = _images(val, numbers_K=shared_numbers(train, val, places=places, key="data.root"))
    return Splits(
        train_set,
        val_set,
        _spec(train_set, train, name=name, outputs=outputs),
        classes=class_names(getattr(train, "classes", ())),
        notes=tuple(note for part in (train, val) for note in _left_out(part)),
    )


def _class(name: str) -> type[Any]:
    known = {n.casefold(): n for n in datasets.__all__ if isinstance(getattr(datasets, n), type)}
    if name.casefold() not in known:
        raise GradwatchError(
            f"data.name: got '{name}', expected a class of torchvision.datasets{did_you_mean(name, known.values())}"
        )
    return getattr(datasets, known[name.casefold()])  # type: ignore[no-any-return]  # torchvision has no types


def _parameters(cls: type[Any]) -> set[str]:
    """Return the keyword arguments of a class, with those that it passes on to its base class."""
    found: set[str] = set()
    for base in cls.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(vars(base)["__init__"]).parameters
            found |= parameters.keys()
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                break  # without **kwargs nothing is passed on
    return found - {"self", "kwargs", "args"}


def _parts(cls: type[Any], options: dict[str, Any], *, own_val: bool, val_split: str | None) -> tuple[Any, Any | None]:
    """Return the training dataset, and the validation dataset if the class has a part for it."""
    if folders := _folders(cls, options):
        train, val = (_open(cls, options | {"root": folder}) for folder in folders)
        return train, val if own_val else None
    accepted = _parameters(cls)
    if "train" in accepted:
        train = _open(cls, options | {"train": True})
        return train, _open(cls, options | {"train": False}) if own_val else None
    if "split" not in accepted:
        return _open(cls, options), None
    if "split" in options or val_split is not None:
        train = _open(cls, options)
        return train, None if val_split is None else _open(cls, options | {"split": val_split})
    # a default such as `trainval` would hold the samples of `val`
    train = _first_split(cls, options, ("train",))
    train = _open(cls, options) if train is None else train
    return train, _first_split(cls, options, VAL_SPLITS) if own_val else None


def _first_split(cls: type[Any], options: dict[str, Any], names: Sequence[str]) -> Any | None:
    """Return the part with the first name that the class knows, or None."""
    for split in names:
        # a class does not list its splits, so opening one is the only test
        try:
            return _open(cls, options | {"split": split})
        except _UnknownSplitError:
            continue
    return None


class _UnknownSplitError(GradwatchError):
    """The class has no part of that name."""


def _folders(cls: type[Any], options: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the training and validation folders of an ImageFolder that has both, or None."""
    # subclasses with a `split`, such as ImageNet, find their folders themselves
    if not issubclass(cls, datasets.ImageFolder) or "split" in _parameters(cls):
        return None
    root = Path(options["root"])
    for name in VAL_SPLITS:
        if (root / "train").is_dir() and (root / name).is_dir():
            return str(root / "train"), str(root / name)
    return None


def _open(cls: type[Any], options: dict[str, Any]) -> Any:
    try:
        return PictureFolder(**options) if cls is datasets.ImageFolder else cls(**options)
    except TypeError as error:
        raise GradwatchError(f"data.{cls.__name__}: {error}") from error
    except ValueError as error:
        # the wording of torchvision's verify_str_arg, the only mark of an unknown split
        known = "split" in options and "argument split" in str(error)
        raise (_UnknownSplitError if known else GradwatchError)(f"data.{cls.__name__}: {error}") from error
    except (RuntimeError, OSError) as error:
        where = Path(options.get("root", "data")).absolute()
        reason = " ".join(str(error).split())  # in one line
        remedy = "put its files there"
        if "download" in options:
            remedy += ", or let data.download: true fetch them"
        if options.get("download"):
            remedy = "check the internet connection, or " + remedy.partition(",")[0]
        raise GradwatchError(f"data.root: {cls.__name__} was not found in {where} ({reason}); {remedy}") from error


def _held_out(base: Any, fraction: float, seed: int) -> tuple[Numbers, Numbers]:
    """Return the indices of both parts, chosen at random; each class keeps at least one training sample."""
    kept, held_out = random_split(len(base), val_fraction=fraction, seed=seed)
    if (labels_N := labels_of(base)) is None:
        return kept, held_out
    labels, first = np.unique(labels_N[held_out], return_index=True)
    back = held_out[first[~np.isin(labels, labels_N[kept])]]
    return np.sort(np.concatenate([kept, back])), np.setdiff1d(held_out, back)


def _place(base: Any, part: str) -> str:
    return str(base.root) if isinstance(base, PictureFolder) else f"the {part} part"


def _left_out(base: Any) -> Iterator[str]:
    if isinstance(base, PictureFolder) and base.left_out:
        yield f"data.root: these folders of {base.root} are hidden or without a picture: {listed(base.left_out)}"


def _images(base: Any, indices_N: Numbers | None = None, *, numbers_K: Numbers | None = None) -> Dataset[Any]:
    """Return samples as `InMemory` if the class keeps raw bytes in memory, else as `Images`, decoded one by one."""
    stored = _stored(base)
    if stored is None:
        return Images(base, indices_N, numbers_K)
    inputs, targets = stored
    assert numbers_K is None, "the classes of MNIST and CIFAR have fixed numbers"
    if indices_N is None:
        return InMemory(inputs, targets)
    chosen = torch.from_numpy(indices_N)
    return InMemory(inputs[chosen], targets[chosen])


def _stored(base: Any) -> tuple[Tensor, Tensor] | None:
    """Return images (N, C, H, W), uint8, and labels (N,) of the MNIST and CIFAR families; None for all others."""
    # by __getitem__, which subclasses such as FashionMNIST and CIFAR100 inherit; one that overrides it may differ
    reader = type(base).__getitem__
    if reader is datasets.MNIST.__getitem__:
        images = base.data.unsqueeze(1)
    elif reader is datasets.CIFAR10.__getitem__:
        images = torch.from_numpy(np.ascontiguousarray(base.data.transpose(0, 3, 1, 2)))
    else:
        return None
    return images, torch.as_tensor(base.targets, dtype=torch.int64)


def _spec(dataset: Dataset[Any], base: Any, *, name: str, outputs: int | None) -> DataSpec:
    if not len(dataset):  # type: ignore[arg-type]  # torch's Dataset declares no __len__; those here have it
        raise GradwatchError(f"data.name: {name} has no training samples, expected at least one")
    try:
        image, label = first_sample(dataset)
    except GradwatchError:
        raise
    except (TypeError, ValueError) as error:
        raise GradwatchError(f"data.name: {name} does not return pairs of an image and a label: {error}") from error
    if not isinstance(label, (int, np.integer)) and not (isinstance(label, Tensor) and label.ndim == 0):
        raise GradwatchError(
            f"data.name: a target of {name} is a {type(label).__name__}, expected a class number; write a data factory "
            "(data.target: package.module:factory) for other tasks"
        )
    return DataSpec(input_shape=tuple(image.shape), outputs=outputs or count_classes(base), kind="classes")
