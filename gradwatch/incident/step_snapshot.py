"""Keep the state before each step of a custom loop, and write it as an incident after a critical finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradwatch.errors import CheckpointError
from gradwatch.events import INCIDENT, NOT_RECORDED
from gradwatch.incident.recorder import Snapshotter, warrants_incident
from gradwatch.probe.inert_hook import add_input_hook, takes_hooks, untraced
from gradwatch.records import Event, Finding
from gradwatch.state import codec
from gradwatch.state.rng import random_state
from gradwatch.state.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Configure the state that `watch` records of a custom loop.

    `watch` cannot run the steps of a custom loop again, so it records their inputs.

    Args:
        every: Steps between two copies of model and optimizer. With 1, an incident has the copy from before its
            update, at the cost of one copy per step. With more, the copy may be older.
        memory_mb: Maximum host memory of this copy, in MB; a larger training is not copied.
        incidents: Maximum number of incidents to write.
    """

    every: int = 1
    memory_mb: int = 2048
    incidents: int = 5


@final
class StepSnapshotter:
    """Record the state of each step when its first forward pass begins, after the batch was loaded.

    The record has the inputs of this pass and the states of all random generators. It also has a copy of weights,
    buffers, optimizers and scaler. The batch that the loop passes to `Monitor.step` is added at the end of the step: it
    may have targets, which the forward pass does not see.

    Args:
        directory: The run directory.
        models: Models by name.
        optimizers: Optimizers.
        scaler: The GradScaler, or None.
        settings: Interval and limits of the record.
    """

    def __init__(
        self,
        directory: Path,
        models: Mapping[str, nn.Module],
        *,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None,
        settings: StepRecord,
    ) -> None:
        self._models = dict(models)
        self._optimizers = list(optimizers)
        self._scaler = scaler
        # no rest: which steps are copied must not depend on the clock
        self._recorder = Snapshotter(
            directory, every=settings.every, memory_mb=settings.memory_mb, most=settings.incidents, rest_s=0.0
        )
        self._batch = Snapshot()
        self._random: dict[str, Any] | None = None
        self._step = 0
        self._refused = ""

    def attach(self) -> list[RemovableHandle]:
        """Register the hooks on the models, and return their handles."""
        hook = untraced(self._before_forward)
        models = [model for model in self._models.values() if takes_hooks(model)]
        return [add_input_hook(model, hook, is_compiled=True) for model in models]

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._random is not None or not (module.training and torch.is_grad_enabled()):
            return  # the step has already begun, or this is an evaluation
        self._random = random_state()
        # copied, since the loop may overwrite its batch before the finding is known
        self._batch.take({"inputs": list(args), "keywords": kwargs})
        if self._step >= self._recorder.due:
            self._refused = self._recorder.keep(self._step, self._state())

    def conclude(self, step: int, news: list[Finding], *, batch: Any, micro_batches: int) -> Event | None:
        """End a step, and write an incident if one of the findings warrants it.

        Args:
            step: The step.
            news: New findings; the list is cleared.
            batch: The batch that the loop passed to the last call of `Monitor.step`, or None.
            micro_batches: Number of calls of `Monitor.step` in this step.

        Returns:
            Event to add to the history, or None.
        """
        found = [finding for finding in news if warrants_incident(finding)]
        news.clear()
        # without the random state, no forward pass was seen in this step, and there is no batch to write
        event = None
        if found and self._random is not None:
            event = self._written(step, found, batch=batch, micro_batches=micro_batches)
        self._random, self._step = None, step + 1
        if self._refused:
            event, self._refused = NOT_RECORDED.emit(step=step, reason=self._refused), ""
        return event

    def _written(self, step: int, findings: Sequence[Finding], *, batch: Any, micro_batches: int) -> Event | None:
        kept = self._recorder.step
        facts = {"snapshot": kept, "torch": str(torch.__version__), "micro_batches": micro_batches}
        state = {"snapshot": self._recorder.read(), "random": self._random, "window": self._batch.read()}
        if batch is not None and _is_encodable(batch):
            state["batch"] = batch
        path = self._recorder.write(step=step, findings=findings, facts=facts, state=state)
        if path is None:
            return None
        return INCIDENT.emit(step=step, path=f"incidents/{path.name}", content=f"the state before step {step}")

    def _state(self) -> dict[str, Any]:
        return {
            "model": {name: model.state_dict() for name, model in self._models.items()},
            "optimizer": [optimizer.state_dict() for optimizer in self._optimizers],
            "scaler": self._scaler.state_dict() if self._scaler else None,
        }


def _is_encodable(batch: Any) -> bool:
    try:
        codec.encode(batch)
    except CheckpointError:  # an object of a data library: the inputs of the forward pass are kept without it
        return False
    return True
