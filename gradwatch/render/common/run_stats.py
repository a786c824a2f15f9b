"""Compute the numbers of a run from its history: time, throughput, loss, validation, overhead of monitoring."""

# T = recorded steps

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import detectors, waiting
from gradwatch.events import LEFT_OUT, MEMORY_PLANNED
from gradwatch.history.store import History
from gradwatch.records import DataInfo, RunInfo, Severity
from gradwatch.render.common import format as units

Floats = NDArray[np.floating[Any]]

SHORT_S = 10.0
"""Duration below which the overhead is not shown as percent. Each run spends about 0.1 s once at its start, for the
graph, the first samples and opening files. In a shorter run, that is 1 % or more, which a longer run does not have."""

HEALTHY = "healthy"


@final
@dataclass(frozen=True, slots=True)
class RunStats:
    """Numbers about a whole run; nan if unknown.

    Args:
        steps: Number of optimizer steps.
        seconds: Wall time of the steps, estimated from the kept steps.
        samples_per_s: Throughput, estimated from the kept steps.
        watch_frac: Fraction of the time that the monitor took, measured over the steps that are not thinned.
        watch_s: Seconds that the monitor took, estimated for all steps.
        watch_us: Median overhead of a step in microseconds: the first steps take far more than all later ones.
        loss: Training loss at the newest step.
        val_loss: Newest validation loss.
        val_accuracy: Newest validation accuracy, 0..1.
        wait_frac: Fraction of the time that steps waited for their batches, estimated from the kept steps.
        peak_memory_bytes: Largest peak memory of a step: of the allocator on CUDA, of the process elsewhere.
        planned_peak_bytes: Peak memory of a step's tensors by the plan.
    """

    steps: int
    seconds: float
    samples_per_s: float
    watch_frac: float
    watch_s: float
    watch_us: float
    loss: float
    val_loss: float
    val_accuracy: float
    wait_frac: float
    peak_memory_bytes: float
    planned_peak_bytes: float


def health(history: History) -> str:
    """Return the health of a run: the number of problems of each severity, or `healthy` if all were judged."""
    if history.step < 0:
        return "no steps recorded"
    total = history.info.total_steps
    counts = [(sum(f.severity == severity for f in history.findings), severity) for severity in reversed(Severity)]
    found = ", ".join(counted(count, severity) for count, severity in counts if count)
    if worst_severity(history) is not None:
        return found
    # a live run, or one that ended before its planned steps; early stopping is an end as planned
    is_stopped = history.ending is not None and history.ending.kind == "early-stop"
    word = verdict(None, is_judged=is_judged(history))
    if word == HEALTHY and total and history.step + 1 < total and not is_stopped:
        word += " so far"
    return f"{word}, {found}" if found else word


def verdict(worst: Severity | None, *, is_judged: bool) -> str:
    """Return the health of a run with steps in a few words for people. The `verdict` of JSON has only one word.

    Args:
        worst: The highest severity above info, or None.
        is_judged: Whether every detector could judge the run; False if that is unknown.
    """
    if worst is not None:
        return str(worst)
    return HEALTHY if is_judged else "no problems found"


def is_judged(history: History) -> bool:
    """Return whether every detector could judge the run, so that a run without problems is healthy."""
    return not too_short_for(history) and not has_gaps(history)


def counted(count: int, severity: Severity) -> str:
    """Return a number of problems of a severity, such as `2 critical problems`, `1 warning` or `3 notes`."""
    noun = {Severity.CRITICAL: "critical problem", Severity.WARNING: "warning", Severity.INFO: "note"}[severity]
    return units.plural(count, noun)


def too_short_for(history: History) -> tuple[str, ...]:
    """Return the kinds of problems that cannot be judged yet, since the run is too short."""
    thresholds: dict[str, dict[str, Any]] = {}
    for key, value in (history.info.settings or {}).items():
        section, _, rest = key.partition(".")
        kind, _, name = rest.partition(".")
        if section == "detect" and name:
            thresholds.setdefault(kind, {})[name] = value
    return waiting(history, detectors(thresholds))


def has_gaps(history: History) -> bool:
    """Return whether a check was left out, so that its problems cannot be judged."""
    return any(event.kind == LEFT_OUT.name for event in history.events)


def run_stats(history: History) -> RunStats:
    """Return the numbers of a run."""
    # if steps are thinned, a kept step counts for itself and the deleted steps before it
    weight_T = np.diff(history.steps("loss"), prepend=-1).astype(np.float64)
    step_ms_T, per_s_T, watch_T = (history[s] for s in ("step_ms", "samples_per_s", "watch_ms"))
    known_T = ~np.isnan(step_ms_T)
    # nan, a step without a time, must not reach the sum
    time_ms = float(np.sum((weight_T * step_ms_T)[known_T]))
    samples = float(np.nansum(weight_T * step_ms_T * per_s_T)) / 1e3
    # thinning keeps multiples of powers of 2, which sampled steps are too: thinned parts overstate the overhead
    whole_T = known_T & (weight_T == 1)
    whole_ms = float(np.sum(step_ms_T[whole_T]))
    spent_T = watch_T[whole_T & ~np.isnan(watch_T)]
    watch_frac = float(np.nansum(watch_T[whole_T])) / whole_ms if whole_ms > 0 else float("nan")
    wait_T, memory_T = history["data_wait_ms"], history["peak_memory_bytes"]
    waits_T = known_T & ~np.isnan(wait_T)  # a user's own loop does not measure its waits
    waited_ms = float(np.sum((weight_T * wait_T)[waits_T]))
    return RunStats(
        steps=history.step + 1,
        seconds=time_ms / 1e3 if known_T.any() else float("nan"),
        # a run without known batch sizes has 0 samples here, which means unknown
        samples_per_s=samples / time_ms * 1e3 if time_ms > 0 and samples > 0 else float("nan"),
        watch_frac=watch_frac,
        watch_s=watch_frac * time_ms / 1e3,
        watch_us=1e3 * float(np.median(spent_T)) if len(spent_T) else float("nan"),
        loss=newest(history, "loss"),
        val_loss=history.latest_validation("val_loss")[1],
        val_accuracy=history.latest_validation("val_accuracy")[1],
        wait_frac=waited_ms / float(np.sum((weight_T * step_ms_T)[waits_T])) if waits_T.any() else float("nan"),
        peak_memory_bytes=float(np.fmax.reduce(memory_T, initial=np.nan)),
        planned_peak_bytes=next(
            (e.values["peak_bytes"] for e in reversed(history.events) if e.kind == MEMORY_PLANNED.name), float("nan")
        ),
    )


def memory(history: History, run: RunStats) -> str:
    """Return the measured peak of memory, and the planned one if there is one; `-` if both are unknown."""
    of = "" if history.info.device.startswith("cuda") else " of the process"
    measured = f"{units.shown_size(run.peak_memory_bytes)}{of}" if run.peak_memory_bytes >= 0 else ""
    planned = f"{units.shown_size(run.planned_peak_bytes)} planned for the tensors of a step"
    return "; ".join(filter(None, [measured, planned if run.planned_peak_bytes >= 0 else ""])) or units.MISSING


def watching(run: RunStats) -> str:
    """Return the overhead of monitoring per step, and for a long run as percent of the time; `-` if unknown."""
    if math.isnan(run.watch_frac):
        return units.MISSING
    # us, as in torch's profiler: a terminal without Unicode has no micro sign
    per_step = f"{run.watch_us:,.0f} us per step"
    return f"{per_step} ({units.percent(run.watch_frac)})" if run.seconds >= SHORT_S else per_step


def environment(info: RunInfo) -> dict[str, str]:
    """Return model, data, length, optimizer, precision, device and versions of a run, as text by name."""
    numel = sum(math.prod(layer.shape) for layer in info.layers)
    return {
        "run": info.name,
        "created": info.created.replace("T", " ").replace("+00:00", " UTC") or units.MISSING,
        "model": f"{numel:,} parameters in {units.plural(len(info.layers), 'tensor')}",
        "data": _data(info.data) if info.data else units.MISSING,
        "length": _length(info),
        "activation modules": f"{len(info.activations):,}",
        "optimizer": info.optimizer or units.MISSING,
        "precision": info.precision + (", loss scaling" if info.loss_scaling else ""),
        "micro-batches per step": f"{info.accumulate:,}",
        "device": info.device,
        **info.versions,
    }


def start_lines(info: RunInfo, run_dir: Path | None) -> list[str]:
    """Return a description of a training from a config before it starts, in four lines; none for a user's own loop."""
    if info.data is None:
        return []
    known = environment(info)
    how = ", ".join(known[name] for name in ("optimizer", "precision", "device") if known[name] != units.MISSING)
    model = f"{known['model']}, " if info.layers else ""  # without watching, layers are not listed
    lines = {"run": str(run_dir or info.name), "model": model + how, "data": known["data"], "length": known["length"]}
    return [f"{name:8}{text}" for name, text in lines.items()]


def _data(data: DataInfo) -> str:
    what = {
        "classes": f"{data.outputs:,} class{'' if data.outputs == 1 else 'es'}",
        "tokens": f"tokens of a vocabulary of {data.outputs:,}",
        "values": "values" if data.outputs == 1 else f"values, {data.outputs:,} per sample",
    }[data.kind]
    guessed = f" (guessed from {data.guess})" if data.guess else ""
    samples = "a stream" if data.samples is None else f"{data.samples:,} samples"
    held_out = "a stream" if data.held_out is None else f"{data.held_out:,}" if data.held_out else "none"
    return f"{data.name}: {samples} for training, {held_out} for validation; {what}{guessed}"


def _length(info: RunInfo) -> str:
    if not info.total_steps:
        return units.MISSING
    steps = units.plural(info.total_steps, "step")
    if not info.steps_per_epoch:
        return steps
    epochs, rest = divmod(info.total_steps, info.steps_per_epoch)
    each = units.plural(info.steps_per_epoch, "step")
    if rest:
        return f"{steps}, {units.number(info.total_steps / info.steps_per_epoch)} epochs of {each}"
    return f"{units.plural(epochs, 'epoch')} x {each} = {steps}"


def newest(history: History, statistic: str) -> float:
    """Return a statistic of the run at the newest step, or nan before the first step."""
    values_T = history.scalar(statistic, 1)
    return float(values_T[-1]) if len(values_T) else float("nan")


def throughput(history: History) -> tuple[float, float]:
    """Return samples per second and steps per second over the newest window."""
    step_ms_T, per_s_T = history.scalar("step_ms"), history.scalar("samples_per_s")
    known_T = step_ms_T > 0  # nan compares as false
    time_ms = float(step_ms_T[known_T].sum())
    if not time_ms:
        return float("nan"), float("nan")
    samples = float(np.nansum((step_ms_T * per_s_T)[known_T]))
    return samples / time_ms if samples else float("nan"), 1e3 * int(known_T.sum()) / time_ms


def skipped(history: History) -> tuple[int, int]:
    """Return the number of skipped updates in the newest window, and the step of the last one, or -1."""
    skipped_T = np.flatnonzero(history.scalar("skipped") > 0)
    # indexes of the window, not steps
    return len(skipped_T), int(history.run.steps()[skipped_T[-1]]) if len(skipped_T) else -1


def worst_severity(history: History) -> Severity | None:
    """Return the highest severity of the findings, or None if no finding is more severe than info."""
    # a finding of severity info is not a problem: the run stays healthy
    worst = max((f.severity for f in history.findings), default=Severity.INFO)
    return worst if worst > Severity.INFO else None
