"""Find runs in which the same batch arrives at every step (GW501)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example, Recovery
from gradwatch.detect.data_and_loss.constant_batch_rules.alike_samples import (
    find_alike_samples,
    find_copied_samples,
    find_equal_labels,
    find_equal_samples,
)
from gradwatch.detect.data_and_loss.constant_batch_rules.batch_origin import LBFGS
from gradwatch.detect.data_and_loss.constant_batch_rules.examples import make_alike, make_batches
from gradwatch.detect.data_and_loss.constant_batch_rules.repeated_batch import find_repeated_batch
from gradwatch.detect.data_and_loss.constant_batch_rules.repeated_draws import find_repeated_draws
from gradwatch.detect.data_and_loss.constant_batch_rules.worker_copies import find_worker_copies
from gradwatch.detect.features.finding import Sign, findings_of
from gradwatch.events import (
    BATCH_ALIKE,
    DRAWS_REPEATED,
    INPUTS_ALIKE,
    LABELS_EQUAL,
    PART_BATCH,
    SAMPLES_EQUAL,
    TENSOR_HELD,
)
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding

EQUAL_RUN = "batch.equal_run"
"""Evidence of equal batches, as opposed to alike samples, which only the first steps compare."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantBatch:
    """The same batch at every step.

    What it measures: a hash of the inputs of each step, the distances between the samples of the first steps, and the
    seeds of steps.

    Why it matters: the model memorizes one batch. The loss falls quickly and means nothing.

    Example: `batch = next(iter(loader))` inside the loop.

    What to do: create the iterator once, before the loop, and draw a batch from it at each step. Do not seed a
    generator or create a sampler in every step. Check that the index advances.

    When it is wrong: a deliberate test that the model overfits one batch. Augmentation after the batch was passed to
    `monitor.step` is not seen.

    When it is withdrawn: `others` different batches arrived after a finding of (1). (2) to (6) are never withdrawn.

    How it is detected: (1) The same hash comes many times in a row. (2) The samples of steps 0, 1, 8, 10, 20 and 30 are
    the same, in another order or with noise: each is far nearer to one in the first batch than two samples of a batch
    are to each other. If the loop passes no batches, (2) reads the inputs of the model instead. If all samples of a
    batch are equal, too, the inputs have no content. (3) All labels of the first sampled steps are one of three or more
    classes. (4) All samples of each of those batches are the same, while the batches differ, as memories of an
    environment do that are all the same array. (5) Each batch comes as often in a row as a DataLoader has workers,
    every time as another tensor. (6) Each of 16 steps in a row calls `torch.manual_seed` with the same seed and then
    draws random numbers, such as indices, noise or the masks of dropout. Full-batch training is not a mistake, so (1)
    and (2) are warnings only if there is more data: other batches came before; a DataLoader gives several batches of
    this size; a batch that is made at each step is in a larger tensor; or it is made at each step, and the loop keeps
    nothing of its length. Otherwise they are info, as with L-BFGS, which needs the same batch at every step, and with
    points at which a differential equation must hold: the loss has derivatives by up to `coordinates` numbers.
    Reinforcement learning goes over a collection many times: a tensor that is passed again must come `held` or
    `longest` times, and a batch after others `again` times as often as each. New samples next to copies of others come
    from a replay buffer that fills.

    Source: pytorch/pytorch#1917, `next(iter(loader))`, https://github.com/pytorch/pytorch/issues/1917.

    Args:
        every: Steps between two calls. 5: the first call may already see enough batches.
        repeats: Equal batches in a row at which to report. 6: repeated augmentation, and several updates per batch in
            reinforcement learning, use a batch 3 to 5 times.
        held: Steps that the very same tensor must come if there are more data. 12: policies are mostly updated for 10
            epochs.
        longest: Steps that it must come if it may be all the data. 85: policies are updated at most 80 times on
            everything that was collected.
        again: Equal batches in a row, in units of the longest such row of an earlier batch. 2: a loop that makes
            several updates per batch makes as many with each.
        coordinates: Numbers of a sample up to which it may be a point at which an equation holds. 4: space and time.
        copies: Batches in a row that must each come once from each worker, for (5). 4: no shuffling gives that.
        others: Different batches after a finding that withdraw it. 4: a single other batch does not end it.
    """

    code: ClassVar[str] = "GW501"
    kind: ClassVar[str] = "constant-batch"
    every: int = 5
    repeats: int = 6
    held: int = 12
    longest: int = 85
    again: int = 2
    coordinates: int = 4
    copies: int = 4
    others: int = 4

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run."""
        yield from findings_of(self, history, self._signs(history))

    def _signs(self, history: History) -> Iterator[Sign | None]:
        """Yield the observation of each mechanism, in a fixed order."""
        yield from find_repeated_draws(history)
        equal = list(find_equal_samples(history))
        yield from equal
        if equal:
            return
        yield from find_copied_samples(history)
        yield from find_worker_copies(history, batches=self.copies)
        yield from find_equal_labels(history)
        # alike samples of the first steps mean no more than the equal batches that other batches have followed
        if not any(finding.kind == self.kind for finding in history.withdrawn):
            yield from find_alike_samples(history, coordinates=self.coordinates)
        newest_T = history.scalar("batch_hash", 2)
        if (newest_T[:-1] == newest_T[-1]).any():  # cheap, and necessary; nan equals nothing
            yield find_repeated_batch(
                history,
                repeats=self.repeats,
                held=self.held,
                longest=self.longest,
                again=self.again,
                coordinates=self.coordinates,
            )

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the step of the first batch that differs from the repeated ones, if enough others came after it."""
        if all(q.key != EQUAL_RUN for q in finding.evidence):
            return None
        hash_T, is_later_T = history.scalar("batch_hash"), history.run.steps() > finding.step
        is_new_T = is_later_T & ~np.isnan(hash_T) & ~np.isin(hash_T, hash_T[~is_later_T][-1:])
        if len(np.unique(hash_T[is_new_T])) < self.others:
            return None
        return Recovery(int(history.run.steps()[is_new_T][0]), "other batches arrived")

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("an iterator is created again at every step", make_batches([0] * 40, PART_BATCH), (None,))
        yield Example("a loader stops in the middle of a run", make_batches(np.arange(40).clip(max=20)), (None,))
        yield Example("eighty updates on each of three collections", make_batches(np.arange(200) // 80, TENSOR_HELD))
        yield Example("the first of many collections", make_batches([0] * 11, TENSOR_HELD, PART_BATCH))
        above = make_batches([0] * 16, TENSOR_HELD, PART_BATCH)
        yield Example("a batch that is drawn from a DataLoader before the loop", above, (None,))
        drawn = Synthetic(steps=40).add_event(DRAWS_REPEATED, text="drew the same", values={"steps": 16.0})
        yield Example("each step seeds the generators alike", drawn.history(), (None,))
        table = make_batches([0] * 100, TENSOR_HELD)
        yield Example("a table at every step: for information", table, (None,))
        yield Example("one batch, and nothing shows more data: for information", make_batches([0] * 40), (None,))
        points = make_batches([0] * 40, PART_BATCH, width=2)
        yield Example("points at which an equation must hold: for information", points, (None,))
        images = make_batches([0] * 40, PART_BATCH, width=28)
        yield Example("a penalty on the gradient by images", images, (None,))
        searched = make_batches([0] * 40, PART_BATCH, optimizer=LBFGS)
        yield Example("L-BFGS gets the same batch at every step: for information", searched, (None,))
        yield Example("an epoch of three batches that is not shuffled", make_batches(np.arange(60) % 3))
        yield Example("the same samples, with noise", make_alike(BATCH_ALIKE, part=1), (None,))
        yield Example("all the data in another order: for information", make_alike(BATCH_ALIKE), (None,))
        yield Example("all images are black", make_alike(BATCH_ALIKE, equal=1), (None,))
        copied = Synthetic(steps=40).add_event(SAMPLES_EQUAL, step=30, values={"samples": 64, "batches": 6})
        yield Example("memories that are all the same array", copied.history(), (None,))
        copied_T = np.arange(40) // 2
        yield Example("two workers go through the same stream", make_batches(copied_T, workers=2), (None,))
        yield Example("two updates per batch of two workers", make_batches(copied_T, TENSOR_HELD, workers=2))
        yield Example("two updates per batch of four workers", make_batches(copied_T, workers=4))
        one = Synthetic(steps=120).add_event(LABELS_EQUAL, step=80, text="all are class 0", values={"labels": 512})
        yield Example("all labels are 0", one.history(), (None,))
        seeded = make_alike(INPUTS_ALIKE, step=10, is_handed_over=False, part=1)
        yield Example("forty states of an environment that is seeded again", seeded, (None,))
        yield Example("the model gets the same samples, and the loop passes others", make_alike(INPUTS_ALIKE, part=1))
        given = make_alike(INPUTS_ALIKE, is_handed_over=False, part=1)
        yield Example("the model gets the same samples, and the loop passes none", given, (None,))
        yield Example("a healthy run", Synthetic(steps=40).history())
        yield Example("four updates per batch", make_batches(np.arange(40) // 4))
        unknown = Synthetic(steps=40)
        unknown.batch_hash_T[:] = np.nan
        yield Example("the loop passes no batches", unknown.history())
