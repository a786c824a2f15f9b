"""Facts about a run that no statistic tells: what the tape of its loss, modes of modules and first weights say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.probe.batches.input_scale import Inputs
from gradwatch.probe.batches.target_match import Pairings
from gradwatch.probe.gradients.recurrence import Recurrences
from gradwatch.probe.gradients.zero_grad import Leftovers
from gradwatch.probe.graph import weight_means
from gradwatch.probe.graph.reader import LOOKS, Tape, is_due
from gradwatch.probe.graph.unregistered import empty_groups
from gradwatch.probe.inert_hook import inert_hook
from gradwatch.probe.modules import identical_units
from gradwatch.probe.modules.functional_calls import Fact, Functional
from gradwatch.probe.modules.train_eval_modes import Modes
from gradwatch.probe.parameters import Models
from gradwatch.probe.updates.outside_moves import Moves
from gradwatch.records import Event, LayerInfo

UNREAD_AT = 1
"""Step at which it is said that no tape was seen yet: at the first, a loop may have had its reasons."""

UNREAD = "what the loss is made of: it came without its graph; hand over the loss itself, before item() and detach()"


@final
class Facts:
    """Reads facts off a training: at its first steps off the tape, and all along off the modes of its modules.

    A loop may hand its loss over as a plain number, which has no tape; where the loss function is a module, its results
    are looked at instead, at those first steps, or whatever `after_loss` is called with.

    Args:
        models: A model, or several by name.
        params: Its parameters, in the order of `layers`.
        layers: What they are.
        optimizers: The optimizers that move them.
        loss_fn: The loss function, where it is known.
        recurrences: What reads gradients on their way back through a recurrence, or None.
        pairings: What compares predictions with the targets of other samples, or None.
        leftovers: What watches whether gradients are cleared, or None.
        known: Events that were noted before, and are no news.
        hooked: Whether modes, inputs and running statistics are looked at by hooks; a loop that puts its model into
            training mode for each step, and into evaluation mode for each validation, needs none, and may be resumed
            between the two steps that some of it takes to see.
    """

    def __init__(
        self,
        models: Models,
        *,
        params: Sequence[Tensor],
        layers: Sequence[LayerInfo],
        optimizers: Sequence[Optimizer],
        loss_fn: Callable[..., Any] | None = None,
        recurrences: Recurrences | None = None,
        pairings: Pairings | None = None,
        leftovers: Leftovers | None = None,
        known: Iterable[Event] = (),
        hooked: bool = True,
    ) -> None:
        said = self._said = {(event.kind, event.layer) for event in known}
        self._tape = Tape(models, params, layers, optimizers=optimizers, said=said)
        self._modes = Modes(models, optimizers, said=said, hooked=hooked)
        self._inputs = Inputs(models) if hooked else None
        self._functional = Functional(models, list(models.values()) if isinstance(models, Mapping) else [models])
        self._step = 0
        self._recurrences, self._pairings = recurrences, pairings
        self._leftovers, self._moves = leftovers, Moves(params, layers)
        self._waiting = [
            Event(kind=kind, step=0, layer=layer, text=text, values=values)
            for kind, layer, text, values in (
                *identical_units.facts(params, layers),
                *weight_means.facts(params, layers),
                *empty_groups(optimizers),
            )
            if (kind, layer) not in said
        ]
        self._handles: list[RemovableHandle] = []
        if isinstance(loss_fn, nn.Module):
            self._handles.append(
                loss_fn.register_forward_hook(inert_hook(lambda module, inputs, loss: self.after_loss(loss)))
            )

    def is_over(self, step: int) -> bool:
        """Say whether `pass_by` would say so at each step from one on, and so need not be asked."""
        is_idle = self._modes.is_idle and (self._inputs is None or self._inputs.is_over)
        return step > max(LOOKS) and not (self._waiting or self._handles) and is_idle

    def pass_by(self, step: int) -> bool:
        """Say whether there is nothing to look at after an optimizer step without validation, whose numbers are finite.

        Then that step is over; otherwise it wants to be `read`.
        """
        has_news = bool(self._waiting or self._handles or (self._inputs and self._inputs.is_waiting))
        is_over = not (is_due(step) or has_news) and self._modes.pass_by()
        if is_over:
            self._begin(step + 1)
        return is_over

    def read(self, loss: Any, *, step: int, is_validated: bool, is_spoilt: bool) -> list[Event]:
        """Return what is new, after an optimizer step.

        Args:
            loss: Loss of the step, as the loop handed it over.
            step: Optimizer step.
            is_validated: Whether a validation loss came with it.
            is_spoilt: Whether the loss or a gradient is not finite.
        """
        if self._leftovers:
            self._leftovers.look_again(step)
        found = [*self._recurrences.facts()] if self._recurrences else []
        found += [*self._pairings.facts(loss)] if self._pairings else []
        found += [*self._inputs.facts()] if self._inputs else []
        found += [fact for fact in self._moves.facts(step) if fact[:2] not in self._said]
        found += self._evaluated() if is_validated else []
        self._waiting += [Event(kind=k, step=step, layer=n, text=t, values=v) for k, n, t, v in found]
        self._begin(step + 1)
        if not (is_due(step) or is_spoilt or self._waiting or self._handles):
            return self._modes.read(step=step, is_validated=is_validated)
        news = [*self._waiting, *self._tape.read(loss, step=step, is_spoilt=is_spoilt)]
        self._waiting = []
        if step == UNREAD_AT and not self._tape.has_read:
            news.append(Event(kind="tape-unread", step=step, text=UNREAD))
        if self._handles and not is_due(step):
            self.forget_loss()
        return news + self._modes.read(step=step, is_validated=is_validated)

    def _begin(self, step: int) -> None:
        self._step = step
        if self._inputs:
            self._inputs.step = step

    def _evaluated(self) -> list[Fact]:
        """Return what the evaluation did that was looked at, and look at the next where none was yet."""
        found = list(self._functional.facts(self._inputs.scale if self._inputs else None))
        self._functional.arm()
        return [fact for fact in found if fact[:2] not in self._said]

    def after_loss(self, loss: Any) -> None:
        """Look at what the loss function gave, while the step is one of those that are looked at.

        Nothing that it meets reaches the training.
        """
        if not is_due(self._step) or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        try:
            self._waiting += self._tape.read(loss, step=self._step, is_whole=False)
        except Exception:  # a graph of a kind that nobody here has seen; `read` meets it too, and says so
            self.forget_loss()

    def close(self) -> None:
        """Take all hooks off."""
        self.forget_loss()
        self._functional.close()
        if self._leftovers:
            self._leftovers.close()
        if self._inputs:
            self._inputs.close()
        self._modes.close()

    def forget_loss(self) -> None:
        """Take the hook off the loss function."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
