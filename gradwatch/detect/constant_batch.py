"""GW501: the same batch arrives at every step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect._edited import edited
from gradwatch.detect._finding import finding_of
from gradwatch.detect._noted import noted
from gradwatch.history.ahead import Ahead
from gradwatch.history.store import History
from gradwatch.history.synthetic import Synthetic
from gradwatch.records import Finding, Quantity, Severity

ALIKE = "batch-alike"
"""Event of samples that come again and again, in another order or with noise."""

INPUTS = "inputs-alike"
"""Event of a model that is given the same samples, where nobody hands the batches over."""

FEW = 12
"""Samples up to which any number is chosen."""

LBFGS = "LBFGS"
"""The optimizer that wants the same function at every step."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantBatch:
    """The same batch, step after step.

    What it measures: three things. (1) The 48-bit hash of each step's inputs. Two different batches share one with a
    chance of 2^-48; a window of equal ones is the same batch. (2) Two hashes in turn, for `turns` steps. (3) The
    samples of steps 0, 1, 8, 10, 20 and 30, batches of at most 256 on the CPU: where each has one in the first batch
    that is far nearer than two samples of a batch are to each other, they are the same, in another order or with noise.
    Where no batches are handed over, (3) looks at what a single model is given in training.

    Why it matters: the model learns this one batch by heart; the loss falls beautifully and means nothing.

    When it is wrong: full-batch training, where the batch is all there is, and the deliberate check that a model can
    overfit one batch. Batch sizes are chosen and sizes of data sets are not: more than `chosen` samples that are no
    power of two are taken for all the data, as are 34 or 178 and other numbers that are not round, and so is any batch
    that L-BFGS gets, whose line searches want the same function at every step (info), unless other batches came before.
    For (2) and (3) only a power of two counts as chosen. Random augmentation that is not small, or comes after the
    batch was handed over, is not seen.

    What to do: look for `next(iter(loader))` inside the loop, a generator that is seeded in every step, a sampler or
    stream that is made anew each time, or an index that is never advanced.

    Source: pytorch/pytorch#1917, `next(iter(loader))`, https://github.com/pytorch/pytorch/issues/1917.

    Args:
        every: Steps between two looks. 5: the first one may be long enough.
        repeats: Equal batches in a row at which to report. 6: an oversampled or repeated batch (repeated
            augmentation, several updates per batch in reinforcement learning: 3 to 5) is no fault.
        turns: Steps that two batches must come in turn. 40: updates on the two halves of what a policy has collected
            take turns for 3 to 30 epochs of two steps in reinforcement learning, mostly 10.
        chosen: Samples up to which a batch of any size counts as chosen. 256: few data sets are smaller.
    """

    code: ClassVar[str] = "GW501"
    kind: ClassVar[str] = "constant-batch"
    every: int = 5
    repeats: int = 6
    turns: int = 40
    chosen: int = 256

    def rules_out(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say at which steps the batch is neither the one before nor the one before that."""
        hash_DW = ahead.scalars("batch_hash", 3)
        is_alike_D = (hash_DW[:, 2:] == hash_DW[:, :2]).any(axis=1)
        is_noted = any(event.kind in (ALIKE, INPUTS) for event in ahead.history.events)
        return np.asarray(~is_alike_D & (not is_noted and self.repeats > 1 and self.turns > 2), np.bool_)

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run."""
        is_unknown = bool(np.isnan(history.scalar("batch_hash", 1)).all())
        for event in (*noted(history, ALIKE), *(noted(history, INPUTS) if is_unknown else ())):
            distance = Quantity(name="distance to the nearest, median", value=event.values["distance"], unit="of usual")
            text = f"the samples of the first {event.step + 1} steps are the same, in another order or with noise"
            yield self._finding(history, text, distance, is_chosen=self._is_chosen(history, event.values["samples"]))
        hash_T = history.scalar("batch_hash", self.turns)
        if len(hash_T) < self.repeats:
            return
        if (hash_T[-self.repeats :] == hash_T[-1]).all():  # nan equals nothing
            evidence = Quantity(name="equal batches in a row, at least", value=float(self.repeats), unit="steps")
            text = f"the same batch came in each of the last {self.repeats} steps"
            is_chosen = not self._is_all_there_is(history) or _has_moved(history)
            yield self._finding(history, text, evidence, is_chosen=is_chosen)
        elif (
            len(hash_T) == self.turns
            and (hash_T[2:] == hash_T[:-2]).all()
            and self._is_chosen(history, _samples(history))
        ):
            evidence = Quantity(name="steps in which two batches came in turn", value=float(self.turns), unit="steps")
            yield self._finding(history, f"two batches came in turn for {self.turns} steps", evidence)

    def _finding(self, history: History, message: str, *evidence: Quantity, is_chosen: bool = True) -> Finding:
        return finding_of(
            self,
            history,
            message,
            *evidence,
            severity=Severity.WARNING if is_chosen else Severity.INFO,
        )

    def _is_chosen(self, history: History, samples: float) -> bool:
        """Say whether so many samples are a power of two, as sizes are that somebody chose."""
        return (
            history.info.optimizer != LBFGS and samples <= self.chosen and round(samples).bit_count() == 1
        )  # nan, unknown, is not less

    def _is_all_there_is(self, history: History) -> bool:
        """Say whether the batch has the size of a data set, or is what the optimizer needs, rather than chosen."""
        if history.info.optimizer == LBFGS:
            return True
        samples = _samples(history)
        if math.isnan(samples):
            return False
        return not _is_usual(round(samples)) or (samples > self.chosen and round(samples).bit_count() != 1)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        stuck = Synthetic(steps=40)
        stuck.batch_hash_T[:] = stuck.batch_hash_T[0]
        yield Example("an iterator is made anew at every step", stuck.history(), (None,))
        halted = Synthetic(steps=40)
        halted.batch_hash_T[20:] = halted.batch_hash_T[20]
        yield Example("a loader stops in the middle of a run", halted.history(), (None,))
        searched = Synthetic(steps=40)
        searched.info = replace(searched.info, optimizer="LBFGS")
        searched.batch_hash_T[:] = searched.batch_hash_T[0]
        yield Example("L-BFGS gets all data at every step: for information", searched.history(), (None,))
        yield Example("two batches in turn", _in_turn(2), (None,))
        yield Example("an epoch of three batches that nobody shuffles", _in_turn(3))
        yield Example("two batches that are all the data", _in_turn(2, samples=75))
        values = {"distance": 0.1, "samples": 32.0}
        alike = Synthetic(steps=40).note(ALIKE, step=30, text="the same samples", values=values)
        yield Example("the same samples, with noise", alike.history(), (None,))
        given = Synthetic(steps=40).note(INPUTS, step=30, text="the same samples", values=values)
        yield Example("others are handed over than the model is given", given.history())
        given.batch_hash_T[:] = float("nan")
        yield Example("the model is given the same, and nobody hands it over", given.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=40).history())
        repeated = Synthetic(steps=40)
        repeated.batch_hash_T = repeated.batch_hash_T[repeated.t_T // 4]
        yield Example("four updates per batch", repeated.history())
        graph = Synthetic(steps=40)
        graph.batch_hash_T[:] = graph.batch_hash_T[0]
        yield Example("a graph of 34 nodes at every step: for information", _sized(graph.history(), 34), (None,))
        unknown = Synthetic(steps=40)
        unknown.batch_hash_T[:] = float("nan")
        yield Example("nobody hands over the batches", unknown.history())


def _is_usual(samples: int) -> bool:
    """Say whether somebody may have chosen so many samples: few, or a round number of them."""
    return samples <= FEW or any(samples % number == 0 for number in (8, 10, 25))


def _in_turn(batches: int, *, samples: int = 32) -> History:
    """Return a run of so many batches over and over."""
    made = Synthetic(steps=60)
    made.batch_hash_T = made.batch_hash_T[made.t_T % batches]
    return _sized(made.history(), samples)


def _sized(history: History, samples: int) -> History:
    """Return the run with batches of so many samples."""
    history = edited(history, "step_ms", 1.0, missing=True)
    return edited(history, "samples_per_s", 1e3 * samples, missing=True)


def _samples(history: History) -> float:
    """Return the size of the newest batch, nan where it is not known."""
    return float(history.run.newest("samples_per_s")[0] * history.run.newest("step_ms")[0]) / 1e3


def _has_moved(history: History) -> bool:
    """Say whether another batch came within the window: then this one is not all the data."""
    hash_T = history.scalar("batch_hash")
    return bool((hash_T < hash_T[-1]).any() or (hash_T > hash_T[-1]).any())
