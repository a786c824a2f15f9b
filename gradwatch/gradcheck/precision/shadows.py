"""Hold a float64 twin of every tensor of a running step, and run each operation on the twins as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from gradwatch.gradcheck.stepping.tensors import is_continuous
from gradwatch.probe.nested import storage_id

CLEAN_EVERY = 256
"""Operations between two removals of twins whose tensors are gone."""


@final
@dataclass(slots=True)
class Twin:
    """The twin of one memory.

    Args:
        base: Its values in float64 or complex128, flat; integers as they are.
        memory: Shows whether the memory still exists. As long as this reference lives, no other memory gets its
            address.
        error: Relative error of the values that were last written.
        top: Largest magnitude that was last written.
    """

    base: Tensor
    memory: StorageWeakRef
    error: float = 0.0
    top: float = 0.0


@final
class Shadows:
    """The twins of all tensors that a step has used.

    A twin belongs to a memory and not to a tensor, so that views and writes in place need no care.
    """

    def __init__(self) -> None:
        self._twins: dict[int, Twin] = {}
        self._operations = 0

    def know(self, tensor: Tensor, values: Tensor) -> None:
        """Register the values of a tensor that was rounded before the step began."""
        self.of(tensor).copy_(values)

    def twin(self, tensor: Tensor) -> Twin | None:
        """Return the twin of a tensor's memory, or None if there is none yet."""
        return self._twins.get(storage_id(tensor)) if tensor.layout == torch.strided else None

    def of(self, tensor: Tensor) -> Tensor:
        """Return the twin of a tensor. The values of a new tensor count as exact."""
        if tensor.layout != torch.strided or type(tensor) not in (Tensor, torch.nn.Parameter):
            return tensor.to(torch.float64) if tensor.is_floating_point() else tensor
        twin = self._twins.get(storage_id(tensor))
        if twin is None:
            twin = self._twins[storage_id(tensor)] = _begun(tensor)
        if twin.base.dtype != _wide(tensor.dtype):  # a view in another format
            return tensor.to(_wide(tensor.dtype))
        found = twin.base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return found.conj() if tensor.is_conj() else found

    def run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:
        """Run an operation on twins, and keep the results as the twins of its results.

        Args:
            func: The operation.
            args: Arguments with twins instead of tensors, made before the operation ran.
            kwargs: Further arguments, likewise.
            out: Result of the operation on the tensors themselves.

        Returns:
            Whether the operation could be followed. If not, its results count as exact.
        """
        self._operations += 1
        if self._operations % CLEAN_EVERY == 0:
            self._twins = {k: t for k, t in self._twins.items() if not t.memory.expired()}
        results = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
        if _draws(func, args, kwargs):
            masked = _by_mask(func, args, out)
            if masked is None:
                self._adopt(results)
            else:
                self._keep(results, [masked, *results[1:]])
            return True
        try:
            found = func(*_plain(func, args), **kwargs)
        except (RuntimeError, TypeError, NotImplementedError):  # no float64, or a fused kernel for one format
            self._adopt(results)
            return False
        self._keep(results, [t for t in tree_leaves(found) if isinstance(t, Tensor)])
        return True

    def arguments(self, value: Any) -> Any:
        """Return nested arguments with twins instead of tensors, and wide formats instead of floating-point ones."""

        def wide(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.of(leaf)
            return _wide(leaf) if isinstance(leaf, torch.dtype) else leaf

        return tree_map(wide, value)

    def _keep(self, results: Sequence[Tensor], twins: Sequence[Tensor]) -> None:
        for result, twin in zip(results, twins, strict=False):
            # a result in known memory is a view or was written in place, and so was its twin
            if result.layout == torch.strided and self._is_new(result):
                self._twins.pop(storage_id(result), None)
                self.of(result).copy_(twin)

    def _is_new(self, tensor: Tensor) -> bool:
        twin = self._twins.get(storage_id(tensor))
        return twin is None or twin.memory.expired()

    def _adopt(self, results: Sequence[Tensor]) -> None:
        """Count the values of tensors as exact."""
        for result in results:
            self.of(result).copy_(result)


def _begun(tensor: Tensor) -> Twin:
    memory = tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(memory)
    return Twin(flat.to(_wide(tensor.dtype), copy=True), StorageWeakRef(memory))


def _wide(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation draws random numbers; an attention with a dropout of 0 does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    names = [argument.name for argument in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
    return bool(given)


def _by_mask(func: Any, args: Sequence[Any], out: Any) -> Tensor | None:
    """Return the result of a dropout on twins, by the mask that was drawn; None for other random operations."""
    if func.overloadpacket.__name__ != "native_dropout":
        return None
    share = 1.0 - float(args[1])
    mask: Tensor = out[1]
    kept: Tensor = args[0] * mask
    return kept / share if share else kept


def _plain(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Return arguments without the request to compute a softmax of half numbers in float32."""
    if func.overloadpacket.__name__ in ("_softmax", "_log_softmax") and len(args) == 3:
        return (*args[:2], False)
    return args


def is_measured(tensor: Any) -> bool:
    """Return whether a value is a tensor with digits: dense, in a floating-point format, and not empty."""
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or not tensor.numel():
        return False
    return is_continuous(tensor) and tensor.device.type != "meta"
