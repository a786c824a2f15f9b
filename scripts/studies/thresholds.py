"""How near a run came to each threshold: every detector asked again with a bound so low that it hears everything.

A dial is one threshold of one detector and the number in its evidence that is compared with it. So what is measured
here is what the detector measures, by its own code.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from gradwatch.detect import Detector, detectors
from gradwatch.history.store import History


@dataclass(frozen=True, slots=True, kw_only=True)
class Dial:
    """A threshold.

    Args:
        kind: Whose.
        name: Its field.
        hears: Value of the field at which the detector tells nearly everything.
        evidence: Key of the quantity that is compared with it.
        also: Further fields to lower, so that they do not hide it.
        is_log: Whether the field is a power of ten of the quantity.
    """

    kind: str
    name: str
    hears: float
    evidence: str
    also: dict[str, Any] = field(default_factory=dict)
    is_log: bool = False


DIALS = (
    Dial(kind="vanishing-gradient", name="at_once", hears=0.3, evidence="depth.fall_decades", also={"decades": 0.3}),
    Dial(kind="exploding-gradient", name="decades", hears=0.3, evidence="depth.rise_decades"),
    Dial(kind="exploding-gradient", name="gain", hears=0.1, evidence="backward.gain_decades"),
    Dial(kind="exploding-gradient", name="factor", hears=1.2, evidence="grad_norm.climb"),
    Dial(kind="dead-layer", name="decades", hears=1.5, evidence="dead_layer.gap_decades"),
    Dial(kind="rising-sparsity", name="rise", hears=0.02, evidence="zero_frac.rise", also={"level": 0.05}),
    Dial(kind="oscillating-gradient", name="decades", hears=0.2, evidence="grad_norm.spread_decades"),
    Dial(kind="gradient-spike", name="factor", hears=2.0, evidence="spike.above_median", also={"above_largest": 2.0}),
    Dial(kind="gradient-spike", name="above_largest", hears=1.5, evidence="spike.above_largest", also={"factor": 2.0}),
    Dial(kind="layer-imbalance", name="decades", hears=0.2, evidence="imbalance.lead_over_second_decades"),
    Dial(kind="poor-initialization", name="gain", hears=0.3, evidence="gain"),
    Dial(kind="learning-rate-too-high", name="growth", hears=0.03, evidence="weight.l2.growth_decades"),
    Dial(kind="dead-relu", name="fraction", hears=0.1, evidence="act.dead_frac", also={"jump": 0.1}),
    Dial(kind="saturated-activation", name="early", hears=0.01, evidence="act.saturated_frac", also={"late": 2.0}),
    Dial(kind="saturated-activation", name="late", hears=0.05, evidence="act.saturated_frac", also={"early": 2.0}),
    Dial(kind="overfitting", name="rise", hears=0.02, evidence="val_loss.rise_frac"),
)


def largest(history: History) -> dict[str, float]:
    """Return the largest value of each dial over a run, 0 where a dial was never heard.

    Args:
        history: All of whose steps are kept, as those of a run of a few hundred steps are.
    """
    listening = _listening()
    found = {f"{dial.kind}.{dial.name}": 0.0 for dial in DIALS}
    again = History(history.info, groups=history.groups)
    (steps_T, param_TSL), (_, run_TS1) = history.param.rows(), history.run.rows()
    act_at = {int(step): row for step, row in zip(*history.act.rows(), strict=True)}
    for t, step in enumerate(steps_T.tolist()):
        run = dict(zip(history.run.statistics, run_TS1[t, :, 0].tolist(), strict=True))
        again.append(step, run=run, param_SL=param_TSL[t], act_SL=act_at.get(step))
        for dial, detector in listening:
            if step % detector.every == 0:
                heard = [_value(dial, f.evidence) for f in detector.detect(again)]
                name = f"{dial.kind}.{dial.name}"
                found[name] = max(found[name], *heard, 0.0)
    return found


def defaults() -> dict[str, float]:
    """Return the value of each dial as it is shipped."""
    shipped = {d.kind: d for d in detectors()}
    return {f"{dial.kind}.{dial.name}": float(getattr(shipped[dial.kind], dial.name)) for dial in DIALS}


@cache
def _listening() -> tuple[tuple[Dial, Detector], ...]:
    made = []
    for dial in DIALS:
        settings = {dial.kind: {dial.name: dial.hears, **dial.also}}
        made.append((dial, next(d for d in detectors(settings) if d.kind == dial.kind)))
    return tuple(made)


def _value(dial: Dial, evidence: Any) -> float:
    values = [q.value for q in evidence if q.key == dial.evidence]
    return values[0] if values and math.isfinite(values[0]) else 0.0
