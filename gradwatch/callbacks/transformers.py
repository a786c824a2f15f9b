"""Watch a training of transformers: `Trainer(..., callbacks=[Watch(run="runs/mine")])`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from gradwatch.monitor import Monitor
from gradwatch.monitor.watch import watch


@final
class Watch(TrainerCallback):
    """Watches every training: the loss is the one that the model returns, with its graph.

    A trainer tells its callbacks nothing between the backward pass and clipping; so gradients are read at the end of
    the last micro-batch's backward pass. A loss that is computed outside of the model is not seen.

    Args:
        options: Those of `gradwatch.watch`, without model and optimizer; for fp16 the accelerator's scaler among them:
            `scaler=trainer.accelerator.scaler`.

    Attributes:
        monitor: Monitor of the current training, or of the last one; None before. After an exception it is still open.
    """

    def __init__(self, **options: Any) -> None:
        self.monitor: Monitor | None = None
        self._options = options
        self._handle: RemovableHandle | None = None
        self._losses: list[Tensor] = []
        self._batches: list[Any] = []
        self._micro_batches = 1
        self._is_share = False
        self._validated: float | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to watch."""
        model, self._micro_batches = kwargs["model"], args.gradient_accumulation_steps
        known: dict[str, Any] = {"accumulate": self._micro_batches, "total_steps": state.max_steps}
        self._let_go()
        self.monitor = watch(model, kwargs["optimizer"], **known | self._options)
        self._handle = model.register_forward_hook(self._after_forward, with_kwargs=True)

    def _after_forward(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Keep the loss of a micro-batch."""
        loss = output.get("loss") if isinstance(output, Mapping) else None
        if not isinstance(loss, Tensor) or not loss.requires_grad or torch.compiler.is_compiling():
            return
        self._losses.append(loss)
        self._batches.append(dict(kwargs) or args)
        self._is_share = kwargs.get("num_items_in_batch") is not None
        if len(self._losses) == self._micro_batches:
            loss.register_hook(self._before_backward)

    def _before_backward(self, grad: Tensor) -> None:
        """Have the gradients read when the backward pass that begins is over."""
        Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        if self.monitor:
            self.monitor.observe()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the step; each micro-batch's loss is its share of the whole, or a mean of its own."""
        if not self.monitor:
            return
        loss = torch.stack(self._losses).sum() if self._losses else None
        if loss is not None and not self._is_share:
            loss = loss / len(self._losses)
        self.monitor.step(loss, batch=self._batches, val_loss=self._validated)
        self._forget()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the validation loss for the next step."""
        self._validated = kwargs.get("metrics", {}).get("eval_loss")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the run."""
        self._let_go()
        if self.monitor:
            self.monitor.close()

    def _let_go(self) -> None:
        """Leave the model, also one whose training ended with an exception."""
        if self._handle:
            self._handle.remove()
        self._forget()

    def _forget(self) -> None:
        self._losses, self._batches, self._validated = [], [], None
