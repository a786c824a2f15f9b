"""GW501: the same batch arrives at every step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import BATCH_ALIKE, INPUTS_ALIKE, TENSOR_HELD
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.synthetic.edit import with_statistic
from gradwatch.history.table import Floats
from gradwatch.records import Event, Finding, Quantity, Severity

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
    that is far nearer than two samples of a batch are to each other, they are the same, in another order or with noise;
    and so if that holds of the numbers in them, sorted, which flips, turns and rolls leave as they are. Where no
    batches are handed over, (3) looks at what a model is given in training, or the parts of it that a loop calls.

    Why it matters: the model learns this one batch by heart; the loss falls beautifully and means nothing.

    When it is wrong: full-batch training, where the batch is all there is, and the deliberate check that a model can
    overfit one batch. Batch sizes are chosen and sizes of data sets are not: more than `chosen` samples that are no
    multiple of 64 are taken for all the data, as are 34 or 178 and other numbers that are not round, and so is any
    batch that L-BFGS gets, whose line searches want the same function at every step (info), unless other batches came
    before. For (2), and for (3) where the samples are not equal or the tensor is the same one, only powers of two and
    numbers such as 24 or 96 count as chosen. Reinforcement learning goes over what it has collected many times: a
    tensor that is handed over again has to come `held` or `longest` times, and a batch behind others twice as often as
    each of them. Augmentation that is not small, or comes after the batch was handed over, is not seen.

    What to do: look for `next(iter(loader))` inside the loop, a generator that is seeded in every step, a sampler or
    stream that is created again each time, or an index that is never advanced.

    Source: pytorch/pytorch#1917, `next(iter(loader))`, https://github.com/pytorch/pytorch/issues/1917.

    Args:
        every: Steps between two looks. 5: the first one may be long enough.
        repeats: Equal batches in a row at which to report. 6: an oversampled or repeated batch (repeated
            augmentation, several updates per batch in reinforcement learning: 3 to 5) is no fault.
        turns: Steps that two batches must come in turn. 40: updates on the two halves of what a policy has collected
            take turns for 3 to 30 epochs of two steps in reinforcement learning, mostly 10.
        held: Steps that the very same tensor must come. 12: policies are mostly updated for 10 epochs.
        longest: The same, of more than `chosen` samples. 85: at most they are for 80, on all that was collected.
        chosen: Samples up to which a batch of any size counts as chosen. 256: few data sets are smaller.
    """

    code: ClassVar[str] = "GW501"
    kind: ClassVar[str] = "constant-batch"
    every: int = 5
    repeats: int = 6
    turns: int = 40
    held: int = 12
    longest: int = 85
    chosen: int = 256

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run."""
        yield from self._of_samples(history)
        hash_T = history.scalar("batch_hash")
        if len(hash_T) < self.repeats or not (hash_T[-3:-1] == hash_T[-1]).any():  # nan equals nothing
            return
        if (hash_T[-self.repeats :] == hash_T[-1]).all():
            yield from self._of_repeats(history, hash_T)
        elif self._is_alternating(hash_T) and self._is_chosen(history, _samples(history)):
            evidence = Quantity(
                key="batch.alternating_steps",
                label="steps in which two batches came in turn",
                value=float(self.turns),
                unit="steps",
            )
            yield self._finding(history, f"two batches came in turn for {self.turns} steps", evidence)

    def _is_alternating(self, hash_T: Floats) -> bool:
        """Return whether each batch of the last steps is the one two steps before."""
        return len(hash_T) >= self.turns and bool((hash_T[2 - self.turns :] == hash_T[-self.turns : -2]).all())

    def _of_samples(self, history: History) -> Iterator[Finding]:
        """Yield a finding for samples that come again and again, in another order or with noise."""
        is_handed_over = not math.isnan(history.run.newest("batch_hash")[0])
        for event in (*events_of(history, BATCH_ALIKE), *(() if is_handed_over else events_of(history, INPUTS_ALIKE))):
            distance = Quantity(
                key="batch.nearest_distance",
                label="distance to the nearest, median",
                value=event.values["distance"],
                unit="of usual",
            )
            text = f"the samples of the first {event.step + 1} steps are the same, in another order or with noise"
            yield self._finding(history, text, distance, is_chosen=self._is_alike(history, event.values))

    def _of_repeats(self, history: History, hash_T: NDArray[np.floating]) -> Iterator[Finding]:
        """Yield a finding for a batch that came as often as no other before, and as no policy is updated on."""
        runs = _runs(hash_T)
        has_moved = len(runs) > 1
        samples = _samples(history)
        if has_moved:
            least = max(self.repeats, 2 * int(runs[:-1].max()))
        elif any(events_of(history, TENSOR_HELD)):
            least = self.longest if samples > self.chosen else self.held
        else:
            least = self.repeats
        if runs[-1] < least:
            return
        evidence = Quantity(
            key="batch.equal_run", label="equal batches in a row, at least", value=float(least), unit="steps"
        )
        text = f"the same batch came in each of the last {least} steps"
        is_chosen = has_moved or not self._is_all_there_is(history, samples)
        yield self._finding(history, text, evidence, is_chosen=is_chosen)

    def _is_alike(self, history: History, values: Mapping[str, float]) -> bool:
        """Return whether repeated samples look chosen: mostly if equal ones are created again."""
        if values.get("exact", 0.0) > values.get("held", 0.0):
            return not self._is_all_there_is(history, values["samples"])
        return self._is_chosen(history, values["samples"])

    def _finding(self, history: History, message: str, *evidence: Quantity, is_chosen: bool = True) -> Finding:
        return finding_of(
            self,
            history,
            message,
            *evidence,
            severity=Severity.WARNING if is_chosen else Severity.INFO,
        )

    def _is_chosen(self, history: History, samples: float) -> bool:
        """Say whether so many samples are what batches have and data sets have not: a power of two, or 24, 48, 96."""
        if history.info.optimizer == LBFGS or not samples <= self.chosen:  # nan, unknown, is not less
            return False
        number = round(samples)
        return number.bit_count() == 1 or (number % 8 == 0 and number % 10 > 0)

    def _is_all_there_is(self, history: History, samples: float) -> bool:
        """Say whether the batch has the size of a data set, or is what the optimizer needs, rather than chosen."""
        if history.info.optimizer == LBFGS:
            return True
        if math.isnan(samples):
            return False
        return not _is_usual(round(samples)) or (samples > self.chosen and round(samples) % 64 > 0)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        stuck = Synthetic(steps=40)
        stuck.batch_hash_T[:] = stuck.batch_hash_T[0]
        yield Example("an iterator is created again at every step", stuck.history(), (None,))
        halted = Synthetic(steps=40)
        halted.batch_hash_T[20:] = halted.batch_hash_T[20]
        yield Example("a loader stops in the middle of a run", halted.history(), (None,))
        epochs = Synthetic(steps=200)
        epochs.batch_hash_T = epochs.batch_hash_T[epochs.t_T // 80]
        yield Example("eighty updates on each of three collections", _held(epochs.history(), 4000))
        collected = Synthetic(steps=11)
        collected.batch_hash_T[:] = collected.batch_hash_T[0]
        yield Example("the first of many collections", _held(collected.history(), 128))
        outer = Synthetic(steps=16)
        outer.batch_hash_T[:] = outer.batch_hash_T[0]
        yield Example("a batch that is drawn above the loop", _held(outer.history(), 128), (None,))
        searched = Synthetic(steps=40)
        searched.info = replace(searched.info, optimizer="LBFGS")
        searched.batch_hash_T[:] = searched.batch_hash_T[0]
        yield Example("L-BFGS gets all data at every step: for information", searched.history(), (None,))
        yield Example("two batches in turn", _in_turn(2), (None,))
        yield Example("an epoch of three batches that nobody shuffles", _in_turn(3))
        yield Example("two batches that are all the data", _in_turn(2, samples=75))
        values = {"distance": 0.1, "samples": 32.0}
        alike = Synthetic(steps=40).note(BATCH_ALIKE, step=30, text="the same samples", values=values)
        yield Example("the same samples, with noise", alike.history(), (None,))
        made = Synthetic(steps=40).note(
            INPUTS_ALIKE, step=10, text="the same", values={**values, "samples": 40, "exact": 1}
        )
        made.batch_hash_T[:] = float("nan")
        yield Example("forty states of an environment that is seeded again", made.history(), (None,))
        given = Synthetic(steps=40).note(INPUTS_ALIKE, step=30, text="the same samples", values=values)
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


def _held(history: History, samples: int) -> History:
    """Return the run with batches of so many samples, of which the loop handed the first over twice."""
    history.note(Event(kind=TENSOR_HELD.name, step=1))
    return _sized(history, samples)


def _sized(history: History, samples: int) -> History:
    """Return the run with batches of so many samples."""
    history = with_statistic(history, "step_ms", 1.0, missing=True)
    return with_statistic(history, "samples_per_s", 1e3 * samples, missing=True)


def _samples(history: History) -> float:
    """Return the size of the newest batch, nan where it is not known."""
    return float(history.run.newest("samples_per_s")[0] * history.run.newest("step_ms")[0]) / 1e3


def _runs(hash_T: NDArray[np.floating]) -> NDArray[np.integer]:
    """Return how often in a row each batch came, the first as far as the window shows."""
    begins = np.flatnonzero(hash_T[1:] != hash_T[:-1]) + 1
    return np.diff(np.concatenate([[0], begins, [len(hash_T)]]))
