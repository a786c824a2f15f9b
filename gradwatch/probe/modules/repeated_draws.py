"""Find a loop that seeds torch's generators again at each step, so that every step draws the same random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, final

import torch
from torch import Tensor

from gradwatch.events import DRAWS_REPEATED, Observation
from gradwatch.probe.call_listeners import CallListeners, Function
from gradwatch.probe.inert_hook import inert_hook
from gradwatch.probe.modules.random_draws import GeneratorState
from gradwatch.records import LayerInfo

MIN_SEEDINGS = 16
"""Calls in a row with the same seed, each with draws and an update after it. A loop may seed each of a few parts."""

MAX_CHANGES = 8
"""Maximum changes in place of a weight between two such calls. An update makes one to three: these are steps, and not
epochs, which may repeat an order on purpose."""


class SeedListener(Protocol):
    """An object that is called before and after torch's generators are seeded. Its methods must not raise."""

    def before_seed(self) -> None:
        """Read the generators."""
        ...

    def after_seed(self, seed: int) -> None:
        """Read the generators again."""
        ...


def _seeding(body: Function, listeners: CallListeners[SeedListener]) -> Function:
    """Return a function that calls the listeners before and after torch's."""

    def manual_seed(seed: Any) -> Any:
        present = [] if torch.compiler.is_compiling() else [*listeners]
        for listener in present:
            listener.before_seed()
        result = body(seed)
        for listener in present:
            listener.after_seed(int(seed))
        return result

    return manual_seed


SEEDINGS: CallListeners[SeedListener] = CallListeners(torch, "manual_seed", _seeding)
"""Listeners of `torch.manual_seed`."""


@final
class RepeatedDraws:
    """Count the steps that begin with the same seed and then draw random numbers.

    Only calls of `torch.manual_seed` take time.

    Args:
        params: The parameters, in the order of `layers`.
        layers: The parameters' descriptions.
    """

    def __init__(self, params: Sequence[Tensor], layers: Sequence[LayerInfo]) -> None:
        held = (param for param, layer in zip(params, layers, strict=True) if layer.group is not None)
        self._param = next((param for param in held if param.requires_grad and not param.is_inference()), None)
        self._devices = sorted({param.device.index or 0 for param in params if param.is_cuda})
        self._seed: int | None = None  # of the newest call
        self._state: GeneratorState | None = None  # after it
        self._version, self._seedings, self._is_repeat = 0, 0, False
        self._before: Callable[[], None] = inert_hook(self._read)
        self._after: Callable[[int], None] = inert_hook(self._count)
        if self._param is not None:
            SEEDINGS.add(self)

    def before_seed(self) -> None:
        """Record whether numbers were drawn, and the weights updated, since the call before."""
        self._before()

    def after_seed(self, seed: int) -> None:
        """Count the call if it repeats the one before."""
        self._after(seed)

    def find(self, _step: int = 0, /) -> Iterator[Observation]:
        """Yield an observation, after a step, if enough calls in a row have repeated the one before."""
        if self._seedings >= MIN_SEEDINGS:
            values, self._seedings = {"steps": self._seedings}, 0
            self.close()
            yield DRAWS_REPEATED.observe(values=values, seed=self._seed)

    def close(self) -> None:
        """Stop listening."""
        SEEDINGS.remove(self)

    def _read(self) -> None:
        assert self._param is not None, "nothing listens without a parameter"
        changes = self._param._version - self._version
        has_drawn = self._state is not None and not self._state_now().is_equal(self._state)
        self._is_repeat = has_drawn and 0 < changes <= MAX_CHANGES

    def _count(self, seed: int) -> None:
        assert self._param is not None, "nothing listens without a parameter"
        self._seedings = self._seedings + 1 if self._is_repeat and seed == self._seed else 0
        self._seed, self._state, self._version = seed, self._state_now(), self._param._version

    def _state_now(self) -> GeneratorState:
        # reading an offset waits for no device
        offsets = tuple(torch.cuda.default_generators[device].get_offset() for device in self._devices)
        return GeneratorState(torch.default_generator.get_state(), offsets)
