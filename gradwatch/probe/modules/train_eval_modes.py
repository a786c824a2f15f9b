"""Inspect the modes in which modules train and evaluate, which change dropout and batch normalisation."""

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

from gradwatch.events import MODE_FROZEN, MODE_TRAINING, MODE_VALIDATION, EventKind, Observation, Place
from gradwatch.probe.inert_hook import inert_hook, untraced
from gradwatch.probe.modules.batch_norm import BatchNormStatistics, has_statistics, is_blank
from gradwatch.probe.parameters import Models, named_modules
from gradwatch.records import Event

INSPECT_EVERY_UPDATES = 8
"""Updates between two inspections of every module. Whole models are inspected at each update: it costs 0.1 us."""

MIN_UPDATES = 3
"""Consecutive updates in evaluation mode from which the model is said to train in it: not a single odd step."""

BASELINE_ROWS = 16
"""Rows without validation whose forward calls are the baseline."""

CLOSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that run other code in evaluation if there is a hook in them."""

RATES = ("dropout", "dropout_p", "drop_prob")
"""Attributes with the probability of modules that drop by a function: attention, recurrent layers, timm."""


class ModedModule(NamedTuple):
    """A module that behaves differently in training and in evaluation, and its owner.

    The owner is the innermost module around it that holds parameters other than those of normalisations.
    """

    name: str
    module: nn.Module
    owner_name: str
    owner: nn.Module


@final
class TrainEvalModes:
    """Records the modes of modules at an update, and at a validation.

    A module trains in the mode that it has when the optimizer steps. A hook on each whole model sees the mode in which
    it evaluates; another one, on a single inner module, serves loops that evaluate a part of the model or call a method
    of it. Modules that do the same in both modes are not inspected; if a model has no others, nothing is hooked.

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
        known: Iterable[Place] = (),
        hooked: bool = True,
    ) -> None:
        called = list(models.values() if isinstance(models, Mapping) else [models])
        self._roots = [_inner(model) for model in called]
        self._moded = list(_moded_modules(models))
        batch_norms = {it.name: it.module for it in self._moded if isinstance(it.module, Norm)}
        self._norms = BatchNormStatistics(batch_norms, across_steps=hooked)
        self._handles: list[RemovableHandle] = []
        self._updates = 0
        self._off: dict[str, int] = {}  # modules in evaluation mode: the update at which that was first seen
        self._trained: set[str] = set()
        self._known = set(known)
        self._is_quiet = False
        self._calls = self._inner = ModeCalls()
        self._usual: deque[ModeCalls] = deque(maxlen=BASELINE_ROWS)
        self._usual_inner: deque[ModeCalls] = deque(maxlen=BASELINE_ROWS)
        self._is_hooked = hooked
        self._is_seen = False  # the update of the row, where no hook tells of it
        if not self._moded or not hooked:
            return
        for optimizer in optimizers:
            moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
            hook = inert_hook(partial(self.before_update, [it for it in self._moded if _is_moved(it, moved)]))
            self._handles.append(optimizer.register_step_pre_hook(untraced(hook)))
        for model, root in zip(called, self._roots, strict=True):
            self._handles.append(model.register_forward_pre_hook(inert_hook(partial(self.before_forward, root))))
        if (inner := _witness(models, self._moded)) is not None:
            hook = inert_hook(partial(self.before_forward, inner, is_inner=True))
            self._handles.append(inner.register_forward_pre_hook(hook))

    def close(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def is_idle(self) -> bool:
        """Whether no module behaves differently in training and in evaluation."""
        return not self._moded

    def skip_step(self) -> bool:
        """Return whether nothing can be new after an optimizer step without validation; the step is done then."""
        if not self._moded:
            return True
        self._see_update()
        if not self._is_quiet or self._off:
            return False
        self._start_row(is_usual=True)
        return True

    def read(self, *, step: int, is_validated: bool) -> list[Event]:
        """Return the new events of modes, after an optimizer step.

        Args:
            step: Optimizer step.
            is_validated: Whether a validation loss was handed over with it.
        """
        if not self._moded:
            return []
        self._see_update()
        if not is_validated and self.skip_step():
            return []
        found = [*self._norms.find_odd_momenta(), *self._find_training()]
        found += self._find_validation() if is_validated else ()
        news = [observation for observation in found if observation.place not in self._known]
        self._known.update(observation.place for observation in news)
        news += self._norms.compare(is_validated=is_validated)
        self._is_quiet = not is_validated  # else the next step is compared with it
        self._start_row(is_usual=not is_validated)
        return [observation.at(step) for observation in news]

    def before_update(self, moded: Sequence[ModedModule], *_: Any) -> None:
        """Record the modules in evaluation mode whose owner an optimizer is about to move."""
        self._updates += 1
        if self._updates % INSPECT_EVERY_UPDATES != 1 and not self._off and all(root.training for root in self._roots):
            return
        for it in moded:
            if it.module.training:
                self._off.pop(it.name, None)
                self._trained.add(it.name)
            else:
                self._off.setdefault(it.name, self._updates)

    def before_forward(self, module: nn.Module, *_: Any, is_inner: bool = False) -> None:
        """Count a forward call of a whole model, or of an inner module, by its mode."""
        if torch.compiler.is_compiling():
            return
        calls, without = self._inner if is_inner else self._calls, not torch.is_grad_enabled()
        if module.training:
            calls = ModeCalls(calls.training + 1, calls.without_gradients + without, calls.evaluation)
        else:
            calls = ModeCalls(calls.training, calls.without_gradients, calls.evaluation + 1)
        if is_inner:
            self._inner = calls
        else:
            self._calls = calls

    def _find_training(self) -> Iterator[Observation]:
        """Yield the modules that were in evaluation mode for some consecutive updates, by their common owner."""
        if not self._off:
            return
        off = [it for it in self._moded if self._updates - self._off.get(it.name, self._updates) >= MIN_UPDATES - 1]
        wrong = [it for it in off if not it.owner.training and not _is_frozen(it.module)]
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
        counts = (_count(len(off) - len(norms), "dropout"), _count(len(norms), "normalisation"))
        owner = "the model" if is_whole else "the module around"
        return kind.observe(layer, values=values, modules=" and ".join(filter(None, counts)), owner=owner)

    def _find_validation(self) -> Iterator[Observation]:
        """Yield an observation if validation ran in training mode: no forward call was in evaluation mode."""
        if self._calls.evaluation or self._inner.evaluation:
            return
        for calls, usual in ((self._calls, self._usual), (self._inner, self._usual_inner)):
            if _are_more(calls, usual):
                values = {"calls in training mode": calls.training, "calls in evaluation mode": 0}
                yield MODE_VALIDATION.observe(values=values)
                return

    def _see_update(self) -> None:
        """Inspect modules after an update if no hook does before it: modes do not change in between."""
        if not self._is_hooked and not self._is_seen:
            self._is_seen = True
            self.before_update(self._moded)

    def _start_row(self, *, is_usual: bool) -> None:
        """Reset the counts of calls for the next row; the last row joins the baseline if it is usual."""
        self._is_seen = False
        if is_usual:
            self._usual.append(self._calls)
            self._usual_inner.append(self._inner)
        self._calls = self._inner = ModeCalls()


class ModeCalls(NamedTuple):
    """Forward calls since the last row: in training mode, of these without gradients, and in evaluation mode."""

    training: int = 0
    without_gradients: int = 0
    evaluation: int = 0


def _are_more(calls: ModeCalls, usual: Sequence[ModeCalls]) -> bool:
    """Return whether there were more calls in training mode than a step makes."""
    if not usual:
        return calls.without_gradients > 0
    return calls.without_gradients > max(row.without_gradients for row in usual) or calls.training > max(
        row.training for row in usual
    )


def _witness(models: Models, moded: Sequence[ModedModule]) -> nn.Module | None:
    """Return a module whose calls show those of a part of the model, and which a hook does not change."""
    closed: set[nn.Module] = set()
    for _, module in named_modules(models):
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None or isinstance(module, CLOSED):
            closed.update(module.modules())
    plain = (Norm, nn.modules.dropout._DropoutNd)
    return next((it.module for it in moded if isinstance(it.module, plain) and it.module not in closed), None)


def _inner(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers: it may be put into another mode without them."""
    while (inside := vars(model).get("_modules", {}).get(_wrapped(model))) is not None:
        model = inside
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
            if any(weight.requires_grad for weight in weights):  # in a part that is frozen no mode matters
                yield ModedModule(name, module, owner_name, owner)


def _differs(module: nn.Module) -> bool:
    """Return whether a module behaves differently in training: it keeps statistics, or drops with some probability."""
    if isinstance(module, Norm):
        return has_statistics(module)
    names = ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else RATES
    rates = (vars(module).get(name) for name in names)
    return any(isinstance(rate, float) and 0 < rate <= 1 for rate in rates)


def _weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module without those of normalisations."""
    return [p for part in module.modules() if not isinstance(part, Norm) for p in part.parameters(recurse=False)]


def _is_moved(it: ModedModule, moved: set[int]) -> bool:
    return any(id(p) in moved for p in it.owner.parameters() if p.requires_grad)


def _is_frozen(module: nn.Module) -> bool:
    """Return whether a normalisation is frozen on purpose."""
    return isinstance(module, Norm) and module.weight is not None and not module.weight.requires_grad


def _common_owner(modules: Sequence[ModedModule]) -> str | None:
    """Return the innermost module that holds all owners, or None for the whole model."""
    shared: list[str] = []
    for parts in zip(*(it.owner_name.split(".") for it in modules), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) or None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}" if number else ""
