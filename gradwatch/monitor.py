"""Where device meets host: probe a model at every optimizer step and feed the pipeline with one row."""

# L = parameter tensors, S = statistics, A = activation modules

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwatch import catalogue
from gradwatch.history.header import Status
from gradwatch.history.store import Floats, Histograms, History
from gradwatch.pipeline import Pipeline
from gradwatch.probe.activations import ActivationProbe
from gradwatch.probe.batch_hash import hash_batch
from gradwatch.probe.gradients import GradientProbe
from gradwatch.probe.histograms import HistogramProbe, bin_edges
from gradwatch.probe.transfer import to_float, to_host
from gradwatch.probe.updates import UpdateProbe
from gradwatch.records import Diagnosis, Finding

GRAD = slice(0, 6)
UPDATE = slice(6, 8)
L2 = catalogue.PARAM_NAMES.index("grad.l2")
NONFINITE = catalogue.PARAM_NAMES.index("grad.nonfinite")
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # getrusage(2): ru_maxrss is in bytes on macOS, in KiB on Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Every how many steps the sampled statistics are measured; 0 for never.

    Args:
        updates: Weight norms and update/weight ratios.
        activations: Statistics of activation modules.
        histograms: Histograms of gradients and weights.
    """

    updates: int = 10
    activations: int = 10
    histograms: int = 200


@final
@dataclass(slots=True)
class _Part:
    """The parameters that one optimizer moves: their columns in the row, and their probes."""

    optimizer: torch.optim.Optimizer
    columns: NDArray[np.intp] | slice
    gradients: GradientProbe
    updates: UpdateProbe
    observed: bool = field(default=False)
    updated: bool = field(default=False)


@final
class Monitor:
    """Watches a model in a training loop and changes nothing in it.

    The loop calls `step()` at the end of each optimizer step. Where it clips, it also calls `observe()` before, when
    the gradients are complete and unscaled; elsewhere the optimizers' own hooks do that.

    Args:
        params: The parameters to watch, in the order of `pipeline.history.info.layers`.
        optimizers: The optimizers that move them.
        pipeline: Where rows go.
        activations: Probe of the model's activation modules, or None.
        scaler: The loop's GradScaler, or None.
        schedule: When the sampled statistics are measured.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        optimizers: Sequence[torch.optim.Optimizer],
        pipeline: Pipeline,
        activations: ActivationProbe | None = None,
        scaler: torch.amp.GradScaler | None = None,
        schedule: Schedule = Schedule(),
    ) -> None:
        self.pipeline = pipeline
        self.schedule = schedule
        self._params = params
        self._parts = _parts(params, optimizers)
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self._groups = [(f"lr.{i}", group) for i, group in enumerate(groups)]
        self._histograms = HistogramProbe(params)
        self._activations = activations
        self._scaler = scaler
        self._cuda = next((p.device for p in params if p.device.type == "cuda"), None)
        self._row_SL: Floats = np.full((len(catalogue.PARAM), len(params)), np.nan, np.float32)
        self._run: dict[str, float] = {}
        self._watch_s = 0.0
        self._handles = [part.optimizer.register_step_pre_hook(self._before_update) for part in self._parts]
        self._begin()

    @property
    def history(self) -> History:
        """All that was recorded."""
        return self.pipeline.history

    @property
    def next_step(self) -> int:
        """The optimizer step that is under way."""
        return self.history.step + 1

    def observe(self) -> float:
        """Measure the gradients as they are now, which must be those of the loss, and return their total L2 norm.

        The norm is NaN or Inf where a gradient holds NaN or Inf.
        """
        began = time.perf_counter()
        for part in self._parts:
            self._observe(part, inverse_scale=1.0)
        self._norm = total_norm(self._row_SL)
        self._watch_s += time.perf_counter() - began
        return self._norm

    def step(
        self,
        loss: Tensor | float,
        *,
        batch: Any = None,
        val_loss: Tensor | float | None = None,
        statistics: Mapping[str, float] | None = None,
    ) -> None:
        """Record one optimizer step, after it.

        Args:
            loss: Loss of the step.
            batch: The step's inputs, any nest of tensors: their hash tells batches that repeat.
            val_loss: Validation loss, where it was just measured.
            statistics: Statistics of the run by their name in the catalogue; they override the monitor's own.
        """
        began = time.perf_counter()
        run = self._run
        run["loss"] = _number(loss)
        if val_loss is not None:
            run["val_loss"] = _number(val_loss)
        if batch is not None and self._parts:
            run["batch_hash"] = float(hash_batch(batch))
        norm = total_norm(self._row_SL) if self._norm is None else self._norm
        run["grad_norm.before_clip"] = run["grad_norm.after_clip"] = norm
        run["skipped"] = float(not any(part.updated for part in self._parts))
        run["peak_memory_bytes"] = self._peak_memory()
        run["step_ms"] = 1e3 * (began - self._ended)
        if statistics:
            run.update(statistics)
        self._measure_updates()
        read = self._activations.read() if self._activations else None
        run["watch_ms"] = 1e3 * (self._watch_s + time.perf_counter() - began)
        act_SA = None if read is None else to_host(read)
        self.pipeline.feed(self.next_step, run=run, param_SL=self._row_SL, act_SL=act_SA)
        self._begin()
        self._watch_s = max(0.0, self._ended - began - 1e-3 * run["watch_ms"])  # feeding is charged to the next step

    def findings(self) -> tuple[Finding, ...]:
        """Return all that was found so far, in the order of its finding."""
        return tuple(self.history.findings)

    def detach(self) -> None:
        """Take every hook off the model and the optimizers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._activations:
            self._activations.close()

    def close(self, status: Status = "finished") -> tuple[Diagnosis, ...]:
        """Detach, end the run for sinks and disk, and return the diagnoses."""
        self.detach()
        return self.pipeline.close(status)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("finished" if kind is None else "failed")

    def _begin(self) -> None:
        """Make ready for the next step."""
        self._run = {}
        self._norm: float | None = None
        self._row_SL.fill(np.nan)
        for part in self._parts:
            part.observed = part.updated = False
        if self._activations and _due(self.schedule.activations, self.next_step):
            self._activations.arm()
        self._ended = time.perf_counter()

    def _before_update(self, optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        """Run just before an optimizer moves its parameters."""
        began = time.perf_counter()
        part = next(p for p in self._parts if p.optimizer is optimizer)
        # fused optimizers get scaled gradients from the scaler, and decide on the device whether to skip
        scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
        part.updated = found_inf is None or not to_float(found_inf)
        if not part.observed:
            self._observe(part, inverse_scale=1.0 if scale is None else 1.0 / to_float(scale))
        self._run["loss_scale"] = self._scaler.get_scale() if self._scaler else 1.0
        self._run |= {name: float(group["lr"]) for name, group in self._groups}
        self._watch_s += time.perf_counter() - began

    def _observe(self, part: _Part, *, inverse_scale: float) -> None:
        step = self.next_step
        self._row_SL[GRAD, part.columns] = to_host(part.gradients.read(inverse_scale=inverse_scale))
        part.observed = True
        if _due(self.schedule.updates, step):
            part.updates.before()
        if _due(self.schedule.histograms, step) and part is self._parts[0]:
            self._take_histograms(step)

    def _measure_updates(self) -> None:
        if not _due(self.schedule.updates, self.next_step):
            return
        for part in self._parts:
            if part.observed:
                self._row_SL[UPDATE, part.columns] = to_host(part.updates.after())

    def _take_histograms(self, step: int) -> None:
        grad_LB, weight_LB = to_host(self._histograms.read())
        self.history.histograms = Histograms(step=step, edges_B=bin_edges(), grad_LB=grad_LB, weight_LB=weight_LB)

    def _peak_memory(self) -> float:
        if self._cuda is not None:
            return float(torch.cuda.max_memory_allocated(self._cuda))
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT)


def total_norm(row_SL: Floats) -> float:
    """Return the L2 norm over all gradients; NaN or Inf where one holds NaN or Inf.

    Args:
        row_SL: The gradient statistics of every layer, nan where there is no gradient; at least the first six rows.
    """
    l2_L = row_SL[L2].astype(np.float64)
    squares = float(l2_L @ l2_L)
    if math.isnan(squares):
        l2_L = l2_L[~np.isnan(row_SL[NONFINITE])]
        squares = float(l2_L @ l2_L)
    return math.sqrt(squares)


def _number(value: Tensor | float) -> float:
    return to_float(value) if isinstance(value, Tensor) else float(value)


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _parts(params: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> list[_Part]:
    """Share the parameters out among the optimizers; those that none holds go to the last."""
    if len(optimizers) == 1:
        return [_Part(optimizers[0], slice(None), GradientProbe(params), UpdateProbe(params))]
    owner = {id(p): i for i, o in enumerate(optimizers) for group in o.param_groups for p in group["params"]}
    parts = []
    for i, optimizer in enumerate(optimizers):
        columns = [k for k, p in enumerate(params) if owner.get(id(p), len(optimizers) - 1) == i]
        mine = [params[k] for k in columns]
        parts.append(_Part(optimizer, np.array(columns, np.intp), GradientProbe(mine), UpdateProbe(mine)))
    return parts
