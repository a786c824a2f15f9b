"""Explain why a backward pass found a changed tensor: the line that saved it, and the line that wrote to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradwatch.probe.graph.dispatched import changed_arguments, uncompiled
from gradwatch.probe.nested import storage_id
from gradwatch.probe.place import Place, calling_place

IN_PLACE = "modified by an inplace operation"  # torch raises a plain RuntimeError; its text is the only mark
KEPT_OPERATIONS = 100_000
"""Operations after which the lines of earlier writes are forgotten: a step has a few thousand."""


def explain_in_place(error: RuntimeError, run_again: Callable[[], object]) -> None:
    """Add a note to the error of a backward pass with a changed tensor: the lines that saved it and wrote to it.

    Args:
        error: Any error of the step; other kinds stay unchanged.
        run_again: Runs the step again, forward and backward. Each of its operations is recorded.
    """
    if IN_PLACE not in str(error):
        return
    recorder = _Recorder()
    hooks = torch.autograd.graph.saved_tensors_hooks(recorder.save, recorder.load)
    # of any kind: the error of the step is what is raised, with or without a note
    with contextlib.suppress(Exception), recorder, hooks, uncompiled(), torch.enable_grad():
        run_again()
    if recorder.conflict:
        error.add_note(str(recorder.conflict))


def record_in_place(*, until: contextlib.ExitStack) -> None:
    """Record every operation of this thread from now on, so that such an error has its note when it is raised.

    The step that fails is not run again. Compiled models run in eager mode, and each operation takes some microseconds.

    Args:
        until: Ends the recording when it is closed.
    """
    recorder = _Recorder(raises=True)
    until.enter_context(uncompiled())
    until.enter_context(recorder)
    until.enter_context(torch.autograd.graph.saved_tensors_hooks(recorder.save, recorder.load))


class _Write(NamedTuple):
    number: int  # of the operation
    name: str
    place: Place


class _SavedTensor(NamedTuple):
    tensor: Tensor
    version: int
    number: int  # of operations before it was saved
    place: Place


class _Conflict(NamedTuple):
    saved: _SavedTensor
    write: _Write | None

    def __str__(self) -> str:
        shape = "x".join(map(str, self.saved.tensor.shape)) or "one number"
        text = f"a tensor ({shape}) was saved for the backward pass{_at(self.saved.place)}"
        if self.write:
            return f"{text}, and then changed in place by {self.write.name}{_at(self.write.place)}"
        return f"{text}, and then changed in place"


class _ConflictError(Exception):
    """End the backward pass that found a changed tensor."""


@final
class _Recorder(TorchDispatchMode):
    """Record the line of each tensor that is saved for the backward pass, and of each operation that writes in place.

    Args:
        raises: Whether a changed tensor raises the error of torch, with its note.

    Attributes:
        conflict: The first saved tensor that had changed when the backward pass read it, or None.
    """

    def __init__(self, *, raises: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no types
        self._raises = raises
        self.conflict: _Conflict | None = None
        self._number = 0
        self._writes: dict[int, list[_Write]] = {}  # by storage

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation, and record what it writes to."""
        kwargs = kwargs or {}
        self._number += 1
        changed = [tensor for tensor in changed_arguments(func, args, kwargs) if tensor.layout == torch.strided]
        if changed:
            write = _Write(self._number, func.overloadpacket.__name__.strip("_"), calling_place())
            for storage in {storage_id(tensor) for tensor in changed}:
                self._writes.setdefault(storage, []).append(write)
        if self._number % KEPT_OPERATIONS == 0:
            self._forget_before(self._number - KEPT_OPERATIONS)
        return func(*args, **kwargs)

    def save(self, tensor: Tensor) -> _SavedTensor:
        """Pack a tensor that autograd saves."""
        # detached: an output that is saved would hold the node that holds it; the version is shared
        return _SavedTensor(tensor.detach(), tensor._version, self._number, calling_place())

    def load(self, saved: _SavedTensor) -> Tensor:
        """Unpack a saved tensor.

        Raises:
            _ConflictError: It was changed after it was saved.
        """
        if saved.tensor._version == saved.version:
            return saved.tensor
        writes = self._writes.get(storage_id(saved.tensor), ()) if saved.tensor.layout == torch.strided else ()
        self.conflict = _Conflict(saved, next((w for w in writes if w.number > saved.number), None))
        if not self._raises:
            raise _ConflictError
        error = RuntimeError(f"one of the variables needed for gradient computation has been {IN_PLACE}")
        error.add_note(f"gradwatch: {self.conflict}")
        raise error

    def _forget_before(self, number: int) -> None:
        later = {storage: [w for w in writes if w.number > number] for storage, writes in self._writes.items()}
        self._writes = {storage: writes for storage, writes in later.items() if writes}


def _at(place: Place) -> str:
    return f" at {place.with_text}" if place else ""
