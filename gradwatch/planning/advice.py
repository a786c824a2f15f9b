"""Find ways to fit a training into a memory budget: the largest batch, and changes with their price."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from gradwatch.errors import GradwatchError
from gradwatch.planning.checkpointing import KEY, checkpointing_choices
from gradwatch.planning.result import Plan
from gradwatch.planning.training import ConfigPlanner
from gradwatch.records import plain_fields
from gradwatch.render.common.format import plural

MAX_GUESSES = 8
"""Batch sizes to guess by a line before halving, since a peak can move to another phase of the step."""
MAX_BATCH = 1 << 20
"""Largest batch size to plan for a stream, whose length is not known."""
ADAM = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "adamw8bit")
"""Optimizers with two moments for each weight."""
FUSED_KINDS = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch with a kernel for the whole update."""


class Effect(enum.IntEnum):
    """Effects of a change on the trained weights, the smallest first."""

    NONE = 0
    ROUNDING = 1
    TRAINING = 2


EFFECTS = {
    Effect.NONE: "same updates",
    Effect.ROUNDING: "other rounding",
    Effect.TRAINING: "trains differently",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change of the config, with its plan.

    Args:
        name: Short name, such as `optimal`: the cheapest modules to recompute. Joined changes have joined names.
        text: The change in words.
        changes: Settings by dotted key.
        effect: Its effect on the training.
        peak_bytes: Peak of the changed config.
        saved_bytes: Bytes by which the peak falls.
        extra_work: Additional work of a step, relative to its work without the change: the additional time, if the
            device is always busy.
        fits: Whether the changed config fits into the budget.
    """

    name: str
    text: str
    changes: Mapping[str, Any]
    effect: Effect
    peak_bytes: int
    saved_bytes: int
    extra_work: float
    fits: bool

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return plain_fields(self) | {"effect": EFFECTS[self.effect]}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Advised:
    """The advice for a budget.

    Args:
        budget: Bytes that the training may take.
        fits: Whether it fits without a change.
        largest_batch: Largest `data.batch_size` that fits, at most the samples of the data; 0 if none does.
        changes: Changes that save memory: those that fit first, then by effect and cost.
    """

    budget: int
    fits: bool
    largest_batch: int
    changes: tuple[Advice, ...]

    @property
    def cheapest(self) -> Advice | None:
        """The change that fits and costs least, or None if none is needed or none fits."""
        return None if self.fits else next((advice for advice in self.changes if advice.fits), None)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "budget_bytes": self.budget,
            "fits": self.fits,
            "largest_batch": self.largest_batch,
            "changes": [advice.to_json() for advice in self.changes],
        }


@dataclass(frozen=True, slots=True)
class _Change:
    name: str
    text: str
    changes: Mapping[str, Any]
    effect: Effect

    def __add__(self, other: _Change) -> _Change:
        changes = {**self.changes, **other.changes}
        name, text = f"{self.name}+{other.name}", f"{self.text} and {other.text}"
        return _Change(name, text, changes, max(self.effect, other.effect))


@final
class Advisor:
    """Plans changes of a config against a budget.

    Args:
        planner: Plans the config and its variants.
        budget: Bytes that the training may take.
        progress: Called with a description of each plan.
        measured: Measured plan, whose times decide which modules are recomputed; or None.
    """

    def __init__(
        self,
        planner: ConfigPlanner,
        budget: int,
        *,
        progress: Callable[[str], None],
        measured: Plan | None = None,
    ) -> None:
        self._planner, self._budget, self._progress, self._measured = planner, budget, progress, measured
        self._plain = planner.plan()
        self._largest_batch = self._search_batch()

    def advise(self) -> Advised:
        """Return the largest batch, and the changes that save memory."""
        fits = self._plain.peak_bytes <= self._budget
        single = list(self._single())
        found = [advice for change in single if (advice := self._advice(change))]
        if not (fits or any(advice.fits for advice in found)):
            found += [advice for change in self._combined(single) if (advice := self._advice(change))]
        saving = [advice for advice in found if advice.saved_bytes > 0]
        saving.sort(key=lambda a: (not a.fits, a.effect, round(a.extra_work, 3), len(a.changes), a.peak_bytes))
        return Advised(
            budget=self._budget,
            fits=fits,
            largest_batch=self._largest_batch,
            changes=tuple(saving),
        )

    def _single(self) -> Iterator[_Change]:
        if accumulation := self._accumulation({}):
            yield accumulation
        if self._planner.config.train.activation_checkpointing == "none":
            for choice in checkpointing_choices(self._planner, self._budget, rows=self._measured):
                yield _Change(choice.name, choice.text, {KEY: choice.setting}, Effect.NONE)
        if self._planner.has_device_memory and not self._planner.config.train.activation_offloading:
            yield OFFLOADING
        if self._planner.config.train.precision == "fp32":
            yield BF16
        if self._planner.config.optim.name in FUSED_KINDS and "fused" not in self._planner.config.optim.options:
            yield FUSED
        if self._planner.config.optim.name == "AdamW":
            yield EIGHT_BIT
        if self._planner.config.optim.name in ADAM:
            yield SGD

    def _combined(self, single: Sequence[_Change]) -> Iterator[_Change]:
        """Yield combinations of changes that can fit: the smallest effect first, with the fewest micro-batches."""
        base: _Change | None = None
        for change in (c for c in single if c.name == "sqrt" or c in (OFFLOADING, BF16, EIGHT_BIT, SGD)):
            base = base + change if base else change
            if not self._fits({**base.changes, **(self._micro_batches()[-1:] or [{}])[0]}):
                continue
            if base != change:
                yield base
            if accumulation := self._accumulation(base.changes):
                yield base + accumulation

    def _accumulation(self, base: Mapping[str, Any]) -> _Change | None:
        """Return the fewest micro-batches that fit together with some settings, or the most if none fit."""
        choices = self._micro_batches()
        if not base:  # a micro-batch takes no less than a batch of its size
            choices = [c for c in choices if c["data.batch_size"] <= self._largest_batch] or choices[-1:]
        if not choices:
            return None
        best = self._first_that_fits(choices, base)
        # BatchNorm normalizes each micro-batch by itself
        effect = Effect.TRAINING if self._planner.has_batch_norm else Effect.NONE
        size, count = best["data.batch_size"], self._planner.config.data.batch_size // best["data.batch_size"]
        return _Change("accumulate", f"accumulate {count} micro-batches of {plural(size, 'sample')}", best, effect)

    def _micro_batches(self) -> list[dict[str, Any]]:
        """Return the settings of the ways to split a batch evenly, the fewest micro-batches first."""
        size, accumulate = self._planner.config.data.batch_size, self._planner.config.train.accumulate
        counts = (k for k in range(2, size + 1) if size % k == 0)
        return [{"data.batch_size": size // k, "train.accumulate": accumulate * k} for k in counts]

    def _first_that_fits(self, choices: Sequence[dict[str, Any]], base: Mapping[str, Any]) -> dict[str, Any]:
        """Return the first choice that fits with some settings, where later ones save more; the last if none fits."""
        low, high, middle = 0, len(choices) - 1, 0  # the first one fits most often
        while low < high:
            if self._fits({**base, **choices[middle]}):
                high = middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        return choices[low]

    def _search_batch(self) -> int:
        """Return the largest batch size that fits: guess it by the line through the last two peaks, else halve."""
        most = self._planner.samples or MAX_BATCH
        fits, exceeds = 0, most + 1
        known: list[tuple[int, int]] = []
        size = min(self._planner.config.data.batch_size, most)
        while exceeds - fits > 1:
            peak = self._peak({"data.batch_size": size} if size != self._planner.config.data.batch_size else {})
            fits, exceeds = (size, exceeds) if peak <= self._budget else (fits, size)
            known.append((size, peak))
            guess = (fits + exceeds) // 2 if len(known) > MAX_GUESSES else self._on_line(known[-2:])
            size = min(max(guess, fits + 1), exceeds - 1)
        return fits

    def _on_line(self, known: Sequence[tuple[int, int]]) -> int:
        """Return the size at which the line through two sizes and their peaks meets the budget."""
        (before, peak_before), (size, peak) = known[0], known[-1]
        if peak == peak_before:
            return size * 2 if peak <= self._budget else size // 2
        return size + math.floor((self._budget - peak) * (size - before) / (peak - peak_before))

    def _advice(self, change: _Change) -> Advice | None:
        try:
            plan = self._plan(change.changes)
        except GradwatchError:  # the settings do not fit together, such as the options of another optimizer
            return None
        return Advice(
            name=change.name,
            text=change.text,
            changes=change.changes,
            effect=change.effect,
            peak_bytes=plan.peak_bytes,
            saved_bytes=self._plain.peak_bytes - plan.peak_bytes,
            extra_work=plan.work / self._plain.work - 1 if self._plain.work else 0.0,
            fits=plan.peak_bytes <= self._budget,
        )

    def _fits(self, changes: Mapping[str, Any]) -> bool:
        try:
            return self._peak(changes) <= self._budget
        except GradwatchError:
            return False

    def _peak(self, changes: Mapping[str, Any]) -> int:
        return self._plan(changes).peak_bytes

    def _plan(self, changes: Mapping[str, Any]) -> Plan:
        self._progress("planning " + ", ".join(f"{key}={value}" for key, value in changes.items()))
        return self._planner.plan(changes)


OFFLOADING = _Change(
    "offload", "keep saved activations in host memory", {"train.activation_offloading": True}, Effect.NONE
)
BF16 = _Change("bf16", "run the passes in bf16", {"train.precision": "bf16"}, Effect.ROUNDING)
FUSED = _Change("fused", "fuse the update, which then has no temporaries", {"optim.fused": True}, Effect.ROUNDING)
EIGHT_BIT = _Change("adamw8bit", "keep the moments of AdamW in 8 bits", {"optim.name": "adamw8bit"}, Effect.ROUNDING)
SGD = _Change(
    "sgd",
    "take SGD, with one moment for each weight; tune its rate",
    {"optim.name": "sgd", "optim.momentum": 0.9},
    Effect.TRAINING,
)
