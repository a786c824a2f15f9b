"""gradwatch as a monitor of the fault zoo: `python -m zoo.score --monitor zoo_adapter:attach`."""

from __future__ import annotations

from typing import Any

from torch import nn
from zoo.protocol import FAULTS, Finding  # type: ignore[import-not-found]

from gradwatch import Monitor, watch


class Adapter:
    """Passes a script's steps to a monitor, and its findings back in the zoo's own words."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def step(self, loss: Any, **context: Any) -> None:
        """Record the end of one optimizer step."""
        self._monitor.step(loss, batch=context.get("batch"), val_loss=context.get("val_loss"))

    def findings(self) -> list[Any]:
        """Return what was found, most telling first, without the kinds that the zoo has no word for."""
        return [
            Finding(kind=f.kind, layer=layer, step=f.step, severity=str(f.severity))
            for f in self._monitor.findings()
            for layer in f.names or (None,)
            if f.kind in FAULTS
        ]


def attach(model: nn.Module, optimizer: Any, **options: Any) -> Adapter:
    """Watch a script's model. Options as the zoo gives them: scaler, accumulate, loss_fn."""
    known = {k: v for k, v in options.items() if k in {"scaler", "accumulate", "loss_fn"}}
    return Adapter(watch(model, optimizer, **known))
