"""Watch a training of Lightning, under either name of it: `Trainer(callbacks=[Watch(run="runs/mine")])`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from gradwatch.monitor import Monitor
from gradwatch.monitor.watch import watch

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:  # the older name of the same package, which calls a callback of either
    from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]


@final
class Watch(Callback):
    """Watches every fit: gradients are read before Lightning clips them, losses with their graph.

    Args:
        val_loss: Name under which the module logs its validation loss.
        options: Those of `gradwatch.watch`, without model and optimizer. Scaler, accumulation and the planned steps are
            those of the trainer.

    Attributes:
        monitor: Monitor of the current fit, or of the last one; None before.
    """

    def __init__(self, *, val_loss: str = "val_loss", **options: Any) -> None:
        self.monitor: Monitor | None = None
        self._val_loss, self._options = val_loss, options
        self._loss: Tensor | None = None
        self._validated: Tensor | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch."""
        steps = trainer.estimated_stepping_batches
        known: dict[str, Any] = {
            "scaler": getattr(trainer.precision_plugin, "scaler", None),
            "accumulate": trainer.accumulate_grad_batches,
            "total_steps": int(steps) if math.isfinite(steps) and steps > 0 else None,
        }
        self._loss = self._validated = None
        self.monitor = watch(pl_module, trainer.optimizers, **known | self._options)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Keep the loss, with its graph; where a module optimizes by hand, a batch may have several."""
        before = None if pl_module.automatic_optimization else self._loss
        self._loss = loss if before is None else before + loss

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Read the gradients, unscaled and not clipped yet; LBFGS makes some along its way that are no update's."""
        if self.monitor and not isinstance(optimizer, LBFGS):
            self.monitor.observe(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the step, or the micro-batch."""
        if not self.monitor:
            return
        loss, self._loss = self._loss, None
        if loss is not None and isinstance(outputs, Mapping) and pl_module.automatic_optimization:
            # its value is that of the module; the graph is that of the loss divided by micro-batches and scaled
            value = trainer.accumulate_grad_batches * outputs["loss"].detach()
            with torch.enable_grad():
                loss = loss + (value - loss.detach())
        self.monitor.step(loss, batch=batch, val_loss=self._validated)
        self._validated = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the validation loss for the next step."""
        if not trainer.sanity_checking:
            self._validated = trainer.callback_metrics.get(self._val_loss)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the run as what it is."""
        if self.monitor:
            self.monitor.__exit__(type(exception), exception, exception.__traceback__)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run."""
        if self.monitor:
            self.monitor.close()
