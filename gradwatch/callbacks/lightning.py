"""Watch a Lightning training: `Trainer(callbacks=[Watch(run="runs/mine")])`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from gradwatch.callbacks.recording import Recording
from gradwatch.monitor import Monitor

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:  # `pytorch_lightning` is the older name of the same package
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]


@final
class Watch(Callback):
    """Watches every fit of a Lightning trainer.

    Gradients are read before Lightning clips them, and losses are read with their autograd graph. Checkpoints have the
    state of the run, so that `fit(ckpt_path=...)` continues it in its directory.

    Args:
        val_loss: Name under which the module logs its validation loss.
        options: Options of `gradwatch.watch`, without model and optimizer. The trainer gives `scaler`, `accumulate` and
            `total_steps`.
    """

    def __init__(self, *, val_loss: str = "val_loss", **options: Any) -> None:
        self._val_loss, self._recording = val_loss, Recording(options)
        self._loss: Tensor | None = None
        self._validated: Tensor | None = None

    @property
    def monitor(self) -> Monitor | None:
        """Monitor of the current or the last fit, or None before the first fit."""
        return self._recording.monitor

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the state of an earlier checkpoint: the checkpoint of this fit is loaded next."""
        self._recording.load({})

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON data."""
        return self._recording.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the result of `state_dict` when the fit starts."""
        self._recording.load(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start watching the model and its optimizers."""
        # inf for an endless training, -1 for an iterable dataset without `max_steps`
        steps = trainer.estimated_stepping_batches
        known: dict[str, Any] = {
            "scaler": getattr(trainer.precision_plugin, "scaler", None),  # only the plugin for mixed precision has one
            "accumulate": trainer.accumulate_grad_batches,
            "total_steps": int(steps) if math.isfinite(steps) and steps > 0 else None,
        }
        self._loss = self._validated = None
        self._recording.start(pl_module, trainer.optimizers, **known)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Keep the loss with its autograd graph."""
        # with manual optimization, one batch may have several backward passes: add their losses
        before = None if pl_module.automatic_optimization else self._loss
        self._loss = loss if before is None else before + loss

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Read the gradients, after unscaling and before clipping."""
        # LBFGS calls its closure several times per step, so most of these gradients are not used for the update
        if self.monitor and not isinstance(optimizer, LBFGS):
            self.monitor.observe(optimizer, needs_norm=False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step or the micro-batch."""
        if not self.monitor:
            return
        loss, self._loss = self._loss, None  # `on_before_backward` adds to the kept loss
        if loss is not None and isinstance(outputs, Mapping) and pl_module.automatic_optimization:
            # the kept loss is divided by the micro-batches and scaled: keep its graph, and restore the module's value
            value = trainer.accumulate_grad_batches * outputs["loss"].detach()
            with torch.enable_grad():
                loss = loss + (value - loss.detach())
        self.monitor.step(loss, batch=batch, val_loss=self._validated)
        self._validated = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the validation loss for the next step."""
        if not trainer.sanity_checking:  # the sanity check runs before training, on a few batches only
            self._validated = trainer.callback_metrics.get(self._val_loss)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the run as failed or interrupted."""
        if self.monitor:
            # as a `with` block does, so that the monitor records how the run ended
            self.monitor.__exit__(type(exception), exception, exception.__traceback__)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run."""
        if self.monitor:
            self.monitor.close()
