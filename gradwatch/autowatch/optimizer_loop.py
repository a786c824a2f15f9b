"""Follow a loop with optimizers: which losses belong to a step, and when the step ends."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from gradwatch.autowatch.search import params_of
from gradwatch.autowatch.step_recorder import StepRecorder, total

PATIENCE = 16
"""Steps of one optimizer to wait for the others: a GAN may train its critic several times per step.

If another optimizer steps again after more steps than that, twice as many are waited for from then on.
"""


@final
class OptimizerLoop:
    """Records a step when all optimizers of a loop have stepped.

    Its loss is the sum of the losses whose backward passes led to the updates: of all micro-batches, and of the newest
    update of each optimizer.

    Args:
        recorder: Records the steps.
        optimizers: The optimizers.

    Attributes:
        recorder: Records the steps.
        params: The `id` of each parameter that an optimizer holds.
        updated_at: Clock of the script at the last update.
        has_trained: Whether a backward pass has led to an update.
        num_backward: Number of backward passes so far.
    """

    def __init__(self, recorder: StepRecorder, optimizers: Sequence[Optimizer]) -> None:
        self.recorder = recorder
        self.params = frozenset(params_of(optimizers))
        self.updated_at = -1
        self.has_trained, self.num_backward = False, 0
        # weak: the loops of a script must not keep the models of its earlier trainings
        self._optimizers = weakref.WeakSet(optimizers)
        self._expected = {id(optimizer) for optimizer in optimizers}
        self._updates: Counter[int] = Counter()
        self._pending: list[Tensor] = []
        self._losses: dict[int, Tensor] = {}
        self._num_updates = 0  # of the newest optimizers
        self._newest: dict[int, int] = {}  # by optimizer: updates of all until its last one
        self._patience, self._writes = PATIENCE, self._count_writes()
        self._is_stepping = self._has_closure_loss = self._is_due = self._is_scaled = False

    def __contains__(self, optimizer: Optimizer) -> bool:
        return optimizer in self._optimizers

    @property
    def num_optimizers(self) -> int:
        """Number of optimizers that the script still has."""
        return len(self._optimizers)

    def adopt(self, optimizer: Optimizer) -> bool:
        """Continue with another optimizer of the same parameters, if the previous one has made a single update.

        A script may build its optimizer again for each update. A stage of a training makes more updates with one.
        """
        if self._num_updates != 1 or self._is_due or self.params != params_of([optimizer]).keys():
            return False
        self._optimizers, self._expected = weakref.WeakSet([optimizer]), {id(optimizer)}
        self._num_updates = 0
        return True

    def on_backward(self, loss: Tensor, *, is_scaled: bool) -> None:
        """Keep a loss, just before its backward pass.

        Args:
            loss: The loss, not scaled.
            is_scaled: Whether a GradScaler scales it for the backward pass.
        """
        self.num_backward += 1
        if self._is_due:  # the loop has not updated its GradScaler
            self._record()
        if self._is_stepping and self._has_closure_loss:
            # LBFGS calls its closure several times: the first loss is the one at the current weights
            self.recorder.forget_inputs()
            return
        self._has_closure_loss = self._is_stepping
        if self._pending and self._is_cleared():
            self._pending.clear()
            self.recorder.forget()
        self._pending.append(loss)
        self._is_scaled |= is_scaled
        self.recorder.begin_backward()

    def before_step(self) -> None:
        """Prepare for the losses of a closure."""
        self._is_stepping, self._has_closure_loss = True, False
        if not self.has_trained:
            self._writes = self._count_writes()

    def is_idle(self) -> bool:
        """Return whether the last call of an optimizer had no gradient, and moved nothing."""
        return self._is_cleared() and self._writes == self._count_writes()

    def never_stepped(self) -> bool:
        """Return whether no optimizer was ever called, and nothing else moved the parameters."""
        return self.updated_at < 0 and self._writes == self._count_writes()

    def after_step(self, optimizer: Optimizer, clock: int) -> bool:
        """Record a step if it is complete. Return whether a backward pass led to the update."""
        self._is_stepping, self.updated_at = False, clock
        key = id(optimizer)
        if self._pending:
            self._losses[key] = total(self._pending)
            self._pending = []
        if not self._losses:
            return False
        self.has_trained = True
        self._updates[key] += 1
        self._num_updates += 1
        if key not in self._expected:  # it was considered idle
            self._patience = max(self._patience, 2 * (self._num_updates - self._newest.get(key, 0)))
            self._expected.add(key)
        self._newest[key] = self._num_updates
        if self._updates[key] >= self._patience:  # the others are idle
            self._expected = set(self._updates)
        if self._expected <= self._updates.keys():
            self._is_due = True
            if not self._is_scaled:
                self._record()
        return True

    def after_scaler_update(self) -> None:
        """Record a step that has waited for the new loss scale."""
        if self._is_due:
            self._record()

    def detach(self) -> None:
        """Record a step that is due, and remove all hooks."""
        if self._is_due:
            self._record()
        self.recorder.detach()

    def _record(self) -> None:
        loss = total([*self._losses.values()])
        self._is_due = self._is_scaled = False
        self._updates.clear()
        self._losses = {}
        self.recorder.record(loss)

    def _count_writes(self) -> int:
        return sum(param._version for param in params_of(self._optimizers).values() if not param.is_inference())

    def _is_cleared(self) -> bool:
        """Return whether the loop has cleared all gradients, so that the losses so far belong to no update."""
        return all(param.grad is None for param in params_of(self._optimizers).values())
