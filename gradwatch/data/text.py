"""Read a text file as characters to predict from the characters before them; CPython's manual by default."""

# N = windows, B = windows of a batch, T = characters of a window

from __future__ import annotations

import importlib
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from gradwatch.data import Splits
from gradwatch.errors import GradwatchError
from gradwatch.paths import user_path
from gradwatch.records import DataSpec


@final
class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text at equal distances: the inputs are T characters, the targets are shifted by one character.

    Args:
        tokens: Character numbers, shape (characters,), int32, more than `context` characters.
        context: Characters of a window, T.
        stride: Characters between the starts of two windows.
    """

    is_random = False

    def __init__(self, tokens: Tensor, *, context: int, stride: int) -> None:
        self.windows = tokens.unfold(0, context + 1, stride)  # a view: overlapping windows share memory

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return _shifted(self.windows[index])

    def batch(self, indices_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of the windows, each of shape (B, T), int64."""
        return _shifted(self.windows.index_select(0, indices_B))


def build(
    *, file: str | None = None, context: int = 128, stride: int | None = None, val_fraction: float = 0.1
) -> Splits:
    """Return windows of a text. An epoch visits every window once, in shuffled order if data.shuffle says so.

    Args:
        file: UTF-8 text; null is the English text of CPython's `pydoc_data.topics`, about 470,000 characters.
        context: Characters that the model sees at once.
        stride: Characters from one window to the next; null is `context`: windows that touch and do not overlap.
        val_fraction: Fraction at the end of the text that is held out; its windows share no character with the rest.
    """
    if context < 1 or (stride is not None and stride < 1):
        raise GradwatchError(f"data.context, data.stride: got {context} and {stride}, expected at least 1")
    if not 0.0 <= val_fraction < 1.0:
        raise GradwatchError(f"data.val_fraction: got {val_fraction}, expected a number from 0 to below 1")
    text = _topics() if file is None else _read(user_path(file))
    # utf-32 has 4 bytes per character, so NumPy can sort and number them without a Python loop
    characters, tokens = np.unique(np.frombuffer(text.encode("utf-32-le"), np.uint32), return_inverse=True)
    # the end of the text, not random windows, which would overlap with training windows
    cut = len(tokens) - round(len(tokens) * val_fraction)
    train, val = (
        _windows(torch.from_numpy(part.astype(np.int32)), context=context, stride=stride or context)
        for part in (tokens[:cut], tokens[cut:])
    )
    if train is None or (val is None and val_fraction):
        raise GradwatchError(
            f"data.context: {context} characters do not fit into each part of {file or 'the default text'}, which has "
            f"{cut} for training and {len(tokens) - cut} for validation, expected at least {context + 1} in each; use "
            "a smaller context or a longer text (val_fraction: 0 holds nothing out)"
        )
    spec = DataSpec(input_shape=(context,), outputs=len(characters), kind="tokens")
    return Splits(train, val, spec, vocabulary=tuple(map(chr, characters.tolist())))


def _windows(tokens: Tensor, *, context: int, stride: int) -> Windows | None:
    return Windows(tokens, context=context, stride=stride) if len(tokens) > context else None


def _shifted(windows: Tensor) -> tuple[Tensor, Tensor]:
    windows = windows.to(torch.int64)  # stored as int32 to halve the memory; nn.Embedding and losses need int64
    return windows[..., :-1].contiguous(), windows[..., 1:].contiguous()


def _topics() -> str:
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise GradwatchError(
            "data.file: this Python lacks pydoc_data.topics, the default text; name a text file"
        ) from error
    return "\n".join(topics[name] for name in sorted(topics))  # sorted: the same text for every order of the dict


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise GradwatchError(f"data.file: no file {path.absolute()}, expected a text file") from error
    except UnicodeDecodeError as error:
        raise GradwatchError(f"data.file: {path} is not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise GradwatchError(f"data.file: cannot read {path}: {error.strerror}") from error
    if not text:
        raise GradwatchError(f"data.file: {path} is empty, expected text")
    return text
