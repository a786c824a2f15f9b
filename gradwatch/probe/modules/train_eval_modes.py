"""Look at the modes in which modules train and evaluate: dropout and batch normalisation do something else in each."""

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

from gradwatch.probe.inert_hook import inert_hook, untraced
from gradwatch.probe.modules.batch_norm import Norms, has_statistics, is_blank
from gradwatch.probe.parameters import Models, named_modules
from gradwatch.records import Event

EVERY = 8
"""Updates between two looks at every module; whole models are looked at in each: it costs 0.1 us."""

PERSISTS = 3
"""Updates in a row in evaluation mode that make it the mode in which the model trains: no slip of a single step."""

USUAL = 16
"""Rows without validation whose forward calls are what is usual."""

CLOSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
"""Modules that compute otherwise in evaluation where a hook is in them."""

RATES = ("dropout", "dropout_p", "drop_prob")
"""Attributes in which modules that drop by a function keep the probability: attention, recurrent layers, timm."""

Fact = tuple[str, str | None, str, dict[str, float]]
"""Kind, layer, text and values of an event to be."""


class Live(NamedTuple):
    """A module that does something else in training than in evaluation, and the module that it belongs to.

    The owner is the innermost module around it that holds parameters besides those of normalisations.
    """

    name: str
    module: nn.Module
    owner_name: str
    owner: nn.Module


@final
class Modes:
    """Notes in which mode modules are when an update is made, and when a validation loss was measured.

    A module trains in the mode that it has when the optimizer steps; the mode in which it evaluates is seen by a hook
    on each whole model, and on one module inside for loops that evaluate by a part or a method of their own. Modules
    that do the same in both modes are not looked at; where a model has no others, nothing is hooked.

    Args:
        models: A model, or several by name.
        optimizers: The optimizers that move them.
        said: Kind and layer of what was said before.
        hooked: As for `Facts`.
    """

    def __init__(
        self,
        models: Models,
        optimizers: Sequence[Optimizer],
        *,
        said: Iterable[tuple[str, str | None]] = (),
        hooked: bool = True,
    ) -> None:
        called = list(models.values() if isinstance(models, Mapping) else [models])
        self._roots = [_inner(model) for model in called]
        self._live = list(_live(models))
        norms = {it.name: it.module for it in self._live if isinstance(it.module, Norm)}
        self._norms = Norms(norms, across_steps=hooked)
        self._handles: list[RemovableHandle] = []
        self._updates = 0
        self._off: dict[str, int] = {}  # modules in evaluation mode: the update at which that was first seen
        self._trained: set[str] = set()
        self._said = set(said)
        self._is_quiet = False
        self._calls = self._inner = Calls()
        self._usual: deque[Calls] = deque(maxlen=USUAL)
        self._usual_inner: deque[Calls] = deque(maxlen=USUAL)
        self._is_hooked = hooked
        self._is_seen = False  # the update of the row, where no hook tells of it
        if not self._live or not hooked:
            return
        for optimizer in optimizers:
            moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
            hook = inert_hook(partial(self.before_update, [it for it in self._live if _is_moved(it, moved)]))
            self._handles.append(optimizer.register_step_pre_hook(untraced(hook)))
        for model, root in zip(called, self._roots, strict=True):
            self._handles.append(model.register_forward_pre_hook(inert_hook(partial(self.before_forward, root))))
        if (inner := _witness(models, self._live)) is not None:
            self._handles.append(
                inner.register_forward_pre_hook(inert_hook(partial(self.before_forward, inner, is_inner=True)))
            )

    def close(self) -> None:
        """Take all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def is_idle(self) -> bool:
        """Whether no module does something else in training than in evaluation."""
        return not self._live

    def pass_by(self) -> bool:
        """Say whether nothing can be new after an optimizer step without validation; then that is over."""
        if not self._live:
            return True
        self._see_update()
        if not self._is_quiet or self._off:
            return False
        self._go_on(is_usual=True)
        return True

    def read(self, *, step: int, is_validated: bool) -> list[Event]:
        """Return what is new about modes, after an optimizer step.

        Args:
            step: Optimizer step.
            is_validated: Whether a validation loss was handed over with it.
        """
        if not self._live:
            return []
        self._see_update()
        if not is_validated and self.pass_by():
            return []
        found = [*self._norms.settings(), *self._training(), *(self._validation() if is_validated else ())]
        news = [fact for fact in found if fact[:2] not in self._said]
        self._said.update(fact[:2] for fact in news)
        news += self._norms.read(is_validated=is_validated)
        self._is_quiet = not is_validated  # else the next step is compared with it
        self._go_on(is_usual=not is_validated)
        return [
            Event(kind=kind, step=step, layer=layer, text=text, values=values) for kind, layer, text, values in news
        ]

    def before_update(self, live: Sequence[Live], *_: Any) -> None:
        """Note which modules are in evaluation mode while an optimizer moves what they belong to."""
        self._updates += 1
        if self._updates % EVERY != 1 and not self._off and all(root.training for root in self._roots):
            return
        for it in live:
            if it.module.training:
                self._off.pop(it.name, None)
                self._trained.add(it.name)
            else:
                self._off.setdefault(it.name, self._updates)

    def before_forward(self, module: nn.Module, *_: Any, is_inner: bool = False) -> None:
        """Count a forward call of a whole model, or of a module inside, by its mode."""
        if torch.compiler.is_compiling():
            return
        calls, without = self._inner if is_inner else self._calls, not torch.is_grad_enabled()
        if module.training:
            calls = Calls(calls.training + 1, calls.without_gradients + without, calls.evaluation)
        else:
            calls = Calls(calls.training, calls.without_gradients, calls.evaluation + 1)
        if is_inner:
            self._inner = calls
        else:
            self._calls = calls

    def _training(self) -> Iterator[Fact]:
        """Yield the modules that were in evaluation mode for some updates in a row, by what they belong to."""
        if not self._off:
            return
        off = [it for it in self._live if self._updates - self._off.get(it.name, self._updates) >= PERSISTS - 1]
        wrong = [it for it in off if not it.owner.training and not _is_frozen(it.module)]
        alone = [it for it in off if it.owner.training or _is_frozen(it.module)]
        if wrong:
            whole = next((root for root in self._roots if not root.training), None)
            yield (
                "mode-training",
                None if whole else _outermost(wrong),
                *self._describe(wrong, is_whole=whole is not None),
            )
        elif alone:
            name = alone[0].name if len(alone) == 1 else _outermost(alone)
            yield "mode-frozen", name, *self._describe(alone, is_whole=False)

    def _describe(self, off: Sequence[Live], *, is_whole: bool) -> tuple[str, dict[str, float]]:
        norms = [it.module for it in off if isinstance(it.module, Norm)]
        flipped = sum(it.name in self._trained for it in off)
        values = {
            "dropouts": float(len(off) - len(norms)),
            "normalisations": float(len(norms)),
            "never measured": float(sum(is_blank(norm) for norm in norms)),
            "trained before": float(flipped),
            "whole model": float(is_whole),
        }
        counts = (_count(len(off) - len(norms), "dropout"), _count(len(norms), "normalisation"))
        around = "the model is trained" if is_whole else "what is around is trained"
        return f"{' and '.join(filter(None, counts))} in evaluation mode while {around}", values

    def _validation(self) -> Iterator[Fact]:
        """Yield that validation ran in training mode, where forward calls in no other mode can have made its loss."""
        if self._calls.evaluation or self._inner.evaluation:
            return
        for calls, usual in ((self._calls, self._usual), (self._inner, self._usual_inner)):
            if _are_more(calls, usual):
                values = {"calls in training mode": float(calls.training), "calls in evaluation mode": 0.0}
                yield "mode-validation", None, "the validation loss was measured in training mode", values
                return

    def _see_update(self) -> None:
        """Look after an update at what hooks see before it: nobody changes a mode in between."""
        if not self._is_hooked and not self._is_seen:
            self._is_seen = True
            self.before_update(self._live)

    def _go_on(self, *, is_usual: bool) -> None:
        """Count calls anew, those of the row that is over being usual ones or not."""
        self._is_seen = False
        if is_usual:
            self._usual.append(self._calls)
            self._usual_inner.append(self._inner)
        self._calls = self._inner = Calls()


class Calls(NamedTuple):
    """Forward calls of modules since the last row: in training mode, of these without gradients, in evaluation mode."""

    training: int = 0
    without_gradients: int = 0
    evaluation: int = 0


def _are_more(calls: Calls, usual: Sequence[Calls]) -> bool:
    """Say whether calls in training mode came besides those that a step makes."""
    if not usual:
        return calls.without_gradients > 0
    return calls.without_gradients > max(row.without_gradients for row in usual) or calls.training > max(
        row.training for row in usual
    )


def _witness(models: Models, live: Sequence[Live]) -> nn.Module | None:
    """Return a module whose calls tell of those of a part of the model, where hooks do not change what is computed."""
    closed: set[nn.Module] = set()
    for _, module in named_modules(models):
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None or isinstance(module, CLOSED):
            closed.update(module.modules())
    plain = (Norm, nn.modules.dropout._DropoutNd)
    return next((it.module for it in live if isinstance(it.module, plain) and it.module not in closed), None)


def _inner(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers, which may be put into another mode without them."""
    while (inside := vars(model).get("_modules", {}).get(_wrapped(model))) is not None:
        model = inside
    return model


def _wrapped(model: nn.Module) -> str:
    is_parallel = isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel))
    return "module" if is_parallel else "_orig_mod"


def _live(models: Models) -> Iterator[Live]:
    """Yield the modules that do something else in training than in evaluation."""
    parents: dict[nn.Module, tuple[str, nn.Module]] = {}
    for name, module in named_modules(models):
        for child in module.children():
            parents.setdefault(child, (name, module))
        if _differs(module):
            owner_name, owner = name, module
            while not (weights := _weights(owner)) and owner in parents:
                owner_name, owner = parents[owner]
            if any(weight.requires_grad for weight in weights):  # in a part that is frozen no mode matters
                yield Live(name, module, owner_name, owner)


def _differs(module: nn.Module) -> bool:
    """Say whether a module does something else in training: it keeps statistics, or drops with some probability."""
    if isinstance(module, Norm):
        return has_statistics(module)
    names = ("p",) if isinstance(module, nn.modules.dropout._DropoutNd) else RATES
    rates = (vars(module).get(name) for name in names)
    return any(isinstance(rate, float) and 0 < rate <= 1 for rate in rates)


def _weights(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that a module holds besides those of normalisations."""
    return [p for part in module.modules() if not isinstance(part, Norm) for p in part.parameters(recurse=False)]


def _is_moved(it: Live, moved: set[int]) -> bool:
    return any(id(p) in moved for p in it.owner.parameters() if p.requires_grad)


def _is_frozen(module: nn.Module) -> bool:
    """Say whether somebody froze a normalisation, as one does on purpose."""
    return isinstance(module, Norm) and module.weight is not None and not module.weight.requires_grad


def _outermost(wrong: Sequence[Live]) -> str | None:
    """Return the innermost module that holds all owners, None where that is the whole model."""
    shared: list[str] = []
    for parts in zip(*(it.owner_name.split(".") for it in wrong), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared) or None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}" if number else ""
