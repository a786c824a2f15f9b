"""Find a GradScaler that skips many updates in a row, so that its scale falls towards zero (GW402)."""

# T = steps of a window

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example, Recovery
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.recovery import start_of_state
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

WINDOW_STEPS = 64
"""Number of newest steps in which to count skipped updates."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaleCollapse:
    """A GradScaler that skips many updates in a row.

    What it measures: how many of the newest updates were skipped in a row, and the loss scale.

    Why it matters: the model learns nothing while updates are skipped, and the loss looks calm.

    Example: `scores.masked_fill(mask, -torch.inf).softmax(-1)` with a row that is fully masked: NaN at any loss scale.

    What to do: find the source of NaN or Inf with `gradwatch replay`: a fully masked attention row, a value above
    65504, a division by zero. No loss scale removes it.

    When it is wrong: an extreme initial scale, such as 2^40, takes one skipped update for each halving.

    When it is withdrawn: no update was skipped for `recovered` steps.

    How it is detected: `skips` updates were skipped in a row, or `few` were and the loss scale is below `scale`. A
    scale that is only too high at the start is halved at each step, and fits long before it reaches `scale`. NaN
    gradients stay NaN at any scale.

    Source: Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740, sec. 3.2; PyTorch, torch.amp.GradScaler:
    init_scale 65536, backoff_factor 0.5.

    Args:
        every: Steps between two calls. 5: skipped updates cost only time.
        skips: Skipped updates in a row from which to report. 14: a scale of 2^16 has become 4; healthy runs that start
            at 2^24 skip up to 12 updates.
        scale: Loss scale below which `few` skips in a row are reported. 16: a gradient that overflows float16 at that
            scale is above 65504 / 16 = 4094; the gradients of a loss that is summed over a batch are smaller.
        few: Skipped updates in a row from which to report at a low scale. 4: a scaler that has raised its scale too far
            skips one.
        recovered: Updates in a row that were done and withdraw a finding. 64: over four times the skips that are
            reported.
    """

    code: ClassVar[str] = "GW402"
    kind: ClassVar[str] = "loss-scale-collapse"
    every: int = 5
    skips: int = 14
    scale: float = 16.0
    few: int = 4
    recovered: int = 64

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run."""
        if not history.info.loss_scaling:
            return
        # newest first, so that the first update that was done ends the count
        is_done_T = history.scalar("skipped", WINDOW_STEPS)[::-1] != 1
        skips = int(is_done_T.argmax()) if is_done_T.any() else len(is_done_T)  # `argmax` of no True is 0
        scale = float(history.run.newest("loss_scale")[0])
        # many skips, or fewer at a scale that is already low
        if skips < self.few or (skips < self.skips and not scale < self.scale):
            return
        yield finding_of(
            self,
            history,
            f"the GradScaler skipped the last {skips} updates; its scale has fallen to {scale:.3g}",
            Quantity(key="skipped.run_steps", label="consecutive skipped updates", value=float(skips), unit="steps"),
            Quantity(key="loss_scale", value=scale),
            severity=Severity.CRITICAL,
            onset=int(history.run.steps(skips)[0]),
        )

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the end of the skipped updates, once enough updates in a row were done."""
        end = start_of_state(history.scalar("skipped") != 1, history.run.steps(), least=self.recovered)
        return None if end is None else Recovery(end, f"no update was skipped for {self.recovered} steps")

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("every update is skipped", _skipping(first=0, last=60, start=2.0**16), (None,))
        yield Example("the skips start in the middle of a run", _skipping(first=30, last=60, start=2.0**14), (None,))
        yield Example("a healthy run", Synthetic(steps=60, precision="fp16").history())
        yield Example("ten skips find the scale at the start", _skipping(first=0, last=10, start=2.0**24))
        yield Example("a single skip when the scale is raised", _skipping(first=40, last=41, start=2.0**17))


def _skipping(*, first: int, last: int, start: float) -> History:
    """Return a run that skips the steps from `first` to `last` - 1 and halves its scale at each skip."""
    made = Synthetic(steps=60, precision="fp16")
    made.skipped_T[first:last] = 1
    made.loss_scale_T = start * 0.5 ** np.cumsum(np.concatenate([[0], made.skipped_T[:-1]]))
    made.grad_l2_TL[first:last] = np.nan
    made.nonfinite_TL[first:last] = 1
    return made.history()
