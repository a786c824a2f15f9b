"""Read arrays from a NumPy .npz file: inputs of any shape, with classes or values as targets."""

# N = samples, F = features

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gradwatch.data import Splits, _tables
from gradwatch.data._labels import listed
from gradwatch.errors import GradwatchError, did_you_mean
from gradwatch.paths import user_path

Array = NDArray[Any]


def build(
    *,
    file: str,
    inputs: str = "x",
    targets: str = "y",
    val_inputs: str | None = None,
    val_targets: str | None = None,
    kind: Literal["auto", "classes", "values"] = "auto",
    standardize: bool | None = None,
    val_fraction: float = 0.2,
    split_seed: int = 0,
) -> Splits:
    """Return the samples of a .npz file. Bytes are read as numbers from 0 to 1, everything else as float32.

    Args:
        file: Written by `numpy.savez` or `numpy.savez_compressed`, without pickled objects.
        inputs: Name of the array of inputs, shape (samples, ...).
        targets: Name of the array of targets, shape (samples,), or (samples, width) for values.
        val_inputs: Name of the inputs for validation; null holds out `val_fraction` of the samples.
        val_targets: Name of the targets for validation.
        kind: `classes`, `values` (regression), or `auto`: whole numbers and words are classes, fractions are values,
            and numbers that mostly occur once are rejected.
        standardize: Bring each feature to mean 0 and standard deviation 1 over the training part; null does so for
            tables (samples, features) and leaves images as they are.
        val_fraction: Fraction of the samples that is held out for validation, the same for each class.
        split_seed: Seed of that choice.
    """
    if (val_inputs is None) != (val_targets is None):
        raise GradwatchError("data.val_inputs, data.val_targets: got one of them, expected both or none")
    wanted = {"inputs": inputs, "targets": targets, "val_inputs": val_inputs, "val_targets": val_targets}
    arrays = _read(user_path(file), {key: name for key, name in wanted.items() if name is not None})
    x, y = arrays["inputs"], arrays["targets"]
    choice = _tables.choose_kind(y, kind, place=f"array '{targets}'")
    if val_inputs is None:
        y, outputs, classes = _tables.encode(y, choice.kind)
        train, val = _tables.held_out(y, choice.kind, val_fraction=val_fraction, seed=split_seed)
        parts = [(x[part], y[part]) for part in (train, val)]
    else:
        val_y = arrays["val_targets"]
        _check_parts(y, val_y, choice.kind)
        # encoded together, so that a label has the same class number in both parts
        both, outputs, classes = _tables.encode(np.concatenate([y, val_y]), choice.kind)
        parts = [(x, both[: len(y)]), (arrays["val_inputs"], both[len(y) :])]
    standardized = x.ndim == 2 if standardize is None else standardize
    return _tables.splits(*parts, choice=choice, outputs=outputs, classes=classes, standardized=standardized)


def _read(path: Path, wanted: dict[str, str]) -> dict[str, Array]:
    """Return the wanted arrays by their keyword, after checks: numbers, finite, as many inputs as targets."""
    if not path.exists():
        raise GradwatchError(f"data.file: no file {path.absolute()}, expected a NumPy .npz")
    if not zipfile.is_zipfile(path):  # np.load accepts a .npy file too
        raise GradwatchError(f"data.file: {path} is not a NumPy .npz; write one with numpy.savez(file, x=..., y=...)")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: _array(file, name, key=key) for key, name in wanted.items()}
    except GradwatchError:
        raise
    # what NumPy raises on a damaged file or on an object array, and zipfile on an unknown compression
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise GradwatchError(f"data.file: cannot read {path} as a NumPy .npz without pickles: {error}") from error
    _check_pair(arrays["inputs"], arrays["targets"], prefix="")
    if "val_inputs" in arrays:
        _check_pair(arrays["val_inputs"], arrays["val_targets"], prefix="val_")
    return arrays


def _array(file: Any, name: str, *, key: str) -> Array:
    if name not in file.files:
        known = ", ".join(file.files)
        raise GradwatchError(
            f"data.{key}: there is no array '{name}', expected one of {known}{did_you_mean(name, file.files)}"
        )
    array: Array = file[name]
    if array.ndim == 0 or not len(array):
        raise GradwatchError(f"data.{key}: the array '{name}' is empty, expected at least one sample")
    # only floats and complex numbers can be NaN or Inf
    if array.dtype.kind in "fc" and len(bad := np.argwhere(~np.isfinite(array))):
        place = tuple(int(i) for i in bad[0])
        raise GradwatchError(
            f"data.{key}: '{name}' at {place} is {array[place]}, expected a finite number; gradwatch fills in nothing: "
            "complete or remove such samples"
        )
    if "targets" in key and array.dtype.kind in "US" and (array == array.dtype.type()).any():
        row = int(np.argmax(array.reshape(len(array), -1)[:, 0] == array.dtype.type()))
        raise GradwatchError(f"data.{key}: '{name}' at {row} is empty, expected a label; remove such samples first")
    return array


def _check_parts(targets: Array, val_targets: Array, kind: _tables.Kind) -> None:
    """Raise a GradwatchError if the targets of both parts do not have the same meaning."""
    if targets.shape[1:] != val_targets.shape[1:]:
        raise GradwatchError(
            f"data.val_targets: got targets of shape {val_targets.shape[1:]} for each sample, expected "
            f"{targets.shape[1:]} as in data.targets"
        )
    if kind != "classes":
        return
    # a concatenation would turn 1 into '1'; numbers of any type can be compared
    numbers = [part.dtype.kind in "iubf" for part in (targets, val_targets)]
    unknown = np.setdiff1d(val_targets, targets) if numbers[0] == numbers[1] else val_targets
    if len(unknown):
        raise GradwatchError(
            f"data.val_targets: has labels that data.targets lacks: {listed(np.unique(unknown).tolist())}; expected "
            f"only labels of the training part ({listed(np.unique(targets).tolist())}); rename or remove the others"
        )


def _check_pair(inputs: Array, targets: Array, *, prefix: str) -> None:
    if inputs.dtype.kind not in "fiub" or inputs.ndim < 2:
        raise GradwatchError(
            f"data.{prefix}inputs: got dtype {inputs.dtype} and shape {inputs.shape}, expected real numbers of shape "
            "(samples, features) or more"
        )
    if len(inputs) != len(targets):
        raise GradwatchError(
            f"data.{prefix}targets: {len(targets)} targets for {len(inputs)} inputs, expected one for each"
        )
