"""Hold the events of a step and its named parameters, which the judges of the stages read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn
from torch.optim import Optimizer

from gradwatch.autowatch.search import params_of
from gradwatch.gradcheck.audit.by_hand import HandChange, gradient_changes
from gradwatch.gradcheck.audit.events import StepEvent
from gradwatch.gradcheck.audit.result import Deviation
from gradwatch.gradcheck.audit.windows import Window, micro_batches

Outcome = Deviation | str
"""A difference; the reason why a stage was not seen; or an empty string if the stage is as meant."""
MAX_NAMES = 3


def named_tensors(models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> dict[int, tuple[str, Tensor]]:
    """Return the parameters of models and of optimizers with their names, by `id`.

    Args:
        models: Models by the prefix of their parameters; empty for a single model.
        optimizers: Optimizers, which may hold further tensors.
    """
    named: dict[int, tuple[str, Tensor]] = {}
    for prefix, model in models.items():
        for name, parameter in model.named_parameters(prefix):
            named.setdefault(id(parameter), (name, parameter))
    extra = [(key, t) for key, t in params_of(optimizers).items() if key not in named]
    return named | {key: (f"parameter {i} of the optimizer", t) for i, (key, t) in enumerate(extra)}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedStep:
    """A recorded step.

    Args:
        optimizer: The optimizer whose update is judged.
        batch: Parts of the batch.
        watched: Parameters of the model and of the optimizer.
        names: Their names.
        held: Indices of the tensors that the optimizer holds.
        own: Indices of the model's tensors.
        elsewhere: Indices of the tensors that other optimizers hold.
        events: Events of the step.
        windows: Windows of the updates by the optimizer.
        losses_move: Returns whether the losses of the step change with some parameters; None if the step cannot run
            again.
    """

    optimizer: Optimizer
    batch: Any
    watched: Sequence[Tensor]
    names: Sequence[str]
    held: Sequence[int]
    own: Sequence[int]
    elsewhere: frozenset[int]
    events: Sequence[StepEvent]
    windows: Sequence[Window]
    losses_move: Callable[[Sequence[int]], bool] | None

    def group_of(self, index: int, update: StepEvent) -> dict[str, Any]:
        """Return the hyperparameters of a held parameter at an update."""
        tensor = self.watched[index]
        return next(g for g in update.groups if any(p is tensor for p in g["params"]))

    def decayed(self, window: Window) -> list[int]:
        """Return the held parameters whose weights the optimizer decays."""
        inside = [i for i in self.held if i in window.update.watched]
        return [i for i in inside if self.group_of(i, window.update).get("weight_decay")]

    def changes(self, window: Window) -> list[HandChange]:
        """Return the changes of gradients by hand."""
        return gradient_changes(window, self.held)

    def are_micro(self, passes: Sequence[StepEvent]) -> bool:
        """Return whether passes certainly belong to micro-batches."""
        return micro_batches(passes, self.batch)

    def tensors(self, indices: Sequence[int]) -> tuple[str, ...]:
        """Return the names of watched tensors."""
        return tuple(self.names[i] for i in indices)

    def listed(self, indices: Sequence[int]) -> str:
        """Return the first names in words."""
        shown = ", ".join(f"`{self.names[i]}`" for i in indices[:MAX_NAMES])
        return shown + (f" and {len(indices) - MAX_NAMES} more" if len(indices) > MAX_NAMES else "")

    def is_minority(self, indices: Sequence[int], among: Sequence[int]) -> bool:
        """Return whether some tensors have less than half of the elements: most of a model is left out on purpose."""
        return 2 * sum(self.watched[i].numel() for i in indices) < sum(self.watched[i].numel() for i in among)
