"""Keep the run of a loop with Accelerate in its checkpoints: `accelerator.register_for_checkpointing(Watch(...))`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import nn

from gradwatch.callbacks.recording import Recording
from gradwatch.monitor import Monitor


@final
class Watch:
    """Watches a loop, and continues its run after `accelerator.load_state`.

    Args:
        options: Options of `gradwatch.watch`, without model and optimizer.
    """

    def __init__(self, **options: Any) -> None:
        self._recording = Recording(options)

    def start(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Monitor:
        """Watch what `prepare` returned, after a state was loaded, and return the monitor."""
        return self._recording.start(model, optimizer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON data."""
        return self._recording.state()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the result of `state_dict` at the next start."""
        self._recording.load(state_dict)
