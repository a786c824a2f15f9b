"""Encode a nested state as plain JSON and named tensors, and decode it with identical bits and types."""

from __future__ import annotations

import collections
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch.errors import CheckpointError
from gradwatch.probe.device.sync import to_host
from gradwatch.state.safetensors_file import DTYPE_NAMES

MARK = "!"
"""Key that marks an encoded value. A mapping that contains this key is encoded too."""
RESERVED = {"__metadata__"}  # safetensors reserves this name


@final
@dataclass(frozen=True, slots=True)
class Sharded:
    """Stand for a tensor whose shards are in files of their own.

    Args:
        name: Name in these files.
        shape: Shape of the whole tensor.
        dtype: Its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def encode(state: Any, *, name: str = "state") -> tuple[Any, dict[str, Tensor]]:
    """Encode a state as JSON data and the tensors that the data refers to.

    Supported containers are dict, OrderedDict and Counter with str or int keys, list and tuple. Supported values are
    strided tensors of any dtype, NumPy arrays and scalars, int, float, bool, str and None. Tensors that are the same
    view are stored once.

    Args:
        state: Nested state.
        name: Name of the root in error messages.

    Returns:
        Data for `json.dumps`, and tensors on their devices, by their path in the state.

    Raises:
        CheckpointError: The state contains an unsupported type; the text gives its path.
    """
    encoder = _Encoder(name)
    return encoder.encode(state, ()), encoder.tensors


def decode(data: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that was passed to `encode`; its tensors are on the CPU and contiguous."""
    if isinstance(data, list):  # a tuple has a mark, so that it does not decode as a list
        return [decode(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if MARK not in data:
        return {key: decode(value, tensors) for key, value in data.items()}
    return _DECODERS[data[MARK]](data, tensors)


@final
class _Encoder:
    """Encode a nested state recursively, and collect its tensors."""

    def __init__(self, name: str) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._name = name
        self._views: dict[tuple[Any, ...], dict[str, Any]] = {}

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)  # exact: a subclass would decode as its base class
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            # JSON has no NaN or Inf; the bits also keep the payload of a NaN
            return value if math.isfinite(value) else {MARK: "float", "bits": struct.pack(">d", value).hex()}
        if kind is list:
            return [self.encode(item, (*path, i)) for i, item in enumerate(value)]
        if kind is tuple:
            return {MARK: "tuple", "items": [self.encode(item, (*path, i)) for i, item in enumerate(value)]}
        if kind in (dict, collections.OrderedDict, collections.Counter):
            return self._mapping(value, path)
        if kind is Tensor:
            return self._tensor(value, path)
        if kind is Sharded:
            return {MARK: "sharded", "name": value.name, "shape": list(value.shape), "dtype": _dtype_name(value.dtype)}
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, path)
        raise self._unknown(path, f"a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold")

    def _mapping(self, value: Mapping[Any, Any], path: tuple[Any, ...]) -> Any:
        for key in value:
            if type(key) not in (str, int):
                raise self._unknown(path, f"a key {key!r} of type {type(key).__name__}, expected str or int")
        if type(value) is dict and MARK not in value and all(type(key) is str for key in value):
            return {key: self.encode(item, (*path, key)) for key, item in value.items()}
        # pairs, since JSON would turn int keys into text
        items = [[key, self.encode(item, (*path, key))] for key, item in value.items()]
        data: dict[str, Any] = {MARK: type(value).__name__, "items": items}
        if isinstance(value, collections.OrderedDict) and hasattr(value, "_metadata"):
            # nn.Module.state_dict stores the versions of its modules in this attribute
            data["metadata"] = self.encode(value._metadata, (*path, "_metadata"))
        return data

    def _tensor(self, tensor: Tensor, path: tuple[Any, ...]) -> dict[str, Any]:
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            what = "quantized" if tensor.is_quantized else f"{tensor.layout} on {tensor.device.type}"
            raise self._unknown(path, f"a tensor that is {what}, expected a dense one with data")
        # conj and neg are lazy flags: two tensors with the same memory may differ in their values
        view = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.device,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if view in self._views and tensor.numel():  # empty tensors share the data pointer 0 without being one tensor
            return self._views[view]
        data: dict[str, Any]
        plain = tensor.detach().resolve_conj().resolve_neg()
        if plain.dtype in DTYPE_NAMES:
            data = {MARK: "tensor", "name": self._add(plain, path)}
        else:
            # reshaped first: a tensor without dimensions cannot be viewed as a smaller dtype
            raw = plain.contiguous().reshape(-1).view(torch.uint8)
            dtype, shape = _dtype_name(plain.dtype), list(plain.shape)
            data = {MARK: "tensor", "name": self._add(raw, path), "dtype": dtype, "shape": shape}
        self._views[view] = data
        return data

    def _array(self, array: NDArray[Any] | np.generic, path: tuple[Any, ...]) -> dict[str, Any]:
        dtype = array.dtype
        # decoding rebuilds the dtype from `dtype.str`, so the text must describe it completely
        if dtype.hasobject or dtype.names or np.dtype(dtype.str) != dtype:
            raise self._unknown(path, f"a NumPy array of dtype {dtype}, which a checkpoint cannot hold")
        name = self._add(_from_bytes(array.tobytes()), path)
        kind = "scalar" if isinstance(array, np.generic) else "array"
        return {MARK: kind, "name": name, "dtype": dtype.str, "shape": list(array.shape)}

    def _add(self, tensor: Tensor, path: tuple[Any, ...]) -> str:
        """Add a tensor under its path in the state, which other readers of the file see, and return this name."""
        # a key may be text with lone surrogates, which UTF-8 cannot encode
        name = "/".join(str(key) for key in path).encode(errors="replace").decode()
        # paths collide for the keys 1 and "1", or for a key that contains a slash; the root has an empty path
        while name in self.tensors or name in RESERVED or not name:
            name += "_"
        self.tensors[name] = tensor
        return name

    def _unknown(self, path: Iterable[Any], what: str) -> CheckpointError:
        place = self._name + "".join(f"[{key!r}]" for key in path)
        return CheckpointError(
            f"{place} is or has {what}; put plain numbers, text, tensors and containers of them there"
        )


def _from_bytes(data: bytes) -> Tensor:
    # torch.frombuffer rejects an empty buffer and warns about a read-only one
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _decode_items(data: dict[str, Any], tensors: Mapping[str, Tensor]) -> list[tuple[Any, Any]]:
    return [(key, decode(value, tensors)) for key, value in data["items"]]


def _decode_ordered(data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    ordered: Any = collections.OrderedDict(_decode_items(data, tensors))
    if "metadata" in data:
        ordered._metadata = decode(data["metadata"], tensors)
    return ordered


def _decode_tensor(data: dict[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    tensor = tensors[data["name"]]
    if "dtype" not in data:
        return tensor
    return tensor.view(_dtype(data["dtype"])).reshape(data["shape"])


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):  # the name is from a file, and torch has attributes of every kind
        raise ValueError(f"torch.{name} is not a dtype")
    return dtype


def _decode_array(data: dict[str, Any], tensors: Mapping[str, Tensor]) -> NDArray[Any]:
    # a bytearray, since an array over bytes would be read-only
    raw = to_host(tensors[data["name"]]).tobytes()
    return np.ndarray(data["shape"], data["dtype"], buffer=bytearray(raw) if raw else None)


_DECODERS: dict[str, Callable[[dict[str, Any], Mapping[str, Tensor]], Any]] = {
    "float": lambda data, _: struct.unpack(">d", bytes.fromhex(data["bits"]))[0],
    "tuple": lambda data, tensors: tuple(decode(item, tensors) for item in data["items"]),
    "dict": lambda data, tensors: dict(_decode_items(data, tensors)),
    "OrderedDict": _decode_ordered,
    # through a dict: a Counter made from pairs would count the pairs
    "Counter": lambda data, tensors: collections.Counter(dict(_decode_items(data, tensors))),
    "tensor": _decode_tensor,
    "sharded": lambda data, _: Sharded(data["name"], tuple(data["shape"]), _dtype(data["dtype"])),
    "array": _decode_array,
    # indexing with () turns an array without dimensions into a NumPy scalar
    "scalar": lambda data, tensors: _decode_array(data, tensors)[()],
}
