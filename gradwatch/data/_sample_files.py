"""Name the file of a sample, so that a damaged one is reported by its path and not by an index."""

from __future__ import annotations

import bisect
import traceback
from pathlib import Path
from typing import Any

from torch.utils.data import ConcatDataset, Subset

from gradwatch.errors import GradwatchError

FILE_LISTS = (
    *("samples", "imgs", "_samples", "_image_files", "_images", "image_files"),  # of torchvision's classes
    *("files", "paths", "filenames", "image_paths"),  # usual in datasets of users
)
"""Attributes of datasets that hold the path of each sample, alone or first in a tuple."""


def read_sample(dataset: Any, index: int) -> Any:
    """Return a sample.

    Raises:
        GradwatchError: The file of the sample cannot be read. Other errors stay as they are.
    """
    try:
        return dataset[index]
    except GradwatchError:
        raise
    except Exception as error:
        file = file_of(dataset, index)
        if file is None or not _is_of_file(error):
            raise  # a bug in the user's dataset keeps its type and traceback
        reason = " ".join(str(error).replace(f"'{file}'", "the file").split())  # in one line
        raise GradwatchError(
            f"data: {file} is missing, damaged or not a picture ({type(error).__name__}: {reason}); repair or remove it"
        ) from error


def sample_name(dataset: Any, index: int) -> str:
    """Return a sample in the user's words: the path of its file, or its number in the dataset."""
    file = file_of(dataset, index)
    return f"sample {index}" if file is None else file


def file_of(dataset: Any, index: int) -> str | None:
    """Return the path of the file that holds a sample, or None if it is not known."""
    if isinstance(dataset, Subset):
        return file_of(dataset.dataset, int(dataset.indices[index]))
    if isinstance(dataset, ConcatDataset):
        part = bisect.bisect_right(dataset.cumulative_sizes, index)
        return file_of(dataset.datasets[part], index - (dataset.cumulative_sizes[part - 1] if part else 0))
    if hasattr(dataset, "locate"):  # of the wrappers in this package
        return file_of(*dataset.locate(index))
    for attribute in FILE_LISTS:
        files = getattr(dataset, attribute, None)
        if isinstance(files, (list, tuple)) and len(files) == len(dataset):
            entry = files[index]
            path = entry[0] if isinstance(entry, tuple) and entry else entry
            if isinstance(path, (str, Path)):
                return str(path)
    return None


def _is_of_file(error: Exception) -> bool:
    """Return whether an error came from reading a file, not from the code that asked for it."""
    frames = traceback.extract_tb(error.__traceback__)
    # Pillow raises errors of many types for damaged files, such as SyntaxError for a broken PNG
    return isinstance(error, (OSError, EOFError)) or "PIL" in Path(frames[-1].filename).parts
