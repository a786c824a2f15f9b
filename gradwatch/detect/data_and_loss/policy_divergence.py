"""Find policies that have moved far from the one that drew their samples (GW506)."""

# T = recorded steps, R = readings of the policy

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example, Recovery
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.finding import finding_of
from gradwatch.history.store import Floats, History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity

DIVERGENCE, CLIPPED = "policy.divergence", "policy.clipped_frac"


class Readings(NamedTuple):
    """The newest readings of a policy: their steps, divergences, and clipped shares, which may be nan."""

    steps_R: NDArray[np.int64]
    divergence_R: Floats
    clipped_R: Floats


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDivergence:
    """A policy that has moved far from the one that drew its samples.

    What it measures: the ratio of the probabilities of the actions, now and when they were drawn, as in PPO. Its mean
    gives the KL divergence of the policy from the earlier one.

    Why it matters: the samples say how to improve the policy near the one that drew them. Far from it, weights of a few
    samples outgrow all others, and an update may undo what was learned. Clipping does not prevent it: it only ends the
    gradient of a sample after the policy has moved too far.

    Example: `Adam(policy.parameters(), lr=1e-2)` and 20 passes over each rollout, without a clip of the ratio.

    What to do: lower the learning rate, make fewer passes over the same samples, or stop once the divergence is above
    0.05. If the divergence is large in the first pass already, compare the log-probabilities with those stored when
    the actions were drawn: for the same samples, in the same mode of the model, summed over the same dimensions.

    When it is wrong: a method that learns from samples of a much older policy on purpose, and weights them.

    When it is withdrawn: the divergence is below `divergence` in each of the newest `readings` readings.

    How it is detected: the loss shows that it is a policy gradient, and its graph still holds the ratios when a
    backward pass begins. One pass is read between two samples of the activations, a different one each time. Of the
    newest `readings` readings, at least half are at `divergence` or above. A ratio in a compiled region is not seen,
    nor one that is not the exponential of a difference; pass the divergence as `statistics` of `monitor.step` instead.

    Source: Schulman et al. 2017 (PPO), https://arxiv.org/abs/1707.06347; Schulman 2020 (the estimate of the
    divergence), http://joschu.net/blog/kl-approx.html; Andrychowicz et al. 2021 (which choices matter on-policy),
    https://arxiv.org/abs/2006.05990; a ratio other than 1 in the first pass:
    https://github.com/huggingface/trl/issues/454.

    Args:
        every: Steps between two calls. 10: the policy is sampled that often.
        divergence: Divergence, nats, at which to report. 0.5: in healthy runs, the larger half of 8 readings is below
            0.05 (`scripts/studies/policies.py`); trust regions end at 0.01 to 0.05.
        readings: Newest readings that are judged; half of them must agree. 8: the first pass over new samples has no
            divergence, so not all of them can.
    """

    code: ClassVar[str] = "GW506"
    kind: ClassVar[str] = "policy-divergence"
    every: int = 10
    divergence: float = 0.5
    readings: int = 8

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding if half of the newest readings are far from the policy that drew the samples."""
        newest = self._newest(history)
        if newest is None:
            return
        steps_R, divergence_R, clipped_R = newest
        is_far_R = divergence_R >= self.divergence
        if 2 * is_far_R.sum() < self.readings:
            return
        # the middle one of the larger half: one that half of the readings reach
        usual = float(np.sort(divergence_R)[-(self.readings + 1) // 2])
        evidence = [Quantity(key=DIVERGENCE, label="divergence of half of the readings", value=usual, unit="nats")]
        if not np.isnan(clipped_R).all():
            clipped = float(np.nanmedian(clipped_R))
            evidence.append(Quantity(key=CLIPPED, label="median share of clipped ratios", value=clipped, unit="0..1"))
        smallest = float(divergence_R.min())
        evidence.append(Quantity(key="policy.divergence.smallest", label="smallest divergence", value=smallest))
        yield finding_of(
            self,
            history,
            f"the policy has moved far from the one that drew its samples: a divergence of {usual:.2g} nats or more in "
            f"half of the passes",
            *evidence,
            severity=severity_after(history, self.kind),
            onset=int(steps_R[is_far_R.argmax()]),
        )

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the first of the newest readings if all of them are near the policy that drew the samples."""
        newest = self._newest(history)
        if newest is None or not (newest.divergence_R < self.divergence).all() or newest.steps_R[0] <= finding.step:
            return None
        return Recovery(int(newest.steps_R[0]), "the policy stayed near the one that drew its samples")

    def _newest(self, history: History) -> Readings | None:
        """Return the newest readings, or None if there are too few, or none of late."""
        # the cheap check first: most losses are not policy gradients
        if np.isnan(history.scalar(DIVERGENCE)).all():
            return None
        divergence_T = history[DIVERGENCE]
        places = np.flatnonzero(~np.isnan(divergence_T))[-self.readings :]
        if len(places) < self.readings:
            return None
        return Readings(history.steps(DIVERGENCE)[places], divergence_T[places], history[CLIPPED][places])

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("twenty passes without a clip", _with(divergence=4.0, clipped=float("nan")), (None,))
        yield Example("ratios of other samples, from the start", _with(divergence=1.2, clipped=0.7, onset=0), (None,))
        yield Example("a healthy run", _with(divergence=0.02, clipped=0.1))
        yield Example("fast learning, most ratios clipped", _with(divergence=0.12, clipped=0.85))
        near = Synthetic(steps=160).policy_gradient(divergence=4.0, clipped=0.9, onset=60)
        near.policy[DIVERGENCE][90:] = np.where(np.isnan(near.policy[DIVERGENCE][90:]), np.nan, 0.02)
        yield Example("three readings after one bad rollout", near.history())


def _with(*, divergence: float, clipped: float, onset: int = 60) -> History:
    return Synthetic(steps=160).policy_gradient(divergence=divergence, clipped=clipped, onset=onset).history()
