"""Keep the state before each step of a custom loop, and write it as an incident after a critical finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from gradwatch.events import INCIDENT, NOT_RECORDED
from gradwatch.incident.recorder import Snapshotter, warrants_incident
from gradwatch.probe.inert_hook import inert_hook, untraced
from gradwatch.records import Event, Finding
from gradwatch.state.rng import random_state
from gradwatch.state.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What `watch` keeps of a loop whose steps it cannot run again by itself.

    Args:
        every: Steps between two copies of model and optimizer. 1: those of an incident are the ones from before its
            update, at the price of one copy a step; with more, they may be older.
        memory_mb: Host memory that this copy may take, in MB; a larger training is not copied.
        incidents: How many incidents are written at most.
    """

    every: int = 1
    memory_mb: int = 2048
    incidents: int = 5


@final
class StepSnapshotter:
    """Looks at each step when its first forward pass begins, which is after the batch was made.

    It keeps the inputs of that pass, the states of all random generators, and a copy of weights, buffers, optimizers
    and scaler.

    Args:
        directory: The run directory.
        models: The models by name.
        optimizers: The optimizers.
        scaler: The GradScaler, or None.
        settings: How much is kept.
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
        self._recorder = Snapshotter(
            directory, every=settings.every, memory_mb=settings.memory_mb, most=settings.incidents, rest_s=0.0
        )
        self._batch = Snapshot()
        self._random: dict[str, Any] | None = None
        self._step = 0
        self._refused = ""

    def attach(self) -> list[RemovableHandle]:
        """Hook the models, and return the hooks."""
        hook = untraced(inert_hook(self._before_forward))
        return [model.register_forward_pre_hook(hook, with_kwargs=True) for model in self._models.values()]

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._random is not None or not (module.training and torch.is_grad_enabled()):
            return  # the step has begun before, or this is no training
        self._random = random_state()
        self._batch.take({"inputs": list(args), "keywords": kwargs})
        if self._step >= self._recorder.due:
            self._refused = self._recorder.keep(self._step, self._state())

    def conclude(self, step: int, news: list[Finding]) -> Event | None:
        """End a step: write an incident where one of the findings calls for it.

        Args:
            step: The step.
            news: New findings; the list is cleared.

        Returns:
            What is to be noted of it, if anything.
        """
        found = [finding for finding in news if warrants_incident(finding)]
        news.clear()
        event = self._written(step, found) if found and self._random is not None else None
        self._random, self._step = None, step + 1
        if self._refused:
            event, self._refused = NOT_RECORDED.emit(step=step, reason=self._refused), ""
        return event

    def _written(self, step: int, findings: Sequence[Finding]) -> Event | None:
        kept = self._recorder.step
        facts = {"snapshot": kept, "torch": str(torch.__version__)}
        state = {"snapshot": self._recorder.read(), "random": self._random, "window": self._batch.read()}
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
