"""Find the tensors with values in a nest of tuples, lists, dicts and output objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gradwatch.probe.device.dtensor import is_distributed


def tensors_of(value: Any, depth: int = 3) -> Iterator[Tensor]:
    """Yield the tensors with values in the output of a forward pass.

    Args:
        value: Any object.
        depth: Levels of nesting to read: objects may contain themselves.
    """
    if isinstance(value, Tensor):
        if has_plain_values(value):
            yield value
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_of(part, depth - 1)
    elif depth and isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_of(part, depth - 1)
    # of the type: an object may answer to any name
    elif depth and hasattr(type(value), "__dataclass_fields__"):
        # a declared field may be missing from the object
        for name in value.__dataclass_fields__:
            yield from tensors_of(getattr(value, name, None), depth - 1)


def has_plain_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values: not on the meta device, not fake, and not wrapped by a transform.

    A distributed tensor counts as none: an operation on its values may wait for other processes.
    """
    if torch.compiler.is_compiling():  # values come later
        return True
    functorch: Any = torch._C._functorch
    is_wrapped = functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor)
    return not (is_wrapped or tensor.is_meta or isinstance(tensor, FakeTensor) or is_distributed(tensor))


def storage_id(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory, which its views share."""
    return int(tensor.untyped_storage()._cdata)
