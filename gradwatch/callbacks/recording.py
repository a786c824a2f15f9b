"""Start the monitor of a trainer, and continue its run after the trainer has loaded a checkpoint."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import nn

from gradwatch.monitor import Monitor
from gradwatch.monitor.watch import watch

ARRAY = "npy"
"""Key of an array in a saved state: the only one of its mapping."""


@final
class Recording:
    """Starts monitors, and keeps the state of the newest one in the checkpoints of a trainer.

    Args:
        options: Options of `gradwatch.watch`, without model and optimizer. They win over the values of the trainer.

    Attributes:
        monitor: Monitor of the current or the last training, or None before the first.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.monitor: Monitor | None = None
        self._options = dict(options)
        self._saved: Mapping[str, Any] | None = None

    def start(
        self, model: nn.Module, optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], **known: Any
    ) -> Monitor:
        """Watch a model, and continue the run of the loaded state if there is one."""
        saved, self._saved = self._saved, None
        if saved:
            known |= {"resume": saved["steps"]}
        options = known | self._options
        # the run may have got another name, such as `mine-2`; another option begins another run at the same step
        if saved and saved["asked"] == _text(options.get("run")):
            options["run"] = saved["run"]
        self.monitor = watch(model, optimizers, **options)
        if saved:
            self.monitor.restore(_decoded(saved["monitor"]))
        return self.monitor

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON data; it is empty before the first training."""
        if self.monitor is None:
            return {}
        return {
            "steps": self.monitor.next_step,
            "run": _text(self.monitor.run_dir),
            "asked": _text(self._options.get("run")),
            "monitor": _encoded(self.monitor.state()),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state` at the next start. An empty state begins a new run."""
        self._saved = state or None


def _text(path: Any) -> str | None:
    return None if path is None else str(path)


def _encoded(value: Any) -> Any:
    """Return a state of plain data and arrays as JSON data, which every trainer saves and loads without pickle."""
    if isinstance(value, np.ndarray):
        file = io.BytesIO()
        np.save(file, value, allow_pickle=False)
        return {ARRAY: base64.b64encode(file.getvalue()).decode()}
    if isinstance(value, Mapping):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    return value


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {ARRAY}:
        return np.load(io.BytesIO(base64.b64decode(value[ARRAY])), allow_pickle=False)
    return {key: _decoded(item) for key, item in value.items()}
