"""GW501: the same batch arrives at every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

from gradwatch.detect import Example
from gradwatch.history.store import History
from gradwatch.history.synthetic import Synthetic
from gradwatch.records import Finding, Quantity, Severity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantBatch:
    """The same batch, step after step.

    What it measures: the 48-bit hash of each step's inputs. Two different batches share one with a chance of
    2^-48; a window of equal ones is the same batch.

    Why it matters: the model learns this one batch by heart; the loss falls beautifully and means nothing.

    When it is wrong: full-batch training, where the batch is all there is, and the deliberate check that a model can
    overfit one batch. Batch sizes are chosen and sizes of data sets are not: more than `chosen` samples that are no
    power of two are taken for all the data, and so is any batch that L-BFGS gets, whose line searches want the same
    function at every step (info), unless other batches came before. Random augmentation after the hash is taken is not
    seen.

    What to do: look for `next(iter(loader))` inside the loop, a generator that is seeded in every step, a sampler or
    stream that is made anew each time, or an index that is never advanced.

    Source: pytorch/pytorch#1917, `next(iter(loader))`, https://github.com/pytorch/pytorch/issues/1917.

    Args:
        every: Steps between two looks. 5: the first one may be long enough.
        repeats: Equal batches in a row at which to report. 6: an oversampled or repeated batch (repeated
            augmentation, several updates per batch in reinforcement learning: 3 to 5) is no fault.
        chosen: Samples up to which a batch of any size counts as chosen. 256: few data sets are smaller.
    """

    code: ClassVar[str] = "GW501"
    kind: ClassVar[str] = "constant-batch"
    every: int = 5
    repeats: int = 6
    chosen: int = 256

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run."""
        hash_T = history.scalar("batch_hash", self.repeats)
        if len(hash_T) < self.repeats or not (hash_T == hash_T[-1]).all():  # nan equals nothing
            return
        yield Finding(
            code=self.code,
            kind=self.kind,
            layer=None,
            step=history.step,
            severity=Severity.INFO if self._is_all_there_is(history) and not _has_moved(history) else Severity.WARNING,
            message=f"the same batch came in each of the last {self.repeats} steps",
            evidence=(Quantity(name="equal batches in a row, at least", value=float(self.repeats), unit="steps"),),
        )

    def _is_all_there_is(self, history: History) -> bool:
        """Say whether the batch has the size of a data set, or is what the optimizer needs, rather than chosen."""
        if history.info.optimizer == "LBFGS":
            return True
        samples = float(history.run.newest("samples_per_s")[0] * history.run.newest("step_ms")[0]) / 1e3
        return samples > self.chosen and round(samples).bit_count() != 1  # nan, unknown, is not greater

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
        yield Example("a healthy run", Synthetic(steps=40).history())
        repeated = Synthetic(steps=40)
        repeated.batch_hash_T = repeated.batch_hash_T[repeated.t_T // 4]
        yield Example("four updates per batch", repeated.history())
        unknown = Synthetic(steps=40)
        unknown.batch_hash_T[:] = float("nan")
        yield Example("nobody hands over the batches", unknown.history())


def _has_moved(history: History) -> bool:
    """Say whether another batch came within the window: then this one is not all the data."""
    hash_T = history.scalar("batch_hash")
    return bool((hash_T < hash_T[-1]).any() or (hash_T > hash_T[-1]).any())
