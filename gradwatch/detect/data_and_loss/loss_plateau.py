"""Find a loss that does not decrease, from the first step on (GW505)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example, Recovery
from gradwatch.detect.data_and_loss.loss_plateau_rules.climbing_loss import find_climbing_loss
from gradwatch.detect.data_and_loss.loss_plateau_rules.collapsed_weights import find_collapsed_weights
from gradwatch.detect.data_and_loss.loss_plateau_rules.constant_loss import find_constant_loss
from gradwatch.detect.data_and_loss.loss_plateau_rules.constant_predictions import find_constant_predictions
from gradwatch.detect.data_and_loss.loss_plateau_rules.examples import (
    make_climbing,
    make_collapsed,
    make_constant,
    make_flat,
    make_product,
    make_proofs,
    make_shrinking,
    make_unjudged,
)
from gradwatch.detect.data_and_loss.loss_plateau_rules.inward_updates import INWARD, find_inward_updates
from gradwatch.detect.data_and_loss.loss_plateau_rules.progress import (
    has_fallen,
    is_held_back,
    is_level,
    may_leave_saddle,
)
from gradwatch.detect.data_and_loss.loss_plateau_rules.stall import MIN_WAIT_STEPS, SETTLING_STEPS, find_stall
from gradwatch.detect.data_and_loss.loss_plateau_rules.wrong_pairs import find_unreachable_targets, find_wrong_pairs
from gradwatch.detect.data_and_loss.loss_plateau_rules.zero_loss import find_zero_loss
from gradwatch.detect.features.baseline import is_learned, newest_loss
from gradwatch.detect.features.finding import Sign, findings_of
from gradwatch.detect.features.recovery import fall_of_loss
from gradwatch.events import PAIRED, UNCLEAR, UNPAIRED
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlateau:
    """A loss that has not fallen since the start of the run.

    What it measures: the median loss of the newest 48 steps, compared with the first 16 steps or with the loss of
    random guessing (ln C for C classes), whichever is lower.

    Why it matters: the model learns nothing, even if the gradients look normal.

    Example: `F.mse_loss(model(x), y)` with shapes (n, 1) and (n,), which broadcasts to (n, n).

    What to do: read the other findings first: most problems end in a plateau. Then check shapes, labels and
    nonlinearities. Overfit 10 samples: if the model cannot, there is a bug.

    When it is wrong: a loss that does not measure success (policy gradients, GANs: info), and tasks that are learned
    suddenly after a long plateau (CTC, arithmetic).

    When it is withdrawn: three quarters of the newest 48 losses are below three quarters of the first 16, and by `fall`
    below the baseline. (1) is never withdrawn, since the graph proves it, and (3) only if predictions began to fit.

    How it is detected: (1) The autograd graph shows n x n differences, or a softmax over values that are not the
    outputs of one place, because `view` was called instead of `transpose`; or a recurrence or an attention whose steps
    are the rows of the loss, samples of a DataLoader or sequences of tokens, for lack of `batch_first=True`; or labels
    of a language model that are the input token two or three positions later; or an attention whose mask hides the
    tokens and shows the padding. The first gradients show a loss of the mean output, or one target for all samples of a
    batch. (2) The loss is not lower than at the beginning and has no falling trend, without the first 32 steps. A trend
    counts if `windows_ahead` more windows of it would bring a fall, and in any case until `slow_start` times
    `patience`. The learning rate must not be rising, nor the gradient norm or the weights growing, as they do when a
    saddle is about to end. At least `patience` steps, and one in `planned` of the planned steps, have passed. A
    sequential test over blocks of 4 steps says when the loss has stood long enough. The noise of the losses must be too
    small to hide a fall by `hidden_fall`, and predictions must not fit their own targets, as far as that can be
    measured. (3) A loss stands like that after a fall, while predictions fit other samples of the batch as well as
    their own. Only what a constant can learn fell: the mean of the targets, or the shares of the classes. There must be
    enough samples to show a slow start. (4) Every loss since the first step is exactly 0. (5) Different batches have
    the same loss, with more than `constant_left` of the first one left: all outputs have collapsed to one point. The
    loss of a triplet then stays at its margin. (6) Half of the weight matrices have shrunk to `shrunk` of their first
    norms, and the loss has not fallen: a decay outweighs the gradient. (7) The last activation cannot give some targets
    of a squared error, which hold `unreachable` of their variance. (8) The loss set a new high in `highs` of its
    blocks, and is `loss_growth` times chance level or the largest first loss. (9) A share `inward` of the path of half
    of the matrices, with half of their numbers, brought them nearer to 0, with `constant_left` of the first loss left.

    Exceptions to the rules: info is the loss of several optimizers, or of a model behind another learner, as in a game;
    of a policy gradient whose advantages have both signs; of a model that was trained before; of weights that have
    moved by less than `travel` of themselves, as in a slow model; and (3) if a class is rare and never predicted.

    Source: Karpathy 2019, "A recipe for training neural networks", https://karpathy.github.io/2019/04/25/recipe/; Wald
    1945, "Sequential tests of statistical hypotheses", https://doi.org/10.1214/aoms/1177731118; Hermans et al. 2017,
    https://arxiv.org/abs/1703.07737, sec. 3.2, on triplet losses that stay at their margin.

    Args:
        every: Steps between two calls. 10: the graph shows (1) at once, and the rest is slow.
        patience: Steps before the first report. 128: healthy runs that started slowly had a falling trend by then.
        fall: Fall of the loss, as a fraction, that counts as one. 0.03: a smaller change of a median is noise.
        constant: Spread of the losses of different batches, as a fraction of the loss, up to which they are the same.
            0.0003: even a mean over 100,000 samples that differ by a tenth varies as much.
        trend: Slope of the loss in its standard errors below which it is falling. -1.5: a flat loss is below by chance
            in 1 of 15 calls, which only delays the report; slow starts were below -2.3.
        planned: Planned steps of the run per step of waiting before the first report of (2) and (3). 20: a long run may
            start slowly for longer.
        single_loss: A single newest loss, in units of the baseline less `fall`, below which the loss has fallen. 0.5:
            the model has learned some batches.
        windows_ahead: Windows, of all steps so far without the first 32, in which a trend must bring a fall that
            counts. 4: a network that memorizes random labels, its biases first, falls steadily and by 0.1 %.
        slow_start: Steps, in units of `patience`, up to which any falling trend counts. 1.5: a run may start slowly.
        loss_growth: Newest loss, in units of the largest of the first 16, above which it grows and is not a plateau. 2:
            the largest counts, because the median is low if the first batches are of one kind.
        highs: Fraction of the blocks of 4 steps that set a new high, at least, for (8). 0.5: of 30 blocks of noise,
            4 do.
        climb_patience: Steps before the first report of (8). 64: an overshoot of the first updates is over.
        rate_growth: Growth of the learning rate, as a factor over half of the window, that shows a warm-up. 1.01: a
            linear warm-up over 10,000 steps still rises by 1.3 % at its end.
        norm_trend: Slope of the gradient norm, in standard errors, at which a plateau is about to end. 4: noise
            has such a slope once in 30,000 times.
        weight_growth: Growth of the weights, as a factor, that shows learning. 1.1: runs that learned nothing grew by 1
            to 2 %, matrix factorizations that leave a saddle by 25 % and more.
        new_low: Probability of a new low in each block of 4 steps, 0.5 to 1, from which the sequential test of (2)
            takes a loss for falling. 0.5: every second block, noise included.
        hidden_fall: Fall, as a fraction, that the noise of the losses must not hide, for (2). 0.2: healthy runs fell by
            more in the first 150 steps; random labels with batches of 16 show no smaller one in as many.
        travel: Sum of the update/weight ratios of the window below which a plateau is info. 0.1: most of what such
            weights compute is what they were initialized to.
        constant_left: Part of the first loss above which (5) and (9) judge a loss. 0.5: a model that has learned more
            tells its samples apart, and a decay may lead once little is left.
        constant_first: Spread of the first losses in units of the newest spread, at least, for (5). 10: the loss did
            depend on the batch.
        constant_batches: Part of the batches of the window that must differ, 0..1, for (5). 0.5: most of them.
        shrunk: Newest norm of a weight matrix in units of its first norm, at most, as the median over matrices, for
            (6). 0.01: the outputs of three such layers are a millionth of what they were, and only biases are left.
        unreachable: Fraction of the variance of the targets that stays whatever the model learns, for (7). 0.1: noise
            around the bound of an activation is less, and half of all standardized targets are below 0.
        inward: Fall of the norm of the median weight matrix over the length of its path, 0..1, from which updates are
            mostly decay, for (9). 0.5: a decay alone has 1; of 259 healthy scripts none came above 0.3.
        inward_most: The same, above which other code shrinks the weights. 1.5: the length is off by a third at most.
        inward_intervals: Intervals between two measurements that make the path of (9). 4: 40 steps, by default.
    """

    code: ClassVar[str] = "GW505"
    kind: ClassVar[str] = "loss-plateau"
    every: int = 10
    patience: int = 128
    fall: float = 0.03
    constant: float = 0.0003
    trend: float = -1.5
    planned: int = 20
    single_loss: float = 0.5
    windows_ahead: int = 4
    slow_start: float = 1.5
    loss_growth: float = 2.0
    highs: float = 0.5
    climb_patience: int = 64
    rate_growth: float = 1.01
    norm_trend: float = 4.0
    weight_growth: float = 1.1
    new_low: float = 0.5
    hidden_fall: float = 0.2
    travel: float = 0.1
    constant_left: float = 0.5
    constant_first: float = 10.0
    constant_batches: float = 0.5
    shrunk: float = 0.01
    unreachable: float = 0.1
    inward: float = 0.5
    inward_most: float = 1.5
    inward_intervals: int = 4

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run."""
        yield from findings_of(self, history, self._signs(history))

    def _signs(self, history: History) -> Iterator[Sign]:
        """Yield the observation of each mechanism, in a fixed order."""
        # before the wait: the graph proves a wrong pair at the first step
        yield from find_wrong_pairs(history)
        unreachable = list(find_unreachable_targets(history, unreachable=self.unreachable))
        yield from unreachable
        if unreachable:
            return
        found = find_zero_loss(history) or find_constant_loss(
            history,
            constant=self.constant,
            left=self.constant_left,
            first=self.constant_first,
            batches=self.constant_batches,
        )
        has_fallen = self._has_fallen(history)
        found = found or find_inward_updates(
            history, share=(self.inward, self.inward_most), intervals=self.inward_intervals, left=self.constant_left
        )
        if not found and not has_fallen:
            found = find_collapsed_weights(history, shrunk=self.shrunk) or find_climbing_loss(
                history, growth=self.loss_growth, highs=self.highs, wait=self.climb_patience, travel=self.travel
            )
        if found:
            yield found
        if found or not self._has_waited(history):
            return
        if has_fallen:
            sign = find_constant_predictions(history, patience=self.patience, travel=self.travel)
            since = history.step // 2  # it may take a while to learn the mean
        else:
            sign = find_stall(history, new_low=self.new_low, hidden_fall=self.hidden_fall, travel=self.travel)
            since = SETTLING_STEPS
        if sign and self._is_standing(history, since):
            yield sign

    def _has_fallen(self, history: History) -> bool:
        return has_fallen(history, fall=self.fall, single=self.single_loss)

    def _is_standing(self, history: History, since: int) -> bool:
        """Return whether the loss stands still while neither the gradients nor the weights announce progress."""
        # shortly after the wait any downward trend defers the report
        is_slow = history.step < self.slow_start * self.patience
        return (
            is_level(
                history,
                since,
                growth=self.loss_growth,
                max_trend=self.trend,
                fall=None if is_slow else self.fall,
                ahead=self.windows_ahead,
            )
            and not is_held_back(history, rate_growth=self.rate_growth)
            and not may_leave_saddle(history, since, norm_trend=self.norm_trend, weight_growth=self.weight_growth)
        )

    def can_judge(self, history: History) -> bool:
        """Return whether the wait is over, or the loss has fallen: a falling loss is not a plateau."""
        return self._has_waited(history) or self._has_fallen(history)

    def _has_waited(self, history: History) -> bool:
        return history.step >= max(self.patience, MIN_WAIT_STEPS, (history.info.total_steps or 0) // self.planned)

    def recovery(self, history: History, finding: Finding) -> Recovery | None:
        """Return the step from which the loss has been clearly below its start."""
        proofs = (find_wrong_pairs(history), find_unreachable_targets(history, unreachable=self.unreachable))
        is_proved = any(sign.layer == finding.layer for proof in proofs for sign in proof)
        if any(q.key == INWARD for q in finding.evidence):
            is_over = is_learned(history, left=self.constant_left)
            return Recovery(history.step, "the model has learned nevertheless") if is_over else None
        if is_proved or find_constant_predictions(history, patience=self.patience, travel=self.travel):
            return None
        end = fall_of_loss(history, fall=self.fall)
        return None if end is None else Recovery(end, f"the loss fell to {newest_loss(history):.4g}")

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("the loss climbs from the start", make_climbing(until=200), (None,))
        yield Example("the loss climbs at first, and then falls", make_climbing(until=50))
        yield Example("the loss stays where it was", make_flat().history(), (None,))
        yield from make_proofs()
        yield from make_shrinking()
        drift = Synthetic(steps=240)
        drift.loss_T[:] = 2.3 * (1 - 2e-5 * drift.t_T) * np.exp(0.003 * drift.rng.standard_normal(drift.steps))
        yield Example("labels are random: the loss falls steadily, by next to nothing", drift.history(), (None,))
        zero = Synthetic(steps=40).no_gradient(None, zero=True)
        zero.loss_T[:] = 0
        yield Example("the loss is exactly 0: every margin is met, or every label is ignored", zero.history(), (None,))
        zero.loss_T[:5] = 0.1
        yield Example("a loss that is 0 after it was not", zero.history())
        yield Example(
            "all embeddings are one point, and a triplet loss is at its margin", make_collapsed(spread=1e-5), (None,)
        )
        yield Example("losses of batches that differ by a thousandth", make_collapsed(spread=1e-3))
        yield Example("every batch is the same one", make_collapsed(spread=1e-5, equal_batches=True))
        unclear = make_flat().add_event(UNCLEAR, step=100).history()
        yield Example("samples are too few to tell whether predictions fit", unclear)
        noisy = make_flat(fall=0.2)
        noisy.loss_T *= np.exp(0.35 * noisy.rng.standard_normal(noisy.steps))
        yield Example("a slow fall that the noise of the batches hides", noisy.history())
        slow = make_flat()
        slow.update_factor_TL *= 1e-3
        yield Example("the weights have hardly moved: for information", slow.history(), (None,))
        yield Example("a healthy run", Synthetic(steps=200).history())
        yield Example("a slow but steady fall", make_flat(fall=0.06).history())
        warm = make_flat()
        warm.lr_T *= 1 + warm.t_T
        yield Example("the rate is still rising", warm.history())
        saddle = make_flat()
        saddle.weight_l2_TL *= 1 + 0.002 * saddle.t_T[:, None]
        yield Example("the weights grow: the run leaves a saddle", saddle.history())
        yield Example("two embeddings that are multiplied leave a saddle, and the rest waits", make_product())
        yield Example("a loss that falls to log C and stays there", make_flat(guesses=True).history(), (None,))
        yield Example("what fell was the mean of the targets", make_constant(UNPAIRED), (None,))
        yield Example("predictions began to fit", make_constant(UNPAIRED, PAIRED))
        rare = make_constant(UNPAIRED, unread=0.9)
        yield Example("a batch reads a tenth of the rows of an embedding", rare)
        yield from make_unjudged()
        floor = Synthetic(steps=240)
        floor.loss_T[60:] = 0.9 * np.exp(0.02 * floor.rng.standard_normal(180))
        yield Example("a floor after a fall, as label smoothing has", floor.history())
        late = make_flat()
        late.loss_T[120:] *= np.exp(-0.02 * (late.t_T[120:] - 120))
        yield Example("a plateau that ends", late.history())
