"""Write safetensors files one tensor at a time, and read them with the library.

The format: the length of the header as uint64, the header as JSON (name to dtype, shape and offsets), then the data.
Source: https://github.com/huggingface/safetensors, README, section Format.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gradwatch.probe.device.sync import to_host

ALIGNMENT = 8
"""Alignment of the data in bytes; the header is padded with spaces."""

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of the dtypes that every version of the format supports."""


def chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file with tensors of the dtypes in `DTYPE_NAMES`, which may be on any device."""
    # the widest dtype first, so that each tensor begins at a multiple of its element size
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    yield _header(ordered)
    for _, tensor in ordered:
        if tensor.numel():
            # as bytes, since NumPy has no bfloat16; one tensor at a time, so the host never holds the whole model
            yield to_host(tensor.detach().contiguous().reshape(-1).view(torch.uint8)).data


def read(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file into new tensors on the CPU.

    Raises:
        ValueError: The file is not a safetensors file, or is truncated.
    """
    try:
        with safe_open(path, framework="pt") as file:
            # cloned: the library's tensors map the file, which may be deleted while they are in use
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from error


def _header(ordered: Iterable[tuple[str, Tensor]]) -> bytes:
    entries = {}
    begin = 0
    for name, tensor in ordered:
        end = begin + tensor.numel() * tensor.element_size()
        shape = list(tensor.shape)
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
