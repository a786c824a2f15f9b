"""Find the training loops of a script while it runs, and watch each of them."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, final

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from gradwatch.autowatch.hand_loop import HandLoop
from gradwatch.autowatch.loops import Loops, leaves_of
from gradwatch.autowatch.made_optimizers import MadeOptimizers
from gradwatch.autowatch.messages import kinds_of, say
from gradwatch.autowatch.monitor_maker import MonitorMaker
from gradwatch.autowatch.optimizer_loop import OptimizerLoop
from gradwatch.autowatch.refusals import Refusals
from gradwatch.autowatch.search import find_models, find_outermost, params_of
from gradwatch.autowatch.settings import ScriptSettings
from gradwatch.autowatch.step_recorder import StepRecorder
from gradwatch.autowatch.torch_hooks import TorchHooks
from gradwatch.errors import GradwatchError

if TYPE_CHECKING:
    pass

P = ParamSpec("P")

MAX_LOOPS = 32
"""Maximum number of loops to watch: a hyperparameter search may train hundreds of models."""

MAX_WITHOUT_LOSS = 3
"""Updates of each optimizer without a backward pass after which a loop is not understood: some scripts begin so."""

MAX_UNKNOWN_LOSSES = 3
"""Backward passes outside of known loops to inspect: the first shows the parameters that they train."""

NO_STEP = "there was a forward or backward pass, but no step of an optimizer from a loss of one number"
NO_LOSS = "the optimizer steps without a backward pass from a loss of one number"
NO_MODULE = "no module has the parameters of the optimizer"


def _harmless(method: Callable[Concatenate[ScriptWatch, P], None]) -> Callable[Concatenate[ScriptWatch, P], None]:
    """Make a method do nothing after the end, and end the watching if it fails: the script must not stop."""

    @functools.wraps(method)
    def call(self: ScriptWatch, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.is_over or self.is_attaching:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # of any kind
            say(f"stopped watching after an unexpected {type(error).__name__}: {error}. The script runs on")
            self.end()

    return call


@final
class ScriptWatch:
    """Watches the training loops of this process.

    A loop is found at the first forward pass of a module whose parameters an optimizer holds. If no such pass is seen,
    it is found at the first step of the optimizer. An optimizer that was made after the backward pass waits for the
    next pass: a script may make one for each parameter that has a gradient. A script that calls `gradwatch.watch` is
    left alone.

    Args:
        settings: Options of the user.

    Attributes:
        loops: The loops that are watched now.
        is_over: Whether the script is left alone from now on.
        is_attaching: Whether a loop is being attached; passes and optimizers made during it are gradwatch's own.
    """

    def __init__(self, settings: ScriptSettings) -> None:
        self._settings = settings
        self._monitors = MonitorMaker(settings, on_own_call=self._yield_to_script, on_exit=self.finish)
        self.loops = Loops()
        self.is_over = self.is_attaching = False
        self._hooks: TorchHooks | None = None
        self._made = MadeOptimizers()
        self._scalers: list[weakref.ref[GradScaler]] = []
        self._refused = Refusals()
        self._clock = self._without_loss = self._num_unknown = 0
        self._backward_at = math.inf
        """Clock of the script at the newest backward pass; infinite before the first."""

    def install(self) -> None:
        """Hook torch."""
        self._hooks = TorchHooks(self)
        if hasattr(os, "register_at_fork"):  # not on Windows
            os.register_at_fork(after_in_child=self.loops.forget)

    def end(self) -> None:
        """Remove all hooks from torch. Monitors with steps stay open until the process ends."""
        self.is_over = True
        if self._hooks is not None:
            self._hooks.remove()
        self.loops.discard_empty()

    @_harmless
    def on_optimizer(self, optimizer: Optimizer) -> None:
        """Look for the models of an optimizer from now on."""
        self._clock += 1
        self._made.add(optimizer, self._clock)
        self._search(True)

    @_harmless
    def on_scaler(self, scaler: GradScaler) -> None:
        """Remember a GradScaler for later loops."""
        self._scalers.append(weakref.ref(scaler))

    @_harmless
    def on_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Watch the loop if the module has parameters of an optimizer."""
        # inference mode has tensors that training cannot use
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return
        waiting = self._waiting()
        if not waiting or (len(waiting) == 1 and self.loops.adopt(waiting[0])):
            self._search(False)
            return
        held = params_of(waiting)
        # some scripts freeze all weights for an evaluation, often one before the first step
        if not any(param.requires_grad and id(param) in held for param in module.parameters()):
            return
        before = {*module._forward_pre_hooks}
        self._attach(waiting, running=module)
        _call_new_hooks(module, args, before)

    @_harmless
    def on_backward(self, tensors: Any, grad_tensors: Any) -> None:
        """Keep the losses of a backward pass."""
        self._backward_at = self._clock
        for tensor, factor in _pairs(tensors, grad_tensors):
            loss = self._hooks.loss_of(tensor) if self._hooks else tensor
            if loss.numel() != 1:
                continue
            if not self.loops and not self._waiting():
                self._attach_by_hand(loss)
            for loop in self.loops.reached_by(loss):
                loop.on_backward(loss if factor is None else loss * factor, is_scaled=loss is not tensor)

    @_harmless
    def on_loss(self, function: Callable[..., Any], args: Any, kwargs: Any, result: Any) -> None:
        """Tell the loops the result of a loss function, which may be of a validation."""
        for loop in self.loops:
            loop.recorder.validation.on_loss(function, args, kwargs, result)

    @_harmless
    def before_step(self, optimizer: Optimizer) -> None:
        """Watch the loop of an optimizer if it is not watched yet."""
        is_known = self.loops.of(optimizer) is not None or self.loops.adopt(optimizer)
        if not is_known and optimizer not in self._refused and _is_own(optimizer):
            if self._made.newest(optimizer) > self._backward_at:
                # others of this training may follow, one for each parameter: the next pass shows them all
                self.loops.close_by_hand(params_of([optimizer]))
                return
            self._attach(self._waiting() or [optimizer], running=None)
        if loop := self.loops.of(optimizer):
            loop.before_step()

    @_harmless
    def after_step(self, optimizer: Optimizer) -> None:
        """Record the step of a loop if it is complete."""
        loop = self.loops.of(optimizer)
        if loop is None:
            return
        self._clock += 1
        self._without_loss = 0 if loop.after_step(optimizer, self._clock) else self._without_loss + 1
        if loop.has_trained or self._without_loss < MAX_WITHOUT_LOSS * loop.num_optimizers:
            pass
        elif loop.is_idle():  # the script has forgotten its backward pass, or cuts the graph
            loop.recorder.record(None)
        elif not loop.recorder.num_steps:
            self.loops.close(loop)
            self._refuse(NO_LOSS, [optimizer])

    @_harmless
    def before_clearing(self) -> None:
        """Record the steps of loops that move their weights by hand."""
        self.loops.before_clearing()

    @_harmless
    def after_scaler_update(self) -> None:
        """Record the steps that have waited for the loss scale."""
        self.loops.after_scaler_update()

    def _attach(self, optimizers: Sequence[Optimizer], *, running: nn.Module | None) -> None:
        """Watch the models of optimizers."""
        self._search(False)
        # before the search, which reads all objects of the process: a test suite may train a thousand models
        if self.loops.num_begun >= MAX_LOOPS:
            self.loops.close_before(self._made.oldest(optimizers))
            self._refuse(f"it is number {MAX_LOOPS + 1} of this script", optimizers)
            return
        with self._attaching():
            models = find_models(params_of(optimizers), running=running)
            held = {id(param) for model in models.values() for param in model.parameters()}
            moving = [o for o in find_outermost(optimizers) if held & params_of([o]).keys()]
            if not moving:
                self._refuse(NO_MODULE, optimizers)
                return
            self.loops.close_before(self._made.oldest(moving))
            try:
                self._watch(models, moving, running)
            except GradwatchError as error:
                if running is None:  # otherwise it is attempted again at the first step, when parameters have shapes
                    self._refuse(str(error), moving)
        self._made.keep(self._waiting())

    def _watch(self, models: Mapping[str, nn.Module], moving: Sequence[Optimizer], running: nn.Module | None) -> None:
        # the newest: an earlier training of the script may have left its own
        scaler = next((made for ref in reversed(self._scalers) if (made := ref()) and made.is_enabled()), None)
        monitor = self._monitors.make(models, moving, scaler)
        if monitor is None:
            return
        called = {id(module): module for module in (*models.values(), running) if module is not None}
        part = None if running is None or any(running is model for model in models.values()) else running
        self.loops.add(OptimizerLoop(StepRecorder(monitor, called.values(), part=part), moving))
        self._settings.mark_seen()
        names = ", ".join(name or type(model).__name__ for name, model in models.items())
        say(
            f"watching {names} ({kinds_of(moving)})"
            + (f"; run directory: {monitor.run_dir}" if monitor.run_dir else "")
        )

    def _attach_by_hand(self, loss: Tensor) -> None:
        """Watch a loop without an optimizer: the weights may move by hand. No step is recorded before they do."""
        if self._num_unknown >= MAX_UNKNOWN_LOSSES or self.loops.num_begun >= MAX_LOOPS:
            return
        self._num_unknown += 1
        with self._attaching():
            leaves = [leaf for leaf in leaves_of(loss) if isinstance(leaf, nn.Parameter)]
            models = find_models({id(leaf): leaf for leaf in leaves}, running=None) if leaves else {}
            if not models:
                return
            with contextlib.suppress(GradwatchError):
                monitor = self._monitors.make(models, [], None)
                if monitor is not None:
                    self.loops.add(HandLoop(StepRecorder(monitor, models.values()), leaves))

    @_harmless
    def _yield_to_script(self) -> None:
        """Stop watching: the script has called `watch` itself."""
        for loop in self.loops:
            self.loops.close(loop)
        self.end()

    @_harmless
    def finish(self) -> None:
        """Report at the end of the process if no loop was understood."""
        for num_backward in self.loops.without_steps():
            self._refused.add_without_step(num_backward)
        if self.loops.discard_empty() and not len(self.loops):
            self._refuse(NO_STEP)

    def _refuse(self, reason: str, optimizers: Sequence[Optimizer] = ()) -> None:
        """Ignore optimizers from now on, and report the reason once."""
        self._settings.mark_seen()
        self._refused.add(optimizers, reason, beside_others=bool(self.loops))

    @contextlib.contextmanager
    def _attaching(self) -> Iterator[None]:
        self.is_attaching = True
        try:
            yield
        finally:
            self.is_attaching = False
            if self._hooks is not None and not self.is_over:
                self._hooks.stay_last()

    def _waiting(self) -> list[Optimizer]:
        """Return the optimizers of the script that no loop has and that are not refused."""
        return [o for o in self._made if o not in self._refused and self.loops.of(o) is None and _is_own(o)]

    def _search(self, is_on: bool) -> None:
        if self._hooks is not None:
            self._hooks.watch_forward(is_on)


def _is_own(optimizer: Optimizer) -> bool:
    """Return whether the script made an optimizer, rather than gradwatch as a stand-in."""
    hand_updates = sys.modules.get("gradwatch.monitor.readings.hand_updates")
    return hand_updates is None or not isinstance(optimizer, hand_updates.HandUpdates)


def _call_new_hooks(module: nn.Module, args: tuple[Any, ...], before: Collection[int]) -> None:
    """Call the hooks that a module got in its forward pass: torch has listed the hooks of this call already."""
    for key, hook in [*module._forward_pre_hooks.items()]:
        if key not in before:
            hook(module, args, {}) if key in module._forward_pre_hooks_with_kwargs else hook(module, args)


def _pairs(tensors: Any, grad_tensors: Any) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the tensors of a backward pass with their factors."""
    several = [tensors] if isinstance(tensors, Tensor) else [*tensors]
    factors = [grad_tensors] if isinstance(grad_tensors, Tensor) else [*(grad_tensors or [None] * len(several))]
    for tensor, factor in zip(several, factors, strict=False):
        if isinstance(tensor, Tensor):  # otherwise an edge of the graph
            yield tensor, factor
