"""GW402: the GradScaler skips update after update, and its scale falls towards zero."""

# T = steps of a window

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect.features.finding import finding_of
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleCollapse:
    """A GradScaler that skips one update after the other.

    What it measures: how many of the newest steps were skipped without a break, and the loss scale. A scale that is
    merely too high at the start is halved until it fits, once per step; it fits long before it reaches `scale`.
    Gradients that are NaN do not become finite at any scale.

    Why it matters: nothing is learned while updates are skipped, and the loss looks calm.

    When it is wrong: a start at a scale that is absurdly high (2^40) needs as many skips as it has halvings to make.

    What to do: find where NaN or Inf is made, which no loss scale can mend: an attention row that is masked entirely,
    a value above 65504 in the forward pass, a division by zero. `gradwatch replay` names the operation.

    Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, sec. 3.2; PyTorch, torch.amp.GradScaler:
    init_scale 65536, backoff_factor 0.5.

    Args:
        every: Steps between two looks. 5: nothing is lost but time.
        skips: Skipped updates in a row at which to report. 14: from 2^16 that is a scale of 4; healthy runs that start
            at 2^24 to find their level skip up to a dozen.
        scale: Loss scale below which to report after 4 skips in a row. 16: gradients that overflow float16 at such a
            scale are above 65504 / 16 = 4094 unscaled; losses that are summed over a batch stay below.
    """

    code: ClassVar[str] = "GW402"
    kind: ClassVar[str] = "loss-scale-collapse"
    every: int = 5
    skips: int = 14
    scale: float = 16.0

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run."""
        if not history.info.loss_scaling:
            return
        went_T = np.flatnonzero(history.scalar("skipped", 64) != 1)
        row = int(went_T[-1]) + 1 if len(went_T) else 0
        skips = len(history.scalar("skipped", 64)) - row
        scale = float(history.run.newest("loss_scale")[0])
        if skips < 4 or (skips < self.skips and not scale < self.scale):
            return
        yield finding_of(
            self,
            history,
            f"the GradScaler skipped the last {skips} updates; its scale has fallen to {scale:.3g}",
            Quantity(key="skipped.run_steps", label="skipped in a row", value=float(skips), unit="steps"),
            Quantity(key="loss_scale", value=scale),
            severity=Severity.CRITICAL,
        )

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("every update is skipped", _skipping(first=0, last=60, start=2.0**16), (None,))
        yield Example("it begins in the middle of a run", _skipping(first=30, last=60, start=2.0**14), (None,))
        yield Example("a healthy run", Synthetic(steps=60, precision="fp16").history())
        yield Example("ten skips find the scale at the start", _skipping(first=0, last=10, start=2.0**24))
        yield Example("single skips when the scale is probed", _skipping(first=40, last=41, start=2.0**17))


def _skipping(*, first: int, last: int, start: float) -> History:
    """Return a run that skips the steps from first until last, halving its scale at each."""
    made = Synthetic(steps=60, precision="fp16")
    made.skipped_T[first:last] = 1
    made.loss_scale_T = start * 0.5 ** np.cumsum(np.concatenate([[0], made.skipped_T[:-1]]))
    made.grad_l2_TL[first:last] = np.nan
    made.nonfinite_TL[first:last] = 1
    return made.history()
