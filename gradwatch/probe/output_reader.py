"""Define the readers of a model's outputs at sampled steps, and of the backward passes that start there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Protocol, final

from torch import Tensor

from gradwatch.events import Observation
from gradwatch.probe.device.sync import is_capturing
from gradwatch.probe.graph.graph import Graph, Node
from gradwatch.probe.nested import tensors_of
from gradwatch.probe.saved_hooks import count_uses, saved_tensor


@final
class ForwardCall:
    """One forward call of an outermost module. All readers share its graph.

    Args:
        output: What the call returned.
        inputs: What it was called with.
        has_turn: Whether the graph of this call may be read.
        since: Result of `count_uses` before the call.
    """

    def __init__(self, output: Any, inputs: Any = (), *, has_turn: bool = True, since: int | None = None) -> None:
        self.output, self.inputs, self._has_turn, self._since = output, inputs, has_turn, since

    @cached_property
    def roots(self) -> list[Tensor]:
        """Return the outputs with a graph to read.

        A CUDA graph that is being captured has none: its replay calls no hooks.
        """
        outputs = [tensor for tensor in tensors_of(self.output) if tensor.grad_fn is not None] if self._has_turn else []
        return [] if is_capturing(outputs) else outputs

    @cached_property
    def graph(self) -> Graph:
        """Return the graph of the outputs."""
        return Graph(*self.roots)

    def saved(self, node: Node, name: str) -> Tensor | None:
        """Return a tensor that a node of the graph saves, or None if the tensor is not in memory unchanged."""
        return saved_tensor(node, name, self._since)


class OutputReader(Protocol):
    """Reads the outputs of a model between a forward pass and the end of the step.

    Attributes:
        part: Name of the reading, for messages about its failures.
    """

    part: ClassVar[str]

    @property
    def is_over(self) -> bool:
        """Return whether nothing more is read."""
        ...

    def clear(self) -> None:
        """Drop the data and the hooks of the step before, when the next sampled step begins."""
        ...

    def watch(self, call: ForwardCall, /) -> None:
        """Read a forward call."""
        ...

    def find(self, loss: Any = None, /) -> Iterator[Observation]:
        """Yield what has been found, after the backward pass of a loss."""
        ...

    def state(self) -> dict[str, Any]:
        """Return plain data that `restore` reads back."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`."""
        ...


@final
class OutputReaders:
    """Several readers of the same forward calls.

    The graphs of calls 1, 2, 3, 4, 6, 9 and so on are read. A loop that calls a cell for each element of a sequence
    makes the graph longer with each call, so walking every graph would take quadratic time.

    Args:
        readers: The readers, in the order in which they read.
    """

    def __init__(self, readers: Iterable[OutputReader] = ()) -> None:
        self._readers = tuple(readers)
        self._calls = self._next = 0
        self._since: int | None = None

    def __iter__(self) -> Iterator[OutputReader]:
        return iter(self._readers)

    @property
    def are_over(self) -> bool:
        """Return whether no reader reads anything more."""
        return all(reader.is_over for reader in self._readers)

    def begin(self) -> None:
        """Prepare for the next sampled step."""
        self._calls, self._next, self._since = 0, 1, count_uses()
        self.clear()

    def clear(self) -> None:
        """Drop the data and the hooks of the step before."""
        for reader in self._readers:
            reader.clear()

    def watch(self, output: Any, inputs: Any) -> None:
        """Let each reader read a forward call."""
        self._calls += 1
        has_turn = self._calls == self._next
        if has_turn:
            self._next += max(1, self._next // 2)
        call = ForwardCall(output, inputs, has_turn=has_turn, since=self._since)
        for reader in self._readers:
            reader.watch(call)

    def state(self) -> list[dict[str, Any]]:
        """Return plain data that `restore` reads back."""
        return [reader.state() for reader in self._readers]

    def restore(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the result of `state`; an older one has no state of newer readers."""
        for reader, state in zip(self._readers, states, strict=False):
            reader.restore(state)
