"""GW103: one layer's gradient is frozen at zero, or at a tiny value, while the others learn."""

# T = steps of a window, L = parameter tensors, M = weight matrices and kernels

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.robust_stats import log10, median
from gradwatch.detect.features.scope import affected_modules
from gradwatch.detect.features.structure import matrix_rms, structure_of
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

SIDE_BY_SIDE_EVENT = "tape-side-by-side"
"""Event of modules that are built alike and do not lie behind one another, such as experts."""

MIN_LIVE_FRAC = 0.5
"""Fraction of modules side by side with a gradient, 0..1, above which a dead one is no collapse of their router."""

ROUTER_SYMPTOMS = frozenset({"saturated-activation"})
"""What a collapsed router does: its softmax lies in its tails, and that is no other cause."""

MIN_TURNS = 3
"""Times that a gradient went away or came back: a layer dies once, an expert comes and goes."""

MIN_GONE_STEPS = 60
"""Steps after which a layer that came and went may be gone for good."""

MIN_GONE_RATIO = 5
"""Length of the newest absence in units of the longest before: an expert that is chosen with probability p at each step
has been away for 1.5 / p after two absences, and is away for 7.5 / p once in two thousand."""

MIN_MATRICES = 3
"""Weight matrices without which there is no cliff between neighbours."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLayer:
    """One layer whose gradient has frozen at zero, or at next to nothing, while others learn.

    What it measures: two things. (1) Frozen tensors: their gradient was not zero before and is exactly zero at each of
    the newest `steps` steps, while more than half of the others have a gradient. (2) Tiny matrices: their gradient per
    element (root mean square, median over the window) is `decades` below the median of all weight matrices, with a
    cliff of `decades` - 1 to the next layer on one side. Vanishing gradients are as small, but have a slope and no
    cliff.

    Why it matters: the layer no longer learns, and the features that pass through it stay what they are.

    When it is wrong: a branch whose gate starts near zero and opens late. An expert that is hardly ever chosen comes
    and goes (info), until it has been away for 60 steps and five times as long as ever before. If the autograd graph
    shows modules that are built alike side by side, as experts are, a dead one is for information until half of them
    are dead. Then the router has collapsed, however confident its softmax is. A gradient that is None is a choice of
    the training loop and does not count here (see no-gradient). If all layers go to zero together, the loss is zero: a
    hinge that is satisfied, or a fit without noise.

    What to do: look for what multiplies the layer: a gate with an extreme bias, a norm whose scale is zero and frozen,
    a saturated activation, units that died after a large step.

    Source: Srivastava et al. 2015, "Highway networks", sec. 2.2 on gate biases, https://arxiv.org/abs/1505.00387;
    He et al. 2015, https://arxiv.org/abs/1502.01852, sec. 2.2 on how much gradients differ between healthy layers.

    Args:
        every: Steps between two checks. 10: half of `steps`.
        steps: Newest steps at each of which it must hold. 20: zero-initialised branches have warmed up by then.
        decades: Gap in powers of ten. 5: healthy layers stayed within 1.6 (`scripts/studies/false_alarms.py`); a
            float32 update 5 decades smaller than its neighbours' is negligible.
    """

    code: ClassVar[str] = "GW103"
    kind: ClassVar[str] = "dead-layer"
    every: int = 10
    steps: int = 20
    decades: float = 5.0

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for each module that has stopped learning."""
        newest_L = history.param.newest("grad.l2")
        rms_M = matrix_rms(history, newest_L)
        if not len(rms_M) or rms_M.min() > rms_M.max() * 10**-self.decades or not rms_M.any():  # nan: look closer
            return
        l2_TL = history.param.window("grad.l2", self.steps)
        if len(l2_TL) < self.steps:
            return
        ill_L = self._frozen(history, newest_L) | self._tiny(history, l2_TL)
        if (
            not ill_L[structure_of(history).matrices.indices_M].any()
            or (history.scalar("skipped", self.steps) == 1).any()
        ):
            return
        usual = float(median(newest_L[structure_of(history).is_trainable_L]))
        for layer, group in affected_modules(history, ill_L, kind=self.kind):
            if layer is None:
                continue  # no layer learns: that is another illness, or success
            largest = float(np.fmax.reduce(l2_TL[:, group], axis=None))
            beside = _live_frac_beside(history, layer, newest_L)
            is_harmless = largest == 0 and (_comes_and_goes(history, group) or (beside or 0) > MIN_LIVE_FRAC)
            severity = severity_after(history, self.kind, but=frozenset() if beside is None else ROUTER_SYMPTOMS)
            what = "no gradient any more" if largest == 0 else "next to no gradient"
            yield finding_of(
                self,
                history,
                f"{layer} gets {what} while others learn",
                Quantity(key="grad.l2.largest", label=f"largest grad.l2 in {self.steps} steps", value=largest),
                Quantity(key="grad.l2.median", label="median grad.l2 of all tensors", value=usual),
                Quantity(
                    key="dead_layer.gap_decades",
                    label="gap below the median layer",
                    value=self._gap(history, l2_TL, group),
                    unit="decades",
                ),
                layer=layer,
                severity=Severity.INFO if is_harmless else severity,
            )

    def _frozen(self, history: History, newest_L: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return which tensors have gone to exactly zero."""
        structure = structure_of(history)
        zero_L = (newest_L == 0) & structure.is_trainable_L
        beside_L = _side_by_side(history)
        if not zero_L.any() or 2 * (zero_L & ~beside_L).sum() > (structure.is_trainable_L & ~beside_L).sum():
            return np.zeros(len(newest_L), np.bool_)
        l2_TL = history.param.window("grad.l2")
        zero_L &= (l2_TL[-self.steps :] == 0).all(axis=0)
        return np.asarray(zero_L & (l2_TL > 0).any(axis=0), np.bool_)

    def _tiny(self, history: History, l2_TL: NDArray[np.floating]) -> NDArray[np.bool_]:
        """Return which weight matrices lie at the bottom of a cliff."""
        ill_L = np.zeros(l2_TL.shape[1], np.bool_)
        newest_M = log10(matrix_rms(history, l2_TL[-1]))
        if len(newest_M) < MIN_MATRICES or not np.fmax.reduce(newest_M) - np.fmin.reduce(newest_M) > self.decades:
            return ill_L
        level_M = log10(matrix_rms(history, median(l2_TL)))
        top_M = log10(matrix_rms(history, np.fmax.reduce(l2_TL)))
        tiny_M = top_M < median(level_M) - self.decades  # nan, for zero and for missing, is not
        for start, end in _runs(tiny_M):
            sides_M = level_M[[i for i in (start - 1, end) if 0 <= i < len(level_M)]]
            edges_M = top_M[[i for i in (start, end - 1) if 0 <= i < len(level_M)]]
            tiny_M[start:end] = bool((sides_M > edges_M.max() + self.decades - 1).any())
        ill_L[structure_of(history).matrices.indices_M[tiny_M]] = True
        return ill_L

    def _gap(self, history: History, l2_TL: NDArray[np.floating], group: list[int]) -> float:
        """Return how many decades a gradient element of the group lies below the median matrix; inf for zero."""
        structure = structure_of(history)
        level = median(log10(matrix_rms(history, median(l2_TL))))
        top_L = log10(np.fmax.reduce(l2_TL)[group] / structure.rms_scale_L[group])
        return float(level - np.fmax.reduce(top_L)) if np.isfinite(top_L).any() else np.inf

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        zero = Synthetic(steps=120).dead(5, onset=60)
        yield Example("a layer goes to zero at step 60", zero.history(), zero.names(5))
        tiny = Synthetic(steps=80).dead(5, onset=0, level=1e-9)
        yield Example("a gate lets next to nothing through, from the start", tiny.history(), tiny.names(5))
        yield Example("a healthy run", Synthetic(steps=120).history())
        yield Example(
            "gradients that vanish towards the input have no cliff", Synthetic(steps=80).vanishing(decades=12).history()
        )
        yield Example(
            "a weak layer, a thousandth of the others", Synthetic(steps=80).dead(5, onset=0, level=1e-4).history()
        )
        expert = Synthetic(steps=120).dead(5, onset=60)
        expert.grad_l2_TL[20:60:7, 5] = 0
        yield Example("an expert that was chosen now and then is chosen no more", expert.history(), expert.names(5))
        routed = (
            Synthetic(steps=120).dead(5, onset=60).note(SIDE_BY_SIDE_EVENT, layer="layers", values={"modules": 12.0})
        )
        yield Example(
            "one of twelve experts is chosen no more, from one step to the next", routed.history(), routed.names(5)
        )
        collapsed = _collapsed()
        yield Example(
            "all of ten experts but one are chosen no more", collapsed.history(), collapsed.names(range(2, 11))
        )
        hinge = Synthetic(steps=120)
        hinge.grad_l2_TL[60:] = 0
        yield Example("the loss is zero, and with it every gradient", hinge.history())
        yield Example(
            "a layer without gradient from the start is no-gradient",
            Synthetic(steps=80).no_gradient(5, zero=True).history(),
        )


def _collapsed() -> Synthetic:
    """Return a run of twelve layers, the last ten of which stand side by side, and of which the last is left alone."""
    made = Synthetic(steps=120).dead(range(2, 11), onset=60)
    layers = made.info.layers
    experts = (replace(la, name=f"experts.{la.name}", module=f"experts.{la.module}") for la in layers[2:])
    made.info = replace(made.info, layers=(*layers[:2], *experts))
    return made.note(SIDE_BY_SIDE_EVENT, layer="experts.layers", values={"modules": 10.0})


def _live_frac_beside(history: History, name: str, newest_L: NDArray[np.floating]) -> float | None:
    """Return the fraction of modules side by side with one that have a gradient, 0..1; None if there are none."""
    for event in events_of(history, SIDE_BY_SIDE_EVENT):
        if event.layer is None or not name.startswith(f"{event.layer}."):
            continue
        depth_of = event.layer.count(".") + 1
        inside = [i for i, la in enumerate(history.info.layers) if la.name.startswith(f"{event.layer}.")]
        alive = {history.info.layers[i].name.split(".")[depth_of] for i in inside if newest_L[i] > 0}
        return len(alive) / event.values["modules"]
    return None


def _side_by_side(history: History) -> NDArray[np.bool_]:
    """Return of each tensor whether it lies in one of several modules side by side."""
    parents = tuple(f"{event.layer}." for event in events_of(history, SIDE_BY_SIDE_EVENT))
    return np.array([layer.name.startswith(parents) for layer in history.info.layers])


def _comes_and_goes(history: History, group: list[int]) -> bool:
    """Return whether the gradient of a group comes and goes, and is not away for far longer than before."""
    is_away_T = ~np.any(history.param.window("grad.l2")[:, group] > 0, axis=1)
    away = [end - start for start, end in _runs(is_away_T)]
    turns = int(np.count_nonzero(is_away_T[1:] != is_away_T[:-1]))
    is_gone = is_away_T[-1] and away[-1] >= MIN_GONE_STEPS and away[-1] >= MIN_GONE_RATIO * max(away[:-1], default=0)
    return turns >= MIN_TURNS and not is_gone


def _runs(mask_M: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return where each unbroken run of True starts, and the place after its end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask_M, [False]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
