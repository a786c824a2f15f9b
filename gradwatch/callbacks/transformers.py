"""Watch a transformers training: `Trainer(..., callbacks=[Watch(run="runs/mine")])`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from gradwatch.callbacks.backward_calls import BACKWARD_LISTENERS
from gradwatch.callbacks.recording import Recording
from gradwatch.monitor import Monitor
from gradwatch.probe.inert_hook import inert_hook


@final
class Watch(TrainerCallback, ExportableState):
    """Watches every training of a transformers trainer.

    The loss is the one of the backward pass, with its autograd graph, whether the model, `compute_loss` or
    `compute_loss_func` has computed it. The trainer hands it to no callback, so `Accelerator.backward` is wrapped
    during the training. Gradients are read there too, after the last micro-batch and before clipping.

    Checkpoints have the state of the run, so that `train(resume_from_checkpoint=...)` continues it in its directory.
    Leave `restore_callback_states_from_checkpoint` off: it would build another callback, without the options.

    Args:
        options: Options of `gradwatch.watch`, without model and optimizer. For fp16, pass the accelerator's scaler:
            `scaler=trainer.accelerator.scaler`.
    """

    def __init__(self, **options: Any) -> None:
        self._recording = Recording(options)
        self._handle: RemovableHandle | None = None
        self._optimizer: Any = None
        self._losses: list[Tensor] = []
        self._batches: list[Any] = []
        self._validated: float | None = None

    @property
    def monitor(self) -> Monitor | None:
        """Monitor of the current or the last training, or None before the first; still open after an exception."""
        return self._recording.monitor

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON data."""
        return {"recording": self._recording.state()}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start watching the model and its optimizer."""
        model, self._optimizer = kwargs["model"], kwargs["optimizer"]
        known: dict[str, Any] = {"accumulate": args.gradient_accumulation_steps, "total_steps": state.max_steps}
        self._let_go()  # a training that raised has left its hook on the model
        # without a checkpoint, the trainer has asked this callback itself for a state, at step 0
        states: Any = state.stateful_callbacks if state.global_step else {}
        self._recording.load(states.get(type(self).__name__, {}).get("recording", {}))
        self._recording.start(model, self._optimizer, **known)
        self._handle = model.register_forward_hook(inert_hook(self._after_forward), with_kwargs=True)
        BACKWARD_LISTENERS.add(self)

    def _after_forward(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        """Keep the batch of a micro-batch."""
        # an evaluation needs no gradient; a loss may take several passes, and the first one has the batch
        if torch.is_grad_enabled() and len(self._batches) == len(self._losses):
            self._batches.append(dict(kwargs) or args)

    def after_backward(self, accelerator: Accelerator, loss: Tensor) -> None:
        """Keep the loss of a micro-batch, and read the gradients after the last one."""
        if not self.monitor or not any(optimizer is self._optimizer for optimizer in accelerator._optimizers):
            return  # the pass of another trainer
        self._losses.append(loss)
        # gradients are complete only after the last micro-batch
        if accelerator.sync_gradients:
            self.monitor.observe(needs_norm=False)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the step."""
        if not self.monitor:
            return
        # each micro-batch has its share of the loss of the step
        loss = torch.stack(self._losses).sum() if self._losses else None
        self.monitor.step(loss, batch=self._batches, val_loss=self._validated)
        self._forget()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Keep the validation loss for the next step."""
        # an evaluation without labels has no loss
        self._validated = kwargs.get("metrics", {}).get("eval_loss")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """End the run, and remove the hook from the model and the wrapper from `Accelerator.backward`."""
        self._let_go()
        if self.monitor:
            self.monitor.close()

    def _let_go(self) -> None:
        if self._handle:
            self._handle.remove()
        BACKWARD_LISTENERS.remove(self)
        self._forget()

    def _forget(self) -> None:
        self._losses, self._batches, self._validated = [], [], None
