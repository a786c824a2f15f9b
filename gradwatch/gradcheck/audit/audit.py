"""Audit one live step, stage by stage: `gradwatch.audit_step`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.autowatch.search import params_of
from gradwatch.errors import GradwatchError, did_you_mean
from gradwatch.gradcheck.audit.case import AuditedStep, named_tensors
from gradwatch.gradcheck.audit.judging import judged
from gradwatch.gradcheck.audit.recorder import EventRecorder
from gradwatch.gradcheck.audit.result import StepAudit
from gradwatch.gradcheck.audit.windows import windows
from gradwatch.gradcheck.stepping.reached_state import ReachedState
from gradwatch.gradcheck.stepping.step import eager
from gradwatch.mistakes import IN_STEPS

PARAM_CHANGE = 0.01
"""Relative change of parameters that changes every loss that depends on them."""
NOISE_MARGIN = 10
"""Multiple of the noise of a loss below which it did not move; a change of the parameters by 1 ulp makes the noise."""


def audit_step(
    step: Callable[..., Any],
    *batch: Any,
    model: nn.Module,
    optimizer: Optimizer,
    allow: Collection[str] = (),
) -> StepAudit:
    """Check stage by stage whether a training step makes the intended update.

    The step runs twice as it is, and again with moved weights if a parameter gets no gradient. Hooks record its
    backward passes, unscaling, clipping, updates and schedules. Each stage is compared with the plain formula on the
    results of the stages before it. Afterwards, everything that the step reaches is restored: weights, buffers,
    gradients, the states of optimizers, schedulers and scalers, random generators, variables and containers.

    Args:
        step: Function of the batch that makes one update, with all of its micro-batches.
        batch: Parts of the batch. Data that the step takes from its own iterator cannot be restored.
        model: Model that the optimizer trains.
        optimizer: Optimizer whose update is judged, if the step has several.
        allow: Kinds of differences that are on purpose, such as `mean-of-means`.

    Returns:
        The verdict on each stage, and the differences with their places. It is true if no stage differs.

    Raises:
        GradwatchError: An argument is of the wrong type, or a kind is unknown.
    """
    _check_arguments(step, model, optimizer)
    return run_audit(step, batch, model=model, optimizer=optimizer, allow=allow)


def run_audit(
    step: Callable[..., Any],
    batch: tuple[Any, ...],
    *,
    model: nn.Module,
    optimizer: Optimizer,
    reached: Sequence[Any] = (),
    allow: Collection[str] = (),
) -> StepAudit:
    """Audit a step that reaches stateful objects outside of its closure; see `audit_step`."""
    check_allowed(allow)
    state = ReachedState(step, model, optimizer, batch, *reached)
    try:
        with warnings.catch_warnings(), eager():
            warnings.simplefilter("ignore")
            return _Audit(step, batch, model=model, optimizer=optimizer, state=state).result(allow)
    finally:
        state.restore()


def _check_arguments(step: Any, model: Any, optimizer: Any) -> None:
    for name, value, kind, expected in (
        ("model", model, nn.Module, "a torch.nn.Module"),
        ("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer"),
    ):
        if not isinstance(value, kind):
            raise GradwatchError(f"audit_step: {name} is a {type(value).__name__}, expected {expected}")
    if not callable(step):
        raise GradwatchError(f"audit_step: step is a {type(step).__name__}, expected a function of the batch")


def check_allowed(allow: Collection[str]) -> None:
    """Raise a GradwatchError if a kind of difference is unknown."""
    if isinstance(allow, str):
        raise GradwatchError(f"audit_step: allow is a string, expected a list: allow=['{allow}']")
    for name in allow:
        if name not in IN_STEPS:
            raise GradwatchError(f"audit_step: allow: there is no kind '{name}'{did_you_mean(name, IN_STEPS)}")


@final
class _Audit:
    """Runs a step and judges it."""

    def __init__(
        self,
        step: Callable[..., Any],
        batch: tuple[Any, ...],
        *,
        model: nn.Module,
        optimizer: Optimizer,
        state: ReachedState,
    ) -> None:
        self._step, self._batch, self._state = step, batch, state
        self._model, self._optimizer = model, optimizer
        named = named_tensors({"": model}, [optimizer])
        self._names = [n for n, _ in named.values()]
        self._watched = [p for _, p in named.values()]
        index = {key: i for i, key in enumerate(named)}
        self._own = range(len(list(model.parameters())))
        mine, others = params_of([optimizer]), [o for o in state.of(Optimizer) if o is not optimizer]
        self._held = [index[key] for key in mine]
        self._elsewhere = frozenset(index[key] for key in params_of(others) if key in index and key not in mine)

    def result(self, allow: Collection[str]) -> StepAudit:
        """Run and judge the step."""
        self._step(*self._batch)  # for the gradients that it leaves to the next one
        left = [t.grad for t in self._watched]
        self._state.restore()
        return judged([self._case(self._record(grads=left))], allow)

    def _record(
        self, *, grads: Sequence[Tensor | None] = (), moved: Sequence[int] = (), move: float = 0.0
    ) -> EventRecorder:
        """Run the step from its state, with the gradients of an earlier step, or with parameters moved."""
        self._state.restore()
        for tensor, grad in zip(self._watched, grads, strict=False):
            tensor.grad = grad
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for i in moved:
                tensor = self._watched[i]
                size = move or torch.finfo(tensor.dtype).eps
                signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
                tensor.add_(size * (tensor.abs() + tensor.abs().mean()) * signs.to(tensor))
        recorder = EventRecorder(
            self._watched,
            models=[self._model],
            spaces=[f.__globals__ for f in self._state.functions],
            caller=_Audit._record.__code__,
        )
        with recorder.recording():
            self._step(*self._batch)
        return recorder

    def _case(self, recorder: EventRecorder) -> AuditedStep:
        return AuditedStep(
            optimizer=self._optimizer,
            batch=self._batch,
            watched=self._watched,
            names=self._names,
            held=self._held,
            own=self._own,
            elsewhere=self._elsewhere,
            events=recorder.events,
            windows=windows(recorder.events, self._held),
            losses_move=self._losses_move,
        )

    def _losses_move(self, indices: Sequence[int]) -> bool:
        """Return whether the losses before the first update change with some parameters, beyond their noise."""
        start = _losses(self._record())
        noisy = _losses(self._record(moved=indices))
        moved = _losses(self._record(moved=indices, move=PARAM_CHANGE))
        if not start or not len(start) == len(noisy) == len(moved):
            return False
        noise = NOISE_MARGIN * max(abs(a - b) for a, b in zip(start, noisy, strict=True))
        rounding = NOISE_MARGIN * torch.finfo(torch.float32).eps * max(map(abs, start))
        return max(abs(a - b) for a, b in zip(start, moved, strict=True)) > noise + rounding


def _losses(recorder: EventRecorder) -> list[float]:
    """Return the losses of the backward passes before the first update."""
    losses = []
    for event in recorder.events:
        if event.kind == "update":
            break
        if event.kind == "backward":
            losses.append(event.loss)
    return losses if all(map(math.isfinite, losses)) else []
