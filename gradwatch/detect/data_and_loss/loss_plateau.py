"""GW505: the loss does not decrease, from the first step on."""

# T = steps of a window

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect.features.baseline import baseline_loss, first_steps
from gradwatch.detect.features.consequences import severity_after
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.robust_stats import median, slope, trend
from gradwatch.detect.features.sequential_test import aligned_blocks, stall_likelihood_ratio
from gradwatch.detect.features.structure import structure_of
from gradwatch.events import ADVERSARY, BROADCAST, CHANCE, EMBEDDING_PRODUCT, MIXED_AXES, PAIRED, UNPAIRED, EventKind
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Quantity, Severity

MISLAID = (BROADCAST, MIXED_AXES)
"""Events of a loss that compares every prediction with every target, or scores of several places with one target."""

BEGINNING = 16
"""Steps that say where the loss began."""

WINDOW = 48
"""Newest steps that say where it is."""


MOVING = 0.1
"""Growth of the weights over the window that shows that something is being learned. Runs that learned nothing grew by
1 to 2 %, matrix factorisations on their way out of a saddle by 25 % and more."""

AHEAD = 4
"""Windows to come in which a trend must bring a fall that counts: a network that learns random labels by heart, the
biases first, falls for sure and by a thousandth."""

BLOCK = 4
"""Steps per block of which the median counts in the sequential test."""

SETTLED = 32
"""First steps that are left out of the trend and of the test: a network that learns nothing learns the mean first."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlateau:
    """A loss that has not fallen since the run began.

    What it measures: three things. (1) The autograd graph: predictions (n, 1) against targets (n) make n x n
    differences, and only their mean is learned, whatever the loss does meanwhile. A softmax over other values than the
    outputs of one place, because `view` was used where axes should be swapped, mixes classes with time. (2) The median
    loss of the newest 48 steps against that of the first 16 (or, of a cross entropy of C classes, against log C
    where that is less), and its trend over the window (up to 256 steps, without the first 32), which counts if four
    more windows like it would bring a fall, and in any case for half of `patience` more. After at least `patience`
    steps, and a twentieth of the planned ones, at a rate that is not rising any more, the loss is neither lower than in
    the beginning nor on its way down, and neither the gradient norm grows nor do the weights, as they do when a plateau
    is about to end: embeddings that are multiplied leave a saddle that way. How long that takes follows from the
    losses: the evidence of a sequential test adds up over blocks of 4 steps, of which one that stands still seldom sets
    a new low. Of runs whose blocks set one every second time, noise included, the test lets at most the fraction
    `error` pass within a window, however often it looks (Ville's inequality). (3) A loss that stands like that after it
    has fallen, while predictions fit any other sample of their batch as well as their own: what fell is what a constant
    can learn, the mean of the targets or the shares of the classes. Of cross entropies and squared errors of the
    model's output, the gradient of that output tells the targets; eight looks in a row together must show that pairing
    explains less than 0.03 of what a constant leaves open. (Of embeddings of which a batch reads a third of the rows, a
    row has learned for a third of the steps: `patience` counts those.)

    Why it matters: nothing is being learned, whatever the gradients look like.

    When it is wrong: a loss that is no measure of success (policy gradient; with several optimizers it is taken for the
    value of a game between them, and reported as info, as where parameters of another learner stand between the model
    and the loss); tasks that are learned in a sudden transition after a long
    plateau (CTC, arithmetic).

    What to do: first look at the other findings: a plateau is what most illnesses end in. Then at the loss itself:
    predictions (n, 1) against targets (n) broadcast to (n, n) and learn the mean; labels that do not belong to the
    inputs; a network without nonlinearities; a target that the inputs say nothing about. A model that cannot overfit
    ten samples has a bug.

    Source: Karpathy 2019, "A recipe for training neural networks", https://karpathy.github.io/2019/04/25/recipe/;
    Wald 1945, "Sequential tests of statistical hypotheses", https://doi.org/10.1214/aoms/1177731118.

    Args:
        every: Steps between two looks. 10: the graph shows it at once, and otherwise nothing happens.
        patience: Steps after which to report at the earliest. 128: healthy runs that started slowly had a falling trend
            by then.
        error: Chance, 0..1, at most, that the test takes a loss for flat which sets a new low in every second block.
            0.001: half of all flat losses have that much evidence after 112 steps, nineteen in twenty after 156.
        fall: Fall of the loss, as a fraction, that counts as one. 0.03: within it the medians are noise.
        trend: Slope of the loss in its standard errors below which it is falling. -1.5: a flat loss is below by chance
            once in 15 looks, which only delays the report; slow starts were below -2.3.
    """

    code: ClassVar[str] = "GW505"
    kind: ClassVar[str] = "loss-plateau"
    every: int = 10
    patience: int = 128
    error: float = 0.001
    fall: float = 0.03
    trend: float = -1.5

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run."""
        for event in (event for kind in MISLAID for event in events_of(history, kind)):
            yield self._finding(history, f"the loss cannot fall as it should: {event.text}", layer=event.layer)
        if history.step < max(self.patience, (history.info.total_steps or 0) // 20):
            return
        newest, (first, what) = float(median(history.scalar("loss", WINDOW))), baseline_loss(history)
        has_fallen = self._has_fallen(history, newest, least=(1 - self.fall) * first)
        is_unpaired = has_fallen and _is_unpaired(history)
        if has_fallen and not (is_unpaired and history.step * _share_read(history) >= self.patience):
            return
        since = history.step // 2 if has_fallen else SETTLED  # who learns the mean first may take a while for it
        if not newest <= 2 * self._highest(history) or self._is_on_its_way(history, since):
            return
        if not has_fallen and _evidence(history) < 1 / self.error:
            return
        is_game = "+" in history.info.optimizer or any(events_of(history, ADVERSARY))
        yield self._finding(
            history,
            f"the loss is {newest:.4g} after {history.step} steps and "
            + ("predictions fit any other sample as well" if has_fallen else f"{first:.4g} {what}"),
            severity=Severity.INFO if is_game else severity_after(history, self.kind),
        )

    def _finding(
        self, history: History, message: str, *, layer: str | None = None, severity: Severity = Severity.WARNING
    ) -> Finding:
        return finding_of(
            self,
            history,
            message,
            Quantity(
                key="loss.first",
                label="loss, first 16 steps",
                value=float(median(first_steps(history, "loss", BEGINNING))),
            ),
            Quantity(
                key="loss.newest", label="loss, newest 48 steps", value=float(median(history.scalar("loss", WINDOW)))
            ),
            Quantity(key="steps", value=float(history.step), unit="steps"),
            layer=layer,
            severity=severity,
        )

    def _has_fallen(self, history: History, newest: float, *, least: float) -> bool:
        """Say whether the loss is lower than in the beginning, or no number that could be."""
        return least <= 0 or newest < least or bool(np.fmin.reduce(history.scalar("loss", WINDOW)) < least / 2)

    def _highest(self, history: History) -> float:
        """Return the largest loss of the beginning, whose median is low where the first batches are of one kind."""
        return float(np.fmax.reduce(first_steps(history, "loss", BEGINNING)))

    def _is_on_its_way(self, history: History, since: int) -> bool:
        """Say whether the loss is falling since a step, or would be in a while."""
        recent = slice(max(0, since - int(history.run.steps()[0])), None)
        loss_T, norm_T = history.scalar("loss")[recent], history.scalar("grad_norm.before_clip")[recent]
        rate_T = history.scalar("lr.0")
        is_warming_up = rate_T[-1] > 1.01 * rate_T[len(rate_T) // 2]
        is_skipping = (history.scalar("skipped", WINDOW) == 1).any()
        if is_warming_up or is_skipping or not (np.isfinite(loss_T).all() and np.isfinite(norm_T).all()):
            return True
        to_come = -slope(loss_T) * AHEAD * len(loss_T)
        may_be_slow = history.step < 3 * self.patience // 2
        is_falling = trend(loss_T) < self.trend and (may_be_slow or to_come >= self.fall * abs(float(loss_T[0])))
        return is_falling or trend(norm_T) > 4 or _is_growing(history, since)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("the loss stays where it was", _flat(), (None,))
        text = "prediction and target of shapes (16, 1) and (16,) make 16 x 16 differences"
        broadcast = Synthetic(steps=20).note(MISLAID[0], layer="layers.11", text=text)
        yield Example("targets are broadcast against predictions", broadcast.history(), ("layers.11",))
        drift = Synthetic(steps=240)
        drift.loss_T[:] = 2.3 * (1 - 2e-5 * drift.t_T) * np.exp(0.003 * drift.rng.standard_normal(drift.steps))
        yield Example("random labels: a fall that is sure, and next to nothing", drift.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=200).history())
        yield Example("a slow but steady fall", _flat(fall=0.06))
        warm = _flat_run()
        warm.lr_T *= 1 + warm.t_T
        yield Example("the rate is still rising", warm.history())
        saddle = _flat_run()
        saddle.weight_l2_TL *= 1 + 0.002 * saddle.t_T[:, None]
        yield Example("the weights grow: a saddle is being left", saddle.history())
        yield Example("two embeddings that are multiplied leave one, and what is beside them waits", _multiplied())
        guessing = _flat_run().note(CHANCE, values={"nat": 1.0, "classes": 6.0})
        guessing.loss_T[20:] *= 1.8 / 2.3
        yield Example("a loss that falls to log C and stays there", guessing.history(), (None,))
        yield Example("what fell was the mean of the targets", _of_the_mean(UNPAIRED), (None,))
        yield Example("predictions began to fit", _of_the_mean(UNPAIRED, PAIRED))
        yield Example("embeddings of which a batch reads a tenth of the rows", _of_the_mean(UNPAIRED, unread=0.9))
        played = _flat_run().note(ADVERSARY)
        yield Example("a critic keeps up: for information", played.history(), (None,))
        floor = Synthetic(steps=240)
        floor.loss_T[60:] = 0.9 * np.exp(0.02 * floor.rng.standard_normal(180))
        yield Example("a floor after a fall, as label smoothing has", floor.history())
        late = _flat_run()
        late.loss_T[120:] *= np.exp(-0.02 * (late.t_T[120:] - 120))
        yield Example("a plateau that ends", late.history())


def _evidence(history: History) -> float:
    """Return how many times likelier the losses of the window are if they stand still than if they fall."""
    loss_T, steps_T = history.scalar("loss"), history.run.steps(len(history.scalar("loss")))
    recent_T = steps_T >= SETTLED
    return stall_likelihood_ratio(aligned_blocks(loss_T[recent_T], int(steps_T[recent_T][0]), BLOCK), rate=0.5)


def _is_unpaired(history: History) -> bool:
    """Return whether predictions fitted any other sample as well as their own when they were last checked."""
    kinds = [e.kind for e in history.events if e.kind in (UNPAIRED.name, PAIRED.name) and e.step <= history.step]
    return bool(kinds) and kinds[-1] == UNPAIRED.name


def _share_read(history: History) -> float:
    """Return which part of the rows of an embedding a batch reads, of the one of which it is least."""
    tables_E = structure_of(history).embeddings_E
    unread_E = median(history.param.window("grad.zero_frac", WINDOW)[:, tables_E])
    return 1 - float(np.fmax.reduce(unread_E, initial=0.0))


def _is_growing(history: History, since: int) -> bool:
    """Say whether most weight matrices, embeddings among them, have grown by `MOVING` since a step of the window.

    Where rows of embeddings are multiplied, it is these that leave a saddle, and nothing else may move meanwhile.
    """
    layers = history.info.layers
    tables = (
        [int(i) for i in structure_of(history).embeddings_E if layers[i].shape[-1] > 1]
        if any(events_of(history, EMBEDDING_PRODUCT))
        else []
    )
    wide = tables or [i for i, la in enumerate(layers) if la.trainable and len(la.shape) >= 2]
    norm_TL = history.param.window("weight.l2")[history.param.steps() >= since][:, wide]
    norm_TL = norm_TL[~np.isnan(norm_TL).all(axis=1)] if wide else norm_TL
    return len(norm_TL) > 1 and bool(median(norm_TL[-1] - (1 + MOVING) * norm_TL[0]) > 0)


def _flat_run(*, fall: float = 0.0) -> Synthetic:
    made = Synthetic(steps=200)
    made.loss_T = 2.3 * (1 - fall * made.t_T / 160) * np.exp(0.03 * made.rng.standard_normal(made.steps))
    return made


def _of_the_mean(*kinds: EventKind, unread: float = 0.0) -> History:
    """Return a run whose loss falls by half at once and stands from there on, with what was noted of its outputs."""
    made = _flat_run()
    made.loss_T[20:] *= 0.5
    made.info = replace(made.info, layers=tuple(replace(i, module_type="Embedding") for i in made.info.layers))
    made.zero_frac_TL[:] = unread
    for kind in kinds:
        made.note(kind, step=100)
    return made.history()


def _multiplied() -> History:
    """Return a flat run in which two embeddings that are multiplied grow, and nothing else does."""
    made = _flat_run().note(EMBEDDING_PRODUCT, values={"first": 0.0, "second": 1.0, "dimension": 16.0})
    tables = (replace(layer, module_type="Embedding") for layer in made.info.layers[:2])
    made.info = replace(made.info, layers=(*tables, *made.info.layers[2:]))
    made.weight_l2_TL[:, :2] *= 1 + 0.002 * made.t_T[:, None]
    return made.history()


def _flat(*, fall: float = 0.0) -> History:
    return _flat_run(fall=fall).history()
