"""Read text files of any size as a stream of bytes to predict from the bytes before them."""

# T = tokens of a window

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from gradwatch.data import Splits
from gradwatch.errors import GradwatchError
from gradwatch.paths import user_path
from gradwatch.records import DataSpec

END_OF_TEXT = 256
"""Token after each text; the tokens 0 to 255 are the bytes of UTF-8."""
VOCABULARY = 257
JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True, kw_only=True)
class _TextPlace:
    """The place where a stream continues.

    Args:
        file: Number of the file.
        byte: Byte in the file where the current text begins.
        text: Number of the current text in all files.
        rest: Tokens of earlier texts that belong to the next window.
        used: Tokens of the current text that do not belong to the next window.
    """

    file: int = 0
    byte: int = 0
    text: int = 0
    rest: tuple[int, ...] = ()
    used: int = 0


@final
class TextStream(IterableDataset[tuple[Tensor, Tensor]]):
    """Windows of the texts in files, one after the other: the inputs are T tokens, the targets the tokens after them.

    A text is a line of a file, or the value of a key in a line of JSON. One token ends it, and windows run on into the
    next text. Shard k of n has the texts k, k + n, k + 2n, ...

    Args:
        files: The files, in the order of reading.
        context: Tokens of a window, T.
        key: Key of the text in a line of a .jsonl file.
        index: Number of the shard.
        num_shards: Number of shards.
    """

    is_random = False

    def __init__(self, files: tuple[Path, ...], *, context: int, key: str, index: int = 0, num_shards: int = 1) -> None:
        self._files, self._context, self._key = files, context, key
        self._index, self._num_shards = index, num_shards
        self._place, self._is_resumed = _TextPlace(), False

    def shard(self, *, num_shards: int, index: int) -> TextStream:
        """Return one of several parts that share no text."""
        return TextStream(self._files, context=self._context, key=self._key, index=index, num_shards=num_shards)

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the last window, as plain data."""
        return asdict(self._place) | {"rest": list(self._place.rest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next pass at a place from `state_dict`."""
        self._place, self._is_resumed = _TextPlace(**{**state, "rest": tuple(state["rest"])}), True

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the windows from the loaded place, or from the beginning of the first file."""
        if not self._is_resumed:
            self._place = _TextPlace()
        self._is_resumed = False
        rest, begin = list(self._place.rest), self._place.used
        for here, text in self._texts(self._place):
            earlier = len(rest)
            tokens = [*rest, *text.encode(), END_OF_TEXT]
            while begin + self._context < len(tokens):
                window = torch.tensor(tokens[begin : begin + self._context + 1])
                begin += self._context  # the last target is the first input of the next window
                self._place = replace(here, rest=tuple(tokens[begin:earlier]), used=max(0, begin - earlier))
                yield window[:-1], window[1:]
            rest, begin = tokens[begin:], 0

    def _texts(self, place: _TextPlace) -> Iterator[tuple[_TextPlace, str]]:
        """Yield the texts of this shard from a place on, each with the place where it begins."""
        number, byte = place.text, place.byte
        for i in range(place.file, len(self._files)):
            with _opened(self._files[i]) as file:
                file.seek(byte)
                for line in file:
                    if number % self._num_shards == self._index and (text := self._text(line, self._files[i], byte)):
                        yield _TextPlace(file=i, byte=byte, text=number), text
                    byte, number = byte + len(line), number + 1
            byte = 0

    def _text(self, line: bytes, file: Path, byte: int) -> str:
        place = f"data.files: {file}, the line at byte {byte:,}"
        try:
            text = line.decode().rstrip("\r\n")
            if not text or file.suffix not in JSON_LINES:
                return text
            found = json.loads(text)
        except UnicodeDecodeError as error:
            raise GradwatchError(f"{place}: is not UTF-8 text; convert the file first") from error
        except ValueError as error:
            raise GradwatchError(f"{place}: is not JSON ({error}); repair or remove it") from error
        value = found.get(self._key) if isinstance(found, dict) else None
        if not isinstance(value, str):
            keys = f"its keys are {', '.join(found)}" if isinstance(found, dict) else f"it is a {type(found).__name__}"
            raise GradwatchError(f"{place}: has no text with the key '{self._key}', {keys}; set data.key")
        return value


def build(
    *, files: str | list[str], val_files: str | list[str] | None = None, context: int = 128, key: str = "text"
) -> Splits:
    """Return text files as a stream that keeps only the current line in memory. A model reads bytes, 257 tokens.

    Args:
        files: A file, a folder, a pattern such as `corpus/*.jsonl`, or a list of these. In a .jsonl file, the value of
            `key` in each line is a text; in a .txt or other file, each line is. A folder stands for its .txt and .jsonl
            files.
        val_files: Files for validation, given like `files`; null for none.
        context: Tokens that the model sees at once.
        key: Key of the text in the lines of .jsonl files.
    """
    if context < 1:
        raise GradwatchError(f"data.context: got {context}, expected at least 1")
    train = TextStream(_found(files, "data.files"), context=context, key=key)
    val = None
    if val_files is not None:
        val = TextStream(_found(val_files, "data.val_files"), context=context, key=key)
    return Splits(train, val, DataSpec(input_shape=(context,), outputs=VOCABULARY, kind="tokens"))


def _found(names: str | list[str], setting: str) -> tuple[Path, ...]:
    """Return the files of paths, folders and patterns, sorted within each."""
    found: list[Path] = []
    for name in [names] if isinstance(names, str) else names:
        path = user_path(name)
        if path.is_dir():
            below = sorted(p for p in path.iterdir() if p.suffix in (".txt", *JSON_LINES))
        else:
            # glob.glob, since Path.glob needs the pattern without its folder
            below = [path] if path.is_file() else sorted(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207
        if not below:
            raise GradwatchError(
                f"{setting}: no file {path.absolute()}, expected a text file, a folder with .txt or .jsonl files, or a "
                "pattern such as corpus/*.jsonl"
            )
        found += below
    if not found:
        raise GradwatchError(f"{setting}: got an empty list, expected text files")
    return tuple(found)


def _opened(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise GradwatchError(f"data.files: cannot read {path}: {error.strerror}") from error
