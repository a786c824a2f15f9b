"""Count the bytes of all live storages by their purpose, and keep the peak of their sum."""

from __future__ import annotations

import enum
import functools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class Purpose(enum.StrEnum):
    """The purpose of a storage."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    TEMPORARIES = "temporaries"
    BUFFERS = "buffers"


CUDA_BLOCK_BYTES = 512
"""Size that divides all blocks of torch's CUDA allocator; see `kMinBlockSize` in CUDACachingAllocator."""


def block_bytes(nbytes: int, device: str) -> int:
    """Return the bytes of the block that the allocator of a type of device takes for a storage."""
    return -(-nbytes // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES if device == "cuda" else nbytes


def no_bytes() -> dict[Purpose, int]:
    """Return 0 bytes for each part."""
    return dict.fromkeys(Purpose, 0)


def dense(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that hold the numbers of a tensor: itself, or the tensors inside a wrapper."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from dense(getattr(tensor, name))


@dataclass(slots=True)
class _LiveStorage:
    """A live storage; `saves` counts the nodes of the autograd graph that hold it."""

    ref: weakref.ref[torch.UntypedStorage]
    nbytes: int
    part: Purpose
    saves: int = 0


@final
@dataclass(slots=True, kw_only=True)
class Ledger:
    """The live storages of one device, each counted once however many tensors view it.

    Args:
        device: Type of the device to count on, such as `cpu`.
        shares: Fractions of the parts for further peaks, as if a device held only these fractions.

    Attributes:
        live: Bytes now, by part.
        largest: Largest bytes of each part since `restart`; the parts need not be largest at one time.
        peak: Largest sum over all parts.
        at_peak: Bytes of each part at the peak.
        phase: Phase of the step, which the trace sets.
        peak_phase: Phase at the peak.
        shared_peaks: Largest sum of the parts for each of `shares`.
    """

    device: str
    shares: Sequence[Mapping[Purpose, float]] = ()
    live: dict[Purpose, int] = field(default_factory=no_bytes)
    largest: dict[Purpose, int] = field(default_factory=no_bytes)
    peak: int = 0
    at_peak: dict[Purpose, int] = field(default_factory=no_bytes)
    phase: str = "forward"
    peak_phase: str = "forward"
    shared_peaks: list[float] = field(default_factory=list)
    _blocks: dict[int, _LiveStorage] = field(default_factory=dict)

    def add(self, tensor: Tensor, part: Purpose = Purpose.TEMPORARIES) -> bool:
        """Count the storage of a tensor, and return whether it was not counted yet."""
        storage = self._storage(tensor)
        # torch keeps one Python object for a storage while it lives, so its id is its key
        if storage is None or id(storage) in self._blocks:
            return False
        ref = weakref.ref(storage, functools.partial(self._free, id(storage)))
        nbytes = block_bytes(storage.nbytes(), self.device)
        self._blocks[id(storage)] = _LiveStorage(ref, nbytes, part)
        self._change(part, nbytes)
        return True

    def label(self, tensor: Tensor, part: Purpose) -> None:
        """Set the part of a tensor's storage, which is counted if it was not."""
        if not self.add(tensor, part) and (block := self._block(tensor)):
            self._move(block, part)

    def save(self, tensor: Tensor) -> int | None:
        """Note that the autograd graph holds a tensor.

        Returns:
            The bytes that this adds to the activations; 0 for a view of a storage that is held anyway, or None if the
            tensor is not counted, as on another device.
        """
        self.add(tensor)
        block = self._block(tensor)
        if block is None:
            return None
        block.saves += 1
        if block.part is not Purpose.TEMPORARIES:
            return 0
        self._move(block, Purpose.ACTIVATIONS)
        return block.nbytes

    def unsaved_bytes(self, tensors: Iterable[Tensor]) -> int:
        """Return the bytes of the storages of some tensors that neither the graph nor the model holds."""
        blocks = {id(block): block for tensor in tensors if (block := self._block(tensor))}
        return sum(b.nbytes for b in blocks.values() if not b.saves and b.part is Purpose.TEMPORARIES)

    def release(self, tensor: Tensor) -> None:
        """Note that a node of the autograd graph no longer holds a tensor."""
        if block := self._block(tensor):
            block.saves -= 1
            if not block.saves and block.part is Purpose.ACTIVATIONS:
                self._move(block, Purpose.TEMPORARIES)

    def take_briefly(self, nbytes: int) -> None:
        """Count bytes that an operation takes and frees before it returns."""
        self._change(Purpose.TEMPORARIES, nbytes)
        self.live[Purpose.TEMPORARIES] -= nbytes

    def restart(self) -> None:
        """Restart the peak from the storages that are alive."""
        self.largest, self.at_peak = dict(self.live), dict(self.live)
        self.peak, self.peak_phase = sum(self.live.values()), self.phase
        self.shared_peaks = [self._shared(shares) for shares in self.shares]

    def _storage(self, tensor: Tensor) -> torch.UntypedStorage | None:
        # reading the device of a tensor without data dispatches an operation: half of the total time
        device = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if device.type != self.device or tensor.layout != torch.strided:
            return None
        return tensor.untyped_storage()

    def _block(self, tensor: Tensor) -> _LiveStorage | None:
        storage = self._storage(tensor)
        return None if storage is None else self._blocks.get(id(storage))

    def _free(self, key: int, _: object) -> None:
        block = self._blocks.pop(key)
        self.live[block.part] -= block.nbytes

    def _move(self, block: _LiveStorage, part: Purpose) -> None:
        self.live[block.part] -= block.nbytes
        block.part = part
        self._change(part, block.nbytes)

    def _change(self, part: Purpose, nbytes: int) -> None:
        self.live[part] += nbytes
        self.largest[part] = max(self.largest[part], self.live[part])
        total = sum(self.live.values())
        if total > self.peak:
            self.peak, self.at_peak, self.peak_phase = total, dict(self.live), self.phase
        for i in range(len(self.shared_peaks)):
            self.shared_peaks[i] = max(self.shared_peaks[i], self._shared(self.shares[i]))

    def _shared(self, shares: Mapping[Purpose, float]) -> float:
        return sum(shares.get(part, 1.0) * nbytes for part, nbytes in self.live.items())
