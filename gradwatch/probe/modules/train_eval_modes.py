"""Inspect the modes in which modules train and evaluate, which change dropout and batch normalization."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase as Norm
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch.events import MODE_FROZEN, MODE_TRAINING, MODE_VALIDATION, EventKey, EventKind, Observation
from gradwatch.probe.inert_hook import inert_hook, remove_hooks, takes_hooks, untraced
from gradwatch.probe.modules.batch_norm import BatchNormStatistics, has_statistics, is_blank
from gradwatch.probe.parameters import Models, common_path, hookable_modules, named_modules
from gradwatch.records import Event

INSPECT_EVERY_UPDATES = 8
"""Updates between two inspections of every module. Whole models are inspected at each update, for 0.1 us."""

MIN_UPDATES = 3
"""Minimum number of consecutive updates in evaluation mode to report, so that a single odd step does not count."""

BASELINE_ROWS = 16
"""Number of rows without validation that give the baseline of forward calls."""

MIN_EVALUATION_CALLS = 3
"""Minimum number of forward calls without gradients between two steps that are an evaluation, if no earlier step made
one: a generator may show one sample now and then."""

MIN_USUAL_ROWS = 8
"""Minimum number of rows without such calls before them."""

RATES = ("dropout", "dropout_p", "drop_prob")
"""Attributes with a drop probability in modules that call a function: attention, recurrent layers, timm."""


class ModedModule(NamedTuple):
    """A module that behaves differently in training and in evaluation, and its owner.

    The owner is the innermost enclosing module with parameters other than the parameters of normalizations.
    """

    name: str
    module: nn.Module
    owner_name: str
    owner: nn.Module


@final
class TrainEvalModes:
    """Record the modes of modules at an update, and at a validation.

    A module trains in the mode that it has when the optimizer steps. A hook on each whole model sees the mode of an
    evaluation. Another hook, on a single inner module, serves loops that evaluate a part of the model or call a method.
    Modules that do the same in both modes are not inspected. If a model has no others, there are no hooks.

    Args:
        models: A model, or several by name.
        optimizers: The optimizers that move them.
        known: Kind and layer of events that are recorded already.
        hooked: As for `Inspections`.
    """

    def __init__(
        self,
        models: Models,
        optimizers: Sequence[Optimizer],
        *,
        known: Iterable[EventKey] = (),
        hooked: bool = True,
    ) -> None:
        called = list(models.values() if isinstance(models, Mapping) else [models])
        self._roots = [inner_model(model) for model in called]
        self._moded = list(_moded_modules(models))
        batch_norms = {it.name: it.module for it in self._moded if isinstance(it.module, Norm)}
        self._norms = BatchNormStatistics(batch_norms, across_steps=hooked)
        self._handles: list[RemovableHandle] = []
        self._updates = 0
        self._off: dict[str, int] = {}  # modules in evaluation mode, with the first such update
        self._trained: set[str] = set()
        self._known = set(known)
        self._is_quiet = False
        self._calls: list[CallCounter] = []
        self._is_hooked = hooked
        self._is_seen = False  # the update of the row, if no hook sees it
        if not self._moded or not hooked:
            return
        for optimizer in optimizers:
            moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
            # only the modules that this optimizer trains: models may take turns
            hook = inert_hook(partial(self.before_update, [it for it in self._moded if _is_moved(it, moved)]))
            self._handles.append(optimizer.register_step_pre_hook(untraced(hook)))
        # counted apart: one call of a model may be several calls of the inner module
        roots, inner = CallCounter(), CallCounter()
        self._calls = [roots, inner]
        for model, root in zip(called, self._roots, strict=True):
            # the hook is on the wrapper that the loop calls, the mode is read from the model inside
            if takes_hooks(model):
                self._handles.append(model.register_forward_pre_hook(inert_hook(partial(roots.count, root))))
        if (witness := _witness(models, self._moded)) is not None:
            self._handles.append(witness.register_forward_pre_hook(inert_hook(partial(inner.count, witness))))

    def close(self) -> None:
        """Remove all hooks."""
        remove_hooks(self._handles)

    @property
    def is_idle(self) -> bool:
        """Return whether no module behaves differently in training and in evaluation."""
        return not self._moded

    def skip_step(self) -> bool:
        """Return whether nothing can be new after an optimizer step without validation; if so, finish the step."""
        if not self._moded:
            return True
        self._see_update()
        # a module in evaluation mode may reach MIN_UPDATES at this step
        if not self._is_quiet or self._off or self._has_evaluated():
            return False
        self._start_row(is_usual=True)
        return True

    def read(self, *, step: int, is_validated: bool) -> list[Event]:
        """Return the new events of modes, after an optimizer step.

        Args:
            step: Optimizer step.
            is_validated: Whether the step has a validation loss.
        """
        if not self._moded:
            return []
        self._see_update()
        if not is_validated and self.skip_step():
            return []
        has_evaluated = is_validated or self._has_evaluated()
        found = [*self._norms.find_odd_momenta(), *self._find_training()]
        found += self._find_validation() if has_evaluated else ()
        news = self._news(found)
        # after the filter: a distance is recorded at each validation, not once
        news += self._norms.compare(is_validated=is_validated)
        self._is_quiet = not has_evaluated  # else the next step is compared with it
        self._start_row(is_usual=not has_evaluated)
        return [observation.at(step) for observation in news]

    def finish(self, *, step: int) -> list[Event]:
        """Return the event of an evaluation after the last step, if it is new."""
        found = self._find_validation() if self._has_evaluated() else ()
        return [observation.at(step) for observation in self._news(found)]

    def _news(self, found: Iterable[Observation]) -> list[Observation]:
        news = [observation for observation in found if observation.key not in self._known]
        self._known.update(observation.key for observation in news)
        return news

    def _has_evaluated(self) -> bool:
        """Return whether the loop has evaluated the model in training mode, as it did not at earlier steps."""
        return any(calls.is_evaluation for calls in self._calls)

    def before_update(self, moded: Sequence[ModedModule], *_: Any) -> None:
        """Record which of some modules are in evaluation mode, just before an update."""
        self._updates += 1
        # every update as long as something is off: the updates must be consecutive
        if self._updates % INSPECT_EVERY_UPDATES != 1 and not self._off and all(root.training for root in self._roots):
            return
        for it in moded:
            if it.module.training:
                self._off.pop(it.name, None)
                self._trained.add(it.name)
            else:
                self._off.setdefault(it.name, self._updates)

    def _find_training(self) -> Iterator[Observation]:
        """Yield the modules that were in evaluation mode for some consecutive updates, by their common owner."""
        if not self._off:
            return
        # a module that is not off has 0 updates in evaluation mode
        off = [it for it in self._moded if self._updates - self._off.get(it.name, self._updates) >= MIN_UPDATES - 1]
        wrong = [it for it in off if not it.owner.training and not _is_frozen(it.module)]
        # the owner trains: single frozen layers may be on purpose, so the detector only informs
        alone = [it for it in off if it.owner.training or _is_frozen(it.module)]
        if wrong:
            whole = next((root for root in self._roots if not root.training), None)
            layer = None if whole else _common_owner(wrong)
            yield self._describe(MODE_TRAINING, layer, wrong, is_whole=whole is not None)
        elif alone:
            layer = alone[0].name if len(alone) == 1 else _common_owner(alone)
            yield self._describe(MODE_FROZEN, layer, alone, is_whole=False)

    def _describe(
        self, kind: EventKind, layer: str | None, off: Sequence[ModedModule], *, is_whole: bool
    ) -> Observation:
        norms = [it.module for it in off if isinstance(it.module, Norm)]
        flipped = sum(it.name in self._trained for it in off)
        values = {
            "dropouts": len(off) - len(norms),
            "normalisations": len(norms),
            "never measured": sum(is_blank(norm) for norm in norms),
            "trained before": flipped,
            "whole model": is_whole,
        }
        counts = (_count(len(off) - len(norms), "dropout"), _count(len(norms), "normalization"))
        owner = "the model is trained" if is_whole else "the enclosing module is in training mode"
        return kind.observe(layer, values=values, modules=" and ".join(filter(None, counts)), owner=owner)

    def _find_validation(self) -> Iterator[Observation]:
        """Yield an observation if an evaluation ran in training mode: no forward call was in evaluation mode."""
        # a method of the model may be called without the hooks: calls must be seen, not only missing
        if any(calls.evaluation for calls in self._calls):
            return
        more = next((calls for calls in self._calls if calls.is_more_than_usual), None)
        if more:
            values = {"calls in training mode": more.training, "calls in evaluation mode": 0}
            yield MODE_VALIDATION.observe(values=values)

    def _see_update(self) -> None:
        """Inspect modules after an update if no hook did before it."""
        # a loop without hooks does not change modes between the update and this call
        if not self._is_hooked and not self._is_seen:
            self._is_seen = True
            self.before_update(self._moded)

    def _start_row(self, *, is_usual: bool) -> None:
        self._is_seen = False
        for calls in self._calls:
            calls.start_row(is_usual=is_usual)


@final
class CallCounter:
    """Count the forward calls of modules since the last row.

    Attributes:
        training: Calls in training mode.
        without_gradients: Calls in training mode without gradients.
        evaluation: Calls in evaluation mode.
    """

    def __init__(self) -> None:
        self.training = self.without_gradients = self.evaluation = 0
        self._usual: deque[tuple[int, int]] = deque(maxlen=BASELINE_ROWS)

    def count(self, module: nn.Module, *_: Any) -> None:
        """Count a forward call by the mode of a module."""
        if module.training:
            self.training += 1
            if not torch.is_grad_enabled():
                self.without_gradients += 1
        else:
            self.evaluation += 1

    def start_row(self, *, is_usual: bool) -> None:
        """Reset the counts; the last row joins the baseline if it is usual."""
        if is_usual:
            self._usual.append((self.training, self.without_gradients))
        self.training = self.without_gradients = self.evaluation = 0

    @property
    def is_evaluation(self) -> bool:
        """Return whether there were several calls in training mode without gradients, and none at earlier steps."""
        if self.without_gradients < MIN_EVALUATION_CALLS or len(self._usual) < MIN_USUAL_ROWS:
            return False
        return not any(without_gradients for _, without_gradients in self._usual)

    @property
    def is_more_than_usual(self) -> bool:
        """Return whether there were more calls in training mode than a step makes."""
        if not self._usual:  # a validation at the first row: only calls without gradients are sure to belong to it
            return self.without_gradients > 0
        most = max(training for training, _ in self._usual)
        # activation checkpointing makes calls without gradients at each step, too
        most_without_gradients = max(without_gradients for _, without_gradients in self._usual)
        return self.without_gradients > most_without_gradients or self.training > most


def _witness(models: Models, moded: Sequence[ModedModule]) -> nn.Module | None:
    """Return a hookable module that is called if a part of the model is called, or None."""
    hookable, plain = set(hookable_modules(models)), (Norm, nn.modules.dropout._DropoutNd)
    return next((it.module for it in moded if isinstance(it.module, plain) and it.module in hookable), None)


def inner_model(model: nn.Module) -> nn.Module:
    # a loop may change the mode of the model inside a wrapper, and the wrapper keeps its own
    while _wrapped(model) in model._modules:
        model = getattr(model, _wrapped(model))
    return model


def _wrapped(model: nn.Module) -> str:
    is_parallel = isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel))
    return "module" if is_parallel else "_orig_mod"


def _moded_modules(models: Models) -> Iterator[ModedModule]:
    """Yield the modules that behave differently in training and in evaluation."""
    parents: dict[nn.Module, tuple[str, nn.Module]] = {}
    for name, module in named_modules(models):
        for child in module.children():
            parents.setdefault(child, (name, module))
        if _differs(module):
            owner_name, owner = name, module
            while not (weights := _weights(owner)) and owner in parents:
                owner_name, owner = parents[owner]
            if any(weight.requires_grad for weight in weights):  # the mode of a frozen part does not matter
                yield ModedModule(name, module, owner_name, owner)


def _differs(module: nn.Module) -> bool:
    """Return whether a module behaves differently in training: it keeps statistics, or drops with some probability."""
    if isinstance(module, Norm):
        return has_statistics(module)
    names = ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else RATES
    rates = (vars(module).get(name) for name in names)
    return any(isinstance(rate, float) and 0 < rate <= 1 for rate in rates)


def _weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module without the parameters of normalizations."""
    return [p for part in module.modules() if not isinstance(part, Norm) for p in part.parameters(recurse=False)]


def _is_moved(it: ModedModule, moved: set[int]) -> bool:
    return any(id(p) in moved for p in it.owner.parameters() if p.requires_grad)


def _is_frozen(module: nn.Module) -> bool:
    # a weight without a gradient shows that the normalization is frozen on purpose
    return isinstance(module, Norm) and module.weight is not None and not module.weight.requires_grad


def _common_owner(modules: Sequence[ModedModule]) -> str | None:
    return common_path(it.owner_name for it in modules)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}" if number else ""
