"""Inspect a run once: the autograd graph of its loss, modes of modules, inputs and initial weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.attempts import Attempts
from gradwatch.events import UNREAD, Observation
from gradwatch.probe.batches.input_scale import ModelInputs
from gradwatch.probe.graph.reader import READ_STEPS, LossGraphReader, is_due
from gradwatch.probe.graph.unregistered import find_empty_groups, find_nothing_to_train
from gradwatch.probe.graph.weight_means import find_offset_weights
from gradwatch.probe.inert_hook import inert_hook, remove_hooks, takes_hooks
from gradwatch.probe.memory.output_graphs import OutputGraphs
from gradwatch.probe.modules.functional_calls import FunctionalCalls
from gradwatch.probe.modules.identical_units import find_identical_units
from gradwatch.probe.modules.ignored_settings import IgnoredRates, find_ignored_freezes
from gradwatch.probe.modules.loaded_weights import find_failed_loads
from gradwatch.probe.modules.random_draws import RandomDraws
from gradwatch.probe.modules.repeated_draws import RepeatedDraws
from gradwatch.probe.modules.train_eval_modes import TrainEvalModes
from gradwatch.probe.output_reader import OutputReader
from gradwatch.probe.parameters import Models
from gradwatch.probe.policy.probe import PART as POLICY_PART
from gradwatch.probe.policy.probe import PolicyProbe
from gradwatch.probe.updates.ascended import find_ascended
from gradwatch.probe.updates.clipped_weights import ClippedWeights
from gradwatch.probe.updates.earlier_updates import find_earlier_updates
from gradwatch.probe.updates.outside_moves import OutsideMoves
from gradwatch.probe.updates.parameter_changes import ParameterChanges
from gradwatch.probe.updates.rebuilt import RebuiltOptimizers
from gradwatch.probe.updates.standstill import Standstill
from gradwatch.records import Event, LayerInfo

UNREAD_STEP = 1
"""Step at which a missing autograd graph is reported: at the first step, a loop may have a reason for it."""

MODES = "the modes of modules"
CLIPPED = "the clipped weights"
"""Names of inspections."""


class HookedInspection(Protocol):
    """Inspects the updates of a training by hooks."""

    def find(self, step: int, /) -> Iterable[Observation]:
        """Yield what has been found, after an optimizer step."""
        ...

    def close(self) -> None:
        """Remove all hooks."""
        ...


@final
class Inspections:
    """Make the structural inspections of a training: its graph at the first steps, the modes of its modules always.

    A loop may pass its loss as a plain number, without a graph. If the loss function is a module, its results are
    inspected instead, at the first steps. A loop may also call `after_loss`.

    Args:
        models: A model, or several by name.
        params: Its parameters, in the order of `layers`.
        layers: The parameters' descriptions.
        optimizers: The optimizers that move them.
        loss_fn: The loss function, or None if unknown.
        readers: Readers of the outputs of whole models.
        hooked_updates: Inspections of the updates by hooks, by name.
        known: Events already recorded.
        attempts: Counts the failures of each inspection. An exception costs one inspection at one step.
        hooked: Whether hooks inspect modes, inputs and running statistics. A loop that sets training mode for each step
            and evaluation mode for each validation needs no hooks. Such a loop may also resume between the two steps
            that some inspections compare.

    Attributes:
        policy: Probe of the policy in the loss of a policy gradient.
    """

    def __init__(
        self,
        models: Models,
        *,
        params: Sequence[Tensor],
        layers: Sequence[LayerInfo],
        optimizers: Sequence[Optimizer],
        loss_fn: Callable[..., Any] | None = None,
        readers: Iterable[OutputReader] = (),
        hooked_updates: Mapping[str, HookedInspection] = {},
        known: Iterable[Event] = (),
        attempts: Attempts | None = None,
        hooked: bool = True,
    ) -> None:
        attempts = self._attempts = attempts or Attempts()
        keys = self._known = {(event.kind, event.layer) for event in known}
        self._graph = LossGraphReader(models, params, layers, optimizers=optimizers, known=keys, attempts=attempts)
        self.policy = PolicyProbe(params, known=keys, attempts=attempts)
        self._modes = TrainEvalModes(models, optimizers, known=keys, hooked=hooked)
        self._inputs = ModelInputs(models) if hooked else None
        self._outputs = OutputGraphs(models) if hooked else None
        self._functional = FunctionalCalls(models, list(models.values()) if isinstance(models, Mapping) else [models])
        self._draws, repeated = RandomDraws(models), RepeatedDraws(params, layers)
        self._step = 0  # the step in progress, for the hook of the loss function
        self._readers = readers
        rebuilt, clipped = RebuiltOptimizers(params, layers), ClippedWeights(params, layers)
        self._updates: dict[str, Callable[[int], Iterable[Observation]]] = {
            "the weights outside of the optimizer": OutsideMoves(params, layers).find,
            "the weights of the optimizer": Standstill(params, layers).find,
            "the optimizers that make the updates": rebuilt.find,
            CLIPPED: clipped.find,
            "the attributes of optimizers": IgnoredRates(optimizers).find,
            "the seeds of steps": repeated.find,
            **{part: inspection.find for part, inspection in hooked_updates.items()},
        }
        self._changes = ParameterChanges(models, params, layers, optimizers)
        self._closing: list[Callable[[], None]] = [
            self.policy.close,
            self._functional.close,
            self._draws.close,
            repeated.close,
            rebuilt.close,
            *(inspection.close for inspection in hooked_updates.values()),
            *([self._inputs.close] if self._inputs else ()),
            *([self._outputs.close] if self._outputs else ()),
            self._modes.close,
        ]
        # before the first step: later the weights have moved
        attempts.run(CLIPPED, clipped.begin)
        initial = [
            *self._find("the identical units", lambda: find_identical_units(params, layers)),
            *self._find("the initial weights", lambda: find_offset_weights(params, layers)),
            *self._find("the earlier updates", lambda: find_earlier_updates(params)),
            *self._find("the frozen weights", lambda: find_ignored_freezes(models, params, layers)),
            *self._find("the loaded weights", lambda: find_failed_loads(models)),
            *self._find("the groups of the optimizer", lambda: find_empty_groups(optimizers)),
            *self._find("the direction of the updates", lambda: find_ascended(params, layers, optimizers)),
            *self._find("the trainable parameters", lambda: find_nothing_to_train(params, optimizers)),
        ]
        self._pending = [observation.at(0) for observation in initial if observation.key not in keys]
        self._handles: list[RemovableHandle] = []
        if isinstance(loss_fn, nn.Module) and takes_hooks(loss_fn):
            hook = inert_hook(lambda module, inputs, loss: self.after_loss(loss))
            self._handles.append(loss_fn.register_forward_hook(hook))

    @property
    def _has_news(self) -> bool:
        is_due = self._outputs is not None and self._outputs.is_due(self._step)
        return bool(self._pending) or self._draws.is_armed or is_due

    def is_over(self, step: int) -> bool:
        """Return whether `skip_step` returns true at a step and at all later ones."""
        is_idle = self._modes.is_idle and (self._inputs is None or self._inputs.is_over)
        is_idle &= self._outputs is None or self._outputs.is_idle(step)
        return step > max(READ_STEPS) and not (self._has_news or self._handles) and is_idle

    def skip_step(self, step: int) -> bool:
        """Return whether there is nothing to inspect after an optimizer step.

        If true, the step is finished; otherwise call `read`. Only for steps without validation and with finite numbers.
        """
        has_news = self._has_news or bool(self._handles or (self._inputs and self._inputs.is_waiting))
        try:
            is_skipped = not (is_due(step) or has_news) and self._modes.skip_step()
        except Exception:  # `read` meets the error too, and counts it
            is_skipped = False
        if is_skipped:
            self._begin(step + 1)
        return is_skipped

    def read(self, loss: Any, *, step: int, is_validated: bool, is_non_finite: bool) -> list[Event]:
        """Return the new events, after an optimizer step.

        Args:
            loss: Loss of the step, as the loop passed it.
            step: Optimizer step.
            is_validated: Whether the step has a validation loss.
            is_non_finite: Whether the loss or a gradient is not finite.
        """
        found: list[Observation] = []
        for reader in self._readers:
            found += self._find(reader.part, partial(reader.find, loss))
        found += self._find(POLICY_PART, partial(self.policy.find, loss, step))
        if self._inputs:
            found += self._find("the inputs", self._inputs.find)
            if self._inputs.is_traced:  # compiled code calls no hooks, and is compiled again for each new one
                self._draws.close()
        later = [
            *(self._find("the kept graphs", partial(self._outputs.find, loss, step)) if self._outputs else ()),
            *(found for part, find in self._updates.items() for found in self._find(part, partial(find, step))),
            *self._find("the random draws", partial(self._draws.find, step=step, is_validated=is_validated)),
        ]
        found += [observation for observation in later if observation.key not in self._known]
        found += self._find("the parameters of the model", partial(self._changes.find, step))
        found += self._find("the evaluation", self._find_in_evaluation) if is_validated else ()
        self._pending += [observation.at(step) for observation in found]
        self._begin(step + 1)
        # nothing but modes: the usual step
        if not (is_due(step) or is_non_finite or self._pending or self._handles):
            return self._read_modes(step, is_validated=is_validated)
        # pending first: events of earlier steps precede the events of this graph
        news = [*self._pending, *self._graph.read(loss, step=step, is_non_finite=is_non_finite)]
        self._pending = []
        if step == UNREAD_STEP and not self._graph.has_read:
            news.append(UNREAD.emit(step=step))
        if self._handles and not is_due(step):
            self.forget_loss()  # results of the loss function matter only at the steps that read the graph
        return news + self._read_modes(step, is_validated=is_validated)

    def _find(self, part: str, find: Callable[[], Iterable[Observation]]) -> Sequence[Observation]:
        return self._attempts.run(part, lambda: [*find()]) or ()

    def _read_modes(self, step: int, *, is_validated: bool) -> list[Event]:
        return self._attempts.run(MODES, self._modes.read, step=step, is_validated=is_validated) or []

    def _begin(self, step: int) -> None:
        self._step = step
        if self._inputs:
            self._inputs.step = step
        if self._outputs:
            self._outputs.begin(step)

    def _find_in_evaluation(self) -> list[Observation]:
        """Return the observations of the inspected evaluation, and inspect the next one if there was none yet."""
        found = list(self._functional.find(self._inputs.scale if self._inputs else None))
        self._functional.arm()
        return [observation for observation in found if observation.key not in self._known]

    def after_loss(self, loss: Any) -> None:
        """Inspect the result of the loss function at the first steps. No error reaches the training."""
        # without gradients it is a validation
        if not is_due(self._step) or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        try:
            self._pending += self._graph.read(loss, step=self._step, is_whole=False)
        except Exception:  # an unknown kind of graph: `read` meets it too, and reports it
            self.forget_loss()

    def finish(self) -> list[Event]:
        """Return the new events after the last step."""
        return self._attempts.run(MODES, self._modes.finish, step=max(0, self._step - 1)) or []

    def close(self) -> None:
        """Remove all hooks."""
        self.forget_loss()
        for close in self._closing:
            close()

    def forget_loss(self) -> None:
        """Remove the hook from the loss function."""
        remove_hooks(self._handles)
