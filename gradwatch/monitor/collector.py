"""The device side of a step: hooks on the optimizers have gradients, weights and activations read into one row."""

# L = parameter tensors, S = statistics, A = activation modules

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradwatch import catalogue
from gradwatch.history.store import Floats, Histograms
from gradwatch.monitor.best_effort import dispensable, warn_once
from gradwatch.monitor.budget import Budget
from gradwatch.monitor.fast_path import Hook, PlainSteps
from gradwatch.monitor.host_stats import number
from gradwatch.monitor.optimizer_tracker import Counted, Part, parts_of, total_norm
from gradwatch.monitor.row import Leaving, Left, as_histograms, reconciled
from gradwatch.probe.activations.probe import ActivationProbe
from gradwatch.probe.activations.silent_units import SilentUnits
from gradwatch.probe.device.sync import is_capturing, to_float, to_host
from gradwatch.probe.device.transfer_queue import DeviceClock, Values

HISTOGRAMS = "the histograms"


@final
class Collector:
    """Reads what happens on the device between two rows.

    Args:
        params: The parameters to watch, in the order of the columns.
        optimizers: The optimizers that move them.
        activations: Probe of the model's activation modules, or None.
        scaler: The loop's GradScaler, or None.
        budget: When the sampled statistics are measured.
        measure_clipped: As in `Monitor`.
        hooked: As in `Monitor`.
        late: As in `Monitor`.

    Attributes:
        has_optimizers: Whether there is anything to watch.
        has_scaler: Whether the loss is scaled.
        row_SL: What was read since `begin`, which makes a new one; nan where nothing was.
        is_updated: Whether an optimizer has moved its parameters since `begin`.
        plain: Records plain steps, once it is armed; None where none can be plain.
        optimizer: Loss scale and learning rates of the newest update, by their names in the catalogue.
        watch_s: Seconds that were spent in hooks and `observe` since `begin`.
        device: That of the first parameter.
        clock: Measures what the device spends.
        optional_s: Seconds that were spent on sampled statistics since `begin`.
        silence: Since when units have been silent.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        optimizers: Sequence[Optimizer],
        activations: ActivationProbe | None,
        scaler: torch.amp.GradScaler | None,
        budget: Budget,
        measure_clipped: bool,
        hooked: bool,
        late: bool = False,
    ) -> None:
        self._is_late = late
        self.device = params[0].device if params else torch.device("cpu")
        self.clock = DeviceClock()
        self.warned: set[str] = set()
        self._parts = parts_of(params, optimizers)
        self._num_layers = len(params)
        self._known = {id(p) for p in params}
        self._activations = activations
        self.silence = SilentUnits()
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.has_optimizers, self.has_scaler = bool(self._parts), self._scaler is not None
        self._scale = 1.0
        self._scale_then: Tensor | None = None
        self._budget = budget
        self._measure_clipped = measure_clipped
        self._is_hooked = hooked
        self.is_updated = False
        self.plain: PlainSteps | None = None
        self._is_plain = False
        self._handles: list[RemovableHandle] = []
        for part in self._parts:
            before, after = _hook(self._before_update, part), _hook(self._after_update, part)
            if not late and self._scaler is None and len(self._parts) == 1:
                self.plain = part.plain_steps(before=before, after=after, hooked=hooked)
            if not hooked:
                continue
            if self.plain is not None:
                before, after = self.plain.native.before, self.plain.native.after
            self._handles.append(part.optimizer.register_step_pre_hook(before))
            self._handles.append(part.optimizer.register_step_post_hook(after))
            if len(self._parts) > 1:  # between `observe` and a step, another optimizer's loss may add to the gradients
                self._handles += part.watch_backward()

    @property
    def num_groups(self) -> int:
        """How many groups the optimizers had at the beginning."""
        return sum(part.num_groups for part in self._parts)

    @property
    def is_due(self) -> bool:
        """Whether the statistics of updates are measured in this row."""
        return self._due_updates

    @property
    def scale(self) -> float:
        """The newest loss scale that was looked up; 1 without a scaler."""
        return self._scale

    def begin(self, step: int) -> None:
        """Make ready for the next row, that of an optimizer step."""
        self.row_SL = np.full((len(catalogue.PARAM), self._num_layers), math.nan, np.float32)
        self._step = step
        self.is_updated = False
        self.optimizer: dict[str, float] = {}
        self.watch_s = self.optional_s = 0.0
        self._counted: list[Counted] = []
        self._due_updates, due_activations, self._turn = self._budget.due(step)
        for part in self._parts:
            part.begin(self.row_SL, self._turn)
        self._due_activations = due_activations and self._activations is not None
        if self._due_activations:
            self._arm()
        if self._is_late:
            self._scale_then = self._scaler_scale()
            self.is_updated = any(part.is_updated for part in self._parts)  # by a CUDA graph
        elif self._scaler is not None and self._is_hooked:
            self._look_at_scale()

    def conclude(self, *, updated: bool) -> None:
        """Take it from a loop without hooks whether the gradients that were observed have moved the parameters."""
        self.is_updated = updated
        for part in self._parts:
            part.is_updated = updated

    def observe(self, optimizer: Optimizer | None = None) -> float:
        """Read the gradients of an optimizer, or of all that have not stepped yet; return their total norm."""
        began = time.perf_counter()
        if optimizer is None:
            parts = [part for part in self._parts if not part.is_updated] or self._parts
        else:
            asked = (optimizer, getattr(optimizer, "optimizer", None))  # of a wrapper, what it wraps
            parts = [part for part in self._parts if part.optimizer in asked]
        norm = math.hypot(*[self._observe(part) for part in parts])
        if self._due_updates and not self._is_hooked:
            for part in parts:
                self._keep_weights(part)
        self.watch_s += time.perf_counter() - began
        return norm

    def scale_fell(self) -> bool:
        """Say whether the scaler has lowered its scale since `begin`, as it does when it skips an update."""
        self._settle_scale()
        before = self._scale
        self._look_at_scale()
        fell, self._scale = self._scale < before, before
        return fell

    @dispensable("the look at a skipped update")
    def describe_skipped(self) -> None:
        """Read what the loop has not cleared yet of an update that was left out."""
        self._settle_scale()
        self.optimizer["loss_scale"] = self._scale
        for part in self._parts:
            part.put_rates(self.optimizer)
            if part.is_read:
                continue
            norm = self._read_gradients(part)
            # A scaler skips what is not finite, after unscaling it: finite gradients may be scaled still.
            is_unknown = self._scaler is not None and norm is not None and math.isfinite(norm)
            if is_unknown or not part.has_gradients():
                part.forget_gradients()

    def norms(self, grad_norm: Tensor | float | None) -> tuple[float, float]:
        """Return the total norm before and after clipping; nan where no gradient was read.

        Args:
            grad_norm: The norm before clipping, where the gradients were read after it: then they are scaled back.
        """
        if grad_norm is None and len(self._parts) == 1 and self._parts[0].clipped_norm is None:
            return self._parts[0].norm, self._parts[0].norm
        return self._norms(grad_norm) or (math.nan, math.nan)

    @dispensable("the norm of the gradients")
    def _norms(self, grad_norm: Tensor | float | None) -> tuple[float, float]:
        parts = [part for part in self._parts if part.is_read]
        if not parts:
            return math.nan, math.nan
        norm = parts[0].norm if len(self._parts) == 1 else total_norm(self.row_SL)
        clipped = [(part.norm, part.clipped_norm) for part in parts]
        return reconciled(self.row_SL, norm, clipped, None if grad_norm is None else number(grad_norm))

    def read_updates(self) -> None:
        """Read how far the weights were moved, where it is due."""
        if self._due_updates:
            began = time.perf_counter()
            self._read_updates()
            self.optional_s += time.perf_counter() - began

    def read_activations(self) -> Floats | None:
        """Return the statistics of the activations, of shape (S, A), where they are due and there are any."""
        if not self._due_activations:
            return None
        began = time.perf_counter()
        act_SA = self._read_activations()
        spent_s = self._activations.spent_s if self._activations else 0.0  # within the forward calls
        self.watch_s += spent_s
        self.optional_s += spent_s + time.perf_counter() - began
        return act_SA

    def histograms(self, step: int) -> Histograms | None:
        """Return the histograms, where they were due."""
        return as_histograms(step, self._counted)

    def state(self) -> dict[str, Any]:
        """Return what further rows depend on: since when units are silent, and what the probe of activations knows."""
        return self.silence.state() | (self._activations.state() if self._activations else {})

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; what was watched is settled before there is a monitor."""
        self.silence.restore(state)
        if self._activations:
            self._activations.restore(state)

    def detach(self) -> None:
        """Take every hook off the model and the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for part in self._parts:
            part.detach()
        if self._activations:
            self._activations.close()

    def outgoing(self) -> dict[str, Tensor]:
        """Return what was left on the device since `begin`, by names that `place` knows."""
        sent = {f"{i}.{name}": t for i, part in enumerate(self._parts) for name, t in part.late.items()}
        if not self._due_activations or self._activations is None:
            return sent
        act_SA = self._activations.read()
        if act_SA is None:
            return sent
        dead = enumerate(self._activations.dead_units())
        return sent | {"act": act_SA} | {f"dead.{a}": units for a, units in dead if units is not None}

    def leaver(self) -> Callable[[Values], Left]:
        """Return what makes the row that is under way, from what was outgoing; `begin` may come in between."""
        return Leaving(
            step=self._step,
            row_SL=self.row_SL,
            counted=self._counted,
            parts=self._parts,
            norms=[(part.norm, part.clipped_norm) for part in self._parts],
            turns=[part.turn_columns_K for part in self._parts],
            num_modules=len(self._activations.infos) if self._activations else 0,
            silence=self.silence,
        )

    def go_plainly(self) -> None:
        """Leave what comes to the plain steps, which are armed."""
        self._is_plain = True
        if self._is_hooked:
            self._parts[0].await_plain_steps()

    def leave_plain_steps(self) -> None:
        """Go on by the long way with the step under way, where plain steps were recorded until now."""
        if self.plain is None or not self._is_plain:
            return
        self._is_plain = False
        native, part = self.plain.native, self._parts[0]
        begun = self.plain.leave()
        self._step = native.step
        self.watch_s += native.spent_s
        part.leave_plain_steps(begun, native.fastest_s)
        if begun is not None:
            self.is_updated = part.is_updated = self._is_hooked  # else `conclude` tells
            part.stepped_from = native.began
            self.optimizer = {"loss_scale": 1.0} | {f"lr.{i}": rate for i, rate in enumerate(begun.rates)}

    def _before_update(self, part: Part, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        began = time.perf_counter()
        self.leave_plain_steps()
        self._look_closely(part, args, kwargs)
        part.stepped_from = time.perf_counter()
        self.watch_s += part.stepped_from - began

    def _look_closely(self, part: Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Describe an update that may be anything."""
        part.is_updated = True
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        part.awaits_closure = closure is not None  # it computes the gradients, as often as it pleases
        self._describe_update(part)
        self.is_updated |= part.is_updated
        if self._due_updates or is_capturing(part.params):
            self._keep_weights(part)

    def _after_update(self, part: Part, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        began = time.perf_counter()
        self.leave_plain_steps()
        extra_s = part.extra(began - part.stepped_from)
        self.optional_s += extra_s
        if self._is_late:
            if part.awaits_closure and not part.is_awaiting and (self._measure_clipped or not part.is_observed):
                part.send_gradients(clipped=part.is_observed)
            part.send_step()
            if part.awaits_closure:
                self._send_histograms(part)
        elif not part.take_gradients():
            if part.awaits_closure:
                self._read_made(part)
        elif part.awaits_closure and part.has_turn and not part.is_observed:
            self._read_histograms(part)
        if part.is_traced:
            self.read_updates()
        part.is_observed = False
        self.watch_s += extra_s + time.perf_counter() - began

    @dispensable("the look at the optimizer")
    def _read_made(self, part: Part) -> None:
        """Read the gradients that a closure made: as they are, or what has become of those that it had observed."""
        if not part.is_observed:
            self._read_gradients(part)
        elif self._measure_clipped:
            part.read_clipped()

    @dispensable("the look at the optimizer")
    def _describe_update(self, part: Part) -> None:
        if self._is_late:
            self._send_update(part)
            return
        # fused optimizers get scaled gradients from the scaler, and decide on the device whether to skip
        scale, found_inf = getattr(part.optimizer, "grad_scale", None), getattr(part.optimizer, "found_inf", None)
        if found_inf is not None:
            part.is_updated = not to_float(found_inf)
        if self._scaler is not None:
            self._look_at_scale()
        self.optimizer["loss_scale"] = self._scale if scale is None else to_float(scale)
        part.put_rates(self.optimizer)
        if part.is_observed:
            if self._measure_clipped:
                part.read_clipped()
        elif part.await_gradients():
            if part.has_turn and not part.awaits_closure:
                self._read_histograms(part)
        elif not part.awaits_closure:
            self._read_gradients(part, inverse_scale=1.0 if scale is None else 1.0 / to_float(scale))
        if part.has_later_groups and (later := [p for p in part.later_params() if id(p) not in self._known]):
            text = f"{len(later)} parameters came to the optimizer after gradwatch attached, and are not watched"
            warn_once(self, "later parameters", text)

    def _send_update(self, part: Part) -> None:
        """Do the same without waiting for the device: what only it knows is left there."""
        scale, found_inf = getattr(part.optimizer, "grad_scale", None), getattr(part.optimizer, "found_inf", None)
        part.late |= {"found_inf": found_inf.clone()} if found_inf is not None else {}
        loss_scale = self._scaler_scale() if scale is None else scale.clone()
        self.optimizer["loss_scale"] = 1.0
        part.late |= {"loss_scale": loss_scale} if loss_scale is not None else {}
        self.optimizer.update(part.send_rates())
        end = self.clock.begin(self.device)
        if part.is_observed:
            if self._measure_clipped and not part.await_gradients(clipped=True):
                part.send_gradients(clipped=True)
        elif not part.await_gradients() and not part.awaits_closure:
            part.send_gradients(inverse_scale=1.0 if scale is None else 1.0 / scale)
        if not part.awaits_closure:
            self._send_histograms(part)
        end()

    @dispensable(HISTOGRAMS)
    def _send_histograms(self, part: Part) -> None:
        if part.has_turn and not part.is_observed and not is_capturing(part.params):
            part.send_histograms()

    def _scaler_scale(self) -> Tensor | None:
        """Return the scaler's scale as it is now, on the device; None where there is none yet."""
        scale = None if self._scaler is None else self._scaler._get_scale_async()  # `get_scale` would wait
        return None if scale is None else scale.clone()

    def _settle_scale(self) -> None:
        """Wait for the scale of the step that is under way."""
        if self._scale_then is not None:
            self._scale = to_float(self._scale_then)

    def _look_at_scale(self) -> None:
        if self._scaler is not None:
            self._scale = self._scaler.get_scale()

    def _observe(self, part: Part) -> float:
        norm = self._read_gradients(part)
        part.is_observed = True
        if part.is_updated and part.awaits_closure and self._measure_clipped:  # by its closure: the step is under way
            part.await_gradients(clipped=True)
        return part.norm_without_probe() if norm is None else norm

    @dispensable("the probe of gradients")
    def _read_gradients(self, part: Part, *, inverse_scale: float = 1.0) -> float:
        began = time.perf_counter()
        is_counting = part.has_turn and HISTOGRAMS not in self.warned
        norm = part.read_gradients(inverse_scale=inverse_scale, is_counting=is_counting)
        if is_counting and self._turn is not None:
            self.optional_s += (time.perf_counter() - began) / self._turn.of  # about what counting takes
            self._read_histograms(part)
        return norm

    @dispensable(HISTOGRAMS)
    def _read_histograms(self, part: Part) -> None:
        began = time.perf_counter()
        self._counted.append(part.read_histograms())
        self.optional_s += time.perf_counter() - began

    @dispensable("the probe of updates")
    def _keep_weights(self, part: Part) -> None:
        began = time.perf_counter()
        part.keep_weights()
        self.optional_s += time.perf_counter() - began

    @dispensable("the probe of updates")
    def _read_updates(self) -> None:
        for part in self._parts:
            if self._is_late:
                part.send_updates()
            else:
                part.read_updates()

    @dispensable("the probe of activations")
    def _arm(self) -> None:
        assert self._activations is not None, "only a probe that is there is due"
        began = time.perf_counter()
        self._activations.arm()
        self.optional_s += time.perf_counter() - began

    @dispensable("the probe of activations")
    def _read_activations(self) -> Floats | None:
        assert self._activations is not None, "only a probe that is there is due"
        read = self._activations.read()
        if read is None:
            return None
        dead = self.silence.add(self._step, self._activations.packed_units())
        return np.concatenate([to_host(read), dead])


def _hook(method: Callable[..., None], part: Part) -> Hook:
    """Return a method as the hook of one part, left alone by torch.compile where that is in use."""
    plain: Hook = functools.partial(method, part)
    if "torch._dynamo" not in sys.modules:  # importing it takes a second
        return plain
    disabled: Hook = torch.compiler.disable(plain)

    def hook(*args: Any) -> None:
        if torch.compiler.is_compiling():
            disabled(*args)
        else:  # past the wrapper, which takes 4 us a call
            plain(*args)

    return hook
