"""Build the remedies that change a learning rate; they change the base rates of the config, never effective rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from gradwatch.diagnose.case import Case
from gradwatch.diagnose.own_code import rate_code
from gradwatch.records import Remedy

BASE_RATES = {"OneCycleLR": ("schedule.max_lr",), "CyclicLR": ("schedule.base_lr", "schedule.max_lr")}
"""Settings that schedules take their rates from instead of `optim.lr`."""

USUAL_RATIO = 1e-3
"""Update/weight ratio of most trainings (https://cs231n.github.io/neural-networks-3/#ratio)."""

LARGEST_RATIO = 2e-2
"""Largest update/weight ratio of Adam at a usual rate, which its first updates have: 0.01 to 0.1 in 15 kinds of
trainings, with a median of 0.02. `scripts/studies/suggested_rates.py` compares the rates that it leads to."""

MAX_FACTOR = 1e3
"""Largest factor for a single proposed change of a rate, or its inverse."""

ROUNDING = 1e-9
"""Added to logarithms, so that 0.1 is the power -1 of ten and not less."""

SCHEDULED = 3.0
"""Ratio of the rate at a finding to the base rate, or its inverse, beyond which the schedule is to blame."""

WARMUP_FRAC = 0.05
"""Fraction of the run to propose for a warm-up that does not end in time."""


def lower_rate(case: Case) -> Remedy | None:
    """Return the remedy that lowers the learning rate, or None after a jump: the rate before the jump was right."""
    if case.numbers.jumped_at is not None or not case.numbers.steady_rate > 0:
        return None
    return _changed_schedule(case, is_low=False) or _scale(case, _lower_factor(case), "lower")


def raise_rate(case: Case) -> Remedy | None:
    """Return the remedy that raises the learning rate towards the usual update, or changes the schedule."""
    numbers = case.numbers
    if changed := _changed_schedule(case, is_low=True):
        return changed
    if not (numbers.steady_rate > 0 and numbers.update_ratio > 0):
        return Remedy(text="raise the learning rate by factors of 10 until the update/weight ratio is near 1e-3")
    return _scale(case, _raise_factor(numbers.update_ratio), "raise")


def _lower_factor(case: Case) -> float:
    largest = case.numbers.largest_ratio
    if not (case.ignores_scale and largest > 0):
        # curvature limits the update of SGD, and no statistic shows it: lower the rate tenfold at a time
        return 0.1
    return rounded(min(max(LARGEST_RATIO / largest, 1 / MAX_FACTOR), 0.1))


def _raise_factor(ratio: float) -> float:
    """Return the power of ten that brings an update/weight ratio nearest below the usual one."""
    return float(10.0 ** math.floor(math.log10(min(max(USUAL_RATIO / ratio, 10.0), MAX_FACTOR)) + ROUNDING))


def drop_jump(case: Case) -> Remedy | None:
    """Return the remedy that keeps the rate where it was before it jumped."""
    numbers = case.numbers
    if numbers.jumped_at is None:
        return None
    text = f"keep the learning rate at {numbers.steady_rate:g}: remove the jump at step {numbers.jumped_at:,}"
    if case.is_own_loop:
        return Remedy(text=text)
    patch: dict[str, Any] = {"schedule": None}  # in a training from a config, only a schedule can raise the rate
    if not math.isclose(_number(case, "optim.lr"), numbers.steady_rate, rel_tol=1e-3):
        patch["optim.lr"] = rounded(numbers.steady_rate)
    return Remedy(text=text, patch=patch)


def rounded(value: float) -> float:
    """Return a number rounded to one significant digit, as a person would write it."""
    return float(f"{Decimal(value):.0e}") if value > 0 and math.isfinite(value) else value


def _scale(case: Case, factor: float, verb: str) -> Remedy | None:
    """Return a remedy that multiplies the base rates by a factor."""
    if case.is_own_loop:
        if not math.isclose(case.numbers.first_rate, case.numbers.rate, rel_tol=1e-3):
            # a scheduler multiplies a base rate that this history does not show
            return Remedy(text=f"multiply the base learning rate of your scheduler by {factor:g}")
        rate = rounded(case.numbers.rate * factor)
        return Remedy(text=f"{verb} the learning rate to {rate:g}", code=rate_code(rate))
    patch: dict[str, Any] = {
        key: rounded(_number(case, key) * factor) for key in _base_rates(case) if _number(case, key) > 0
    }
    if not patch:
        return Remedy(text=f"multiply the learning rate by {factor:g}")
    groups = case.settings.get("optim.groups") or []
    if "optim.lr" in patch and any("lr" in group for group in groups):  # such groups ignore `optim.lr`
        scaled = [group | {"lr": rounded(group["lr"] * factor)} if "lr" in group else group for group in groups]
        patch["optim.groups"] = scaled
    changes = [
        f"{key} from {_number(case, key):g} to {value:g}" for key, value in patch.items() if key in _base_rates(case)
    ]
    return Remedy(text=f"{verb} {' and '.join(changes)}", patch=patch)


def _changed_schedule(case: Case, *, is_low: bool) -> Remedy | None:
    """Return the change of a schedule that holds the rate far below its base or drives it far above, or None."""
    numbers, base = case.numbers, max((_number(case, key) for key in _base_rates(case)), default=math.nan)
    is_rising = numbers.rate > numbers.first_rate
    if case.is_own_loop:  # the base is unknown: take the rate from which the rise or the decay began
        base = numbers.first_rate if is_rising else numbers.steady_rate
        is_far = numbers.rate > base * SCHEDULED or numbers.rate < base / SCHEDULED
    else:
        is_far = numbers.rate < base / SCHEDULED if is_low else numbers.rate > base * SCHEDULED
    if not is_far or not (is_low or is_rising):
        return None
    if is_low and is_rising and not case.is_own_loop and (shorter := _shorter_warmup(case)):
        return shorter
    total = f" of {case.info.total_steps:,}" if case.info.total_steps else ""
    name = case.settings.get("schedule.name") or case.settings.get("schedule.target") or "your scheduler"
    text = f"at step {case.step:,}{total}, {name} has {'raised' if is_rising else 'lowered'} the learning rate from "
    text += f"{numbers.first_rate:.1g} to {numbers.rate:.1g}: "
    if case.is_own_loop:
        change = "shorten its warm-up" if is_rising else "let it fall more slowly, such as once per epoch"
        return Remedy(text=text + (change if is_low else "limit the rise"))
    patch: dict[str, Any] = {"schedule": None}
    if "optim.lr" not in _base_rates(case):  # the schedule replaces `optim.lr`: keep the rate of the schedule
        patch["optim.lr"] = base
    return Remedy(text=f"{text}train without it, at a constant {base:g}", patch=patch)


def _shorter_warmup(case: Case) -> Remedy | None:
    """Return a shorter warm-up for a finding within the config's warm-up, or None after the warm-up."""
    warmup, total = int(_number(case, "schedule.warmup_steps", missing=0)), case.info.total_steps
    unit, length, now = "step", total, case.step
    if case.settings.get("schedule.per") == "epoch" and total and (epochs := case.settings.get("train.epochs")):
        unit, length, now = "epoch", int(epochs), int(case.step * epochs / total)
    if not now < warmup:
        return None
    run = f" in a run of {length:,} {unit}s" if length else ""
    text = f"{unit} {now:,} of a warm-up of {warmup:,}{run}"
    shorter = int(WARMUP_FRAC * length) if length else 0
    if shorter >= warmup:
        return Remedy(text=f"{text}: wait until the warm-up ends")
    change = f"set schedule.warmup_steps to {shorter:,}"
    if length and warmup <= length / 2:  # a usual warm-up: the full rate has not been tried yet
        change = f"wait until the warm-up ends, or {change}"
    return Remedy(text=f"{text}: {change}", patch={"schedule.warmup_steps": shorter})


def _base_rates(case: Case) -> Sequence[str]:
    """Return the settings with the rates that the schedule multiplies or cycles through."""
    return BASE_RATES.get(str(case.settings.get("schedule.name")), ("optim.lr",))


def _number(case: Case, key: str, *, missing: float = math.nan) -> float:
    value = case.settings.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else missing
