"""Watch a transformers training: `Trainer(..., callbacks=[Watch(run="runs/mine")])`."""

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
from gradwatch.probe.inert_hook import inert_hook


@final
class Watch(TrainerCallback):
    """Watches every training of a transformers trainer.

    The loss is the one that the model returns, with its autograd graph. A loss that is computed outside of the model is
    not recorded.

    The trainer calls no callback between the backward pass and clipping. So gradients are read at the end of the last
    micro-batch's backward pass.

    Args:
        options: Options of `gradwatch.watch`, without model and optimizer. For fp16, pass the accelerator's scaler:
            `scaler=trainer.accelerator.scaler`.

    Attributes:
        monitor: Monitor of the current or the last training, or None before the first. After an exception it is still
            open.
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
        """Start watching the model and its optimizer."""
        model, self._micro_batches = kwargs["model"], args.gradient_accumulation_steps
        known: dict[str, Any] = {"accumulate": self._micro_batches, "total_steps": state.max_steps}
        self._let_go()  # a training that raised has left its hook on the model
        # the user's options win over the trainer's values
        self.monitor = watch(model, kwargs["optimizer"], **known | self._options)
        self._handle = model.register_forward_hook(inert_hook(self._after_forward), with_kwargs=True)

    def _after_forward(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Keep the loss and the batch of a micro-batch."""
        loss = output.get("loss") if isinstance(output, Mapping) else None
        # a loss without a gradient is of an evaluation
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return
        self._losses.append(loss)
        self._batches.append(dict(kwargs) or args)
        # with `num_items_in_batch`, the model divides its loss by the items of the whole step
        self._is_share = kwargs.get("num_items_in_batch") is not None
        # gradients are complete only after the last micro-batch
        if len(self._losses) == self._micro_batches:
            loss.register_hook(inert_hook(self._before_backward))

    def _before_backward(self, grad: Tensor) -> None:
        # in a hook, since the engine accepts a final callback only during a backward pass
        Variable._execution_engine.queue_callback(self._after_backward)

    def _after_backward(self) -> None:
        if self.monitor:
            self.monitor.observe()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the step."""
        if not self.monitor:
            return
        loss = torch.stack(self._losses).sum() if self._losses else None
        # shares add up to the loss of the step; means of the micro-batches are averaged
        if loss is not None and not self._is_share:
            loss = loss / len(self._losses)
        self.monitor.step(loss, batch=self._batches, val_loss=self._validated)
        self._forget()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the validation loss for the next step."""
        # an evaluation without labels has no loss
        self._validated = kwargs.get("metrics", {}).get("eval_loss")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the run, and remove the hook from the model."""
        self._let_go()
        if self.monitor:
            self.monitor.close()

    def _let_go(self) -> None:
        if self._handle:
            self._handle.remove()
        self._forget()

    def _forget(self) -> None:
        self._losses, self._batches, self._validated = [], [], None
