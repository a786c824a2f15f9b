"""Make the monitors of a script, unless it makes its own."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, final

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gradwatch.autowatch.settings import ScriptSettings

if TYPE_CHECKING:
    from gradwatch.monitor import Monitor


@final
class MonitorMaker:
    """Calls `watch`, and notices calls of the script.

    Args:
        settings: Options of the user.
        on_own_call: Called when the script calls `watch` itself.
        on_exit: Called at the end of the process, before its monitors are closed.
    """

    def __init__(
        self, settings: ScriptSettings, *, on_own_call: Callable[[], None], on_exit: Callable[[], None]
    ) -> None:
        self._settings, self._on_own_call, self._on_exit = settings, on_own_call, on_exit
        self._number = 0

    def make(
        self, models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer], scaler: GradScaler | None
    ) -> Monitor | None:
        """Return a monitor of some models, or None if the script has called `watch` itself."""
        # not before: most processes train nothing
        from gradwatch.monitor import watch as module
        from gradwatch.monitor.calls import calls

        settings = self._settings
        if calls.number > self._number:
            settings.mark_seen()
            self._on_own_call()
            return None
        self._number += 1
        with _without_autocast():
            monitor = module.watch(
                models,
                optimizers,
                run=settings.shown_run,
                scaler=scaler,
                record=settings.record,
                total_steps=settings.total_steps,
            )
        if calls.listener is None:
            calls.listener = self._on_own_call
            atexit.register(self._on_exit)  # after `watch`, so before its monitors are closed
        return monitor


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Leave autocast: a loop is found inside of a forward pass, and the checks of `watch` need full precision."""
    with contextlib.ExitStack() as stack:
        for device in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
