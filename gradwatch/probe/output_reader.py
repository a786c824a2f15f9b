"""Define the readers of a model's outputs at sampled steps, and of the backward passes that start there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol

from gradwatch.events import Observation


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

    def begin(self) -> None:
        """Prepare for the next sampled step."""
        ...

    def clear(self) -> None:
        """Drop the data and the hooks of the step before."""
        ...

    def watch(self, output: Any, inputs: Any = (), /) -> None:
        """Read the output of a forward call, which had these inputs."""
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
