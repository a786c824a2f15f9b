"""Detect that a copy of trained weights is written again and again, and keeps its values."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradwatch.events import COPY_UNCHANGED, Observation
from gradwatch.probe.copies.pairs import Pair, sample
from gradwatch.probe.device.dtensor import local_part
from gradwatch.probe.inert_hook import inert_hook, remove_hooks
from gradwatch.probe.updates.outside_moves import fingerprints

MIN_WRITTEN_LOOKS = 3
"""Minimum number of looks at which the copy had been written since the look before."""

MIN_STEPS = 100
"""Minimum number of steps since the copy was found: an average may begin with a decay of 1."""

MIN_DISTANCE = 0.02
"""Minimum distance of copy and trained weights, in units of the copy. An update with a decay of 0.9999 then changes a
float32 weight by 2e-6 of its size, 30 times its rounding error."""


@final
class WrittenCopy:
    """Compare version counters and values of a copy between some steps.

    Each write in place raises the version of a tensor. So a target network that is copied from itself is written, and
    so is an average with a decay of 1. A network that is frozen on purpose is not: the reference of a policy, a
    teacher. It may be loaded several times from one state, as an opponent is, so a copy that loads the tensors of
    others is left out.

    Args:
        pair: The copy and the trained module.
        step: Optimizer step.

    Attributes:
        has_moved: Whether the values of the copy have changed.
    """

    def __init__(self, pair: Pair, step: int) -> None:
        # weak: a probe must not keep the tensors of a discarded model alive
        self._tensors = [(weakref.ref(copy), weakref.ref(trained)) for copy, trained in pair.tensors]
        self._name, self._step, self._type = pair.name, step, type(pair.copy).__name__
        self._version = sum(copy._version for copy, _ in pair.tensors)
        self._first = sample([copy for copy, _ in pair.tensors])
        self._marks: list[bytes] = []
        self._looks = 0
        self._is_decided = False
        self.has_moved = False
        own = [weakref.ref(param) for param in pair.copy.parameters()]

        def before_load(state: Mapping[str, Any], *_: Any) -> None:
            mine = {local_part(param).data_ptr() for ref in own if (param := ref()) is not None}
            if any(isinstance(value, Tensor) and _is_foreign(value, mine) for value in state.values()):
                self._is_decided = True

        self._handles: list[RemovableHandle] = [
            pair.copy._register_load_state_dict_pre_hook(inert_hook(before_load)),
        ]

    def find(self, step: int) -> Iterator[Observation]:
        """Yield an observation if the copy was written often and has kept all of its values.

        Args:
            step: Optimizer step.
        """
        both = [(one(), two()) for one, two in self._tensors]
        alive = [(copy, trained) for copy, trained in both if copy is not None and trained is not None]
        if self.has_moved or len(alive) < len(both):
            self.close()
            return
        copies = [copy for copy, _ in alive]
        version, values = sum(copy._version for copy in copies), sample(copies)
        is_written, self._version = version != self._version, version
        if values is None or self._first is None:
            return
        if not np.array_equal(values, self._first, equal_nan=True):
            self.has_moved = True
        if self.has_moved or self._is_decided or not is_written or any(copy.grad is not None for copy in copies):
            return
        self._looks += 1
        if not self._marks:
            self._marks = fingerprints(copies)
        elif self._looks >= MIN_WRITTEN_LOOKS and step - self._step >= MIN_STEPS:
            far = self._distance([trained for _, trained in alive])
            if far < MIN_DISTANCE:
                return
            self._is_decided = True
            if fingerprints(copies) == self._marks:
                yield COPY_UNCHANGED.observe(
                    self._name,
                    values={"steps": step - self._step, "distance": far},
                    what=f"`{self._name}`" if self._name else f"a copy of the model ({self._type})",
                )

    def close(self) -> None:
        """Remove the hook."""
        remove_hooks(self._handles)

    def _distance(self, trained: Sequence[Tensor]) -> float:
        values = sample(trained)
        if values is None or self._first is None or values.shape != self._first.shape:
            return 0.0
        size = float(np.linalg.norm(self._first))
        return float(np.linalg.norm(values - self._first)) / size if size > 0 else 0.0


def _is_foreign(value: Tensor, mine: set[int]) -> bool:
    # only matrices: buffers and the tensors of other parts of a larger model do not count
    return value.is_floating_point() and value.ndim >= 2 and local_part(value).data_ptr() not in mine
