"""GW105: norms swing wildly up and down between updates, and the loss keeps bouncing back to where it began."""

# T = steps of a window

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from gradwatch.detect import Example
from gradwatch.detect.features.baseline import STEPS, beginning, start
from gradwatch.detect.features.consequences import settled
from gradwatch.detect.features.events import noted
from gradwatch.detect.features.finding import finding_of
from gradwatch.detect.features.robust_stats import Floats, log10, median
from gradwatch.detect.features.structure import depth
from gradwatch.detect.gradients._alternating_batches import (
    LENGTH,
    NO_CHANCE,
    TURNS,
    Pair,
    apart,
    contrary,
    first_losses,
    have_the_same_gradients,
    stretch,
    swing,
    takes_turns,
)
from gradwatch.detect.gradients._alternating_examples import (
    bouncing,
    made_of_two_sources,
    made_to_bounce,
    of_two_sources,
    sorted_classes,
    stretches,
    turned,
)
from gradwatch.events import CLASSES
from gradwatch.history.lookahead import Ahead
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Event, Finding, Quantity


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OscillatingGradient:
    """Norms that swing up and down while the loss gets nowhere.

    What it measures: five things. (1) Over the newest 48 or 96 steps, without their trend, the spread of the log of the
    total norm (from its 10 % to its 90 % quantile), how often it crosses its middle, and its correlation from one step
    to the next. Noise of small batches is as wide but uncorrelated; an optimizer that overshoots alternates (towards
    -1), data in a bad order swing in waves (towards 1). At least twice within the window the loss must have
    come back up to where the run began, from a third of that. (2) Where the tape says that the loss is a cross entropy
    of several classes, the gradient of the output's bias: the mean over the batch of predicted probabilities minus
    labels. With n samples that are drawn at random it falls to 1 / root n as soon as the shares of the classes are
    learned. Near 1 it says that nearly all of the batch are of one class, and of one that was not predicted; step after
    step, with a loss above that of not knowing, that each batch takes back what the one before taught. (3) Whether the
    norms are of two kinds that come in turn, every second to fourth step, further apart than a rank sum of random
    batches is, with a gap of `decades` between their medians, while the same tensors have gradients in both: batches of
    two sources. Where the kind with the small gradients has learned nothing, and has as high a loss as the other, it is
    not heard. With any gap it is unlearned where its loss grows threefold, and threefold by that of the other. Nor is
    it heard, whatever tensors and losses are its own, where the gap is of 2.5 decades, or of 2 after 120 steps. (4)
    Stretches of batches in turn: at least four jumps of the loss in one step from a third of where the run began back
    up to there, equally far apart. (5) Batches in turn that contradict each other: gradients have a part that goes one
    way whenever it is the turn of the same batches and is taken back by the other turns, as the means of their elements
    show (the cosine of the angle with a fixed direction), while a fifth of the loss is left, or all of it, where the
    turn comes after four or six steps: over as many an optimizer swings by itself, too. Two sources that only differ
    pull the same way for the most part while there is something left to learn.

    Why it matters: what one update learns the next one undoes.

    When it is wrong: tasks in turn whose losses differ by that much and stay as high as in the beginning; up to 2
    decades those that have layers of their own are known by them. A loss whose swings grow from window to window
    follows targets that move, as values in Q-learning do, and is left out.

    What to do: shuffle the data (class after class is the usual reason for waves); lower the learning rate or the
    momentum (the usual reason for alternation); enlarge the batch.

    Source: LeCun et al. 1998, "Efficient BackProp", sec. 4.2 (shuffling) and 4.5 (a learning rate beyond
    2 / curvature overshoots); Cohen et al. 2021, https://arxiv.org/abs/2103.00065, sec. 2.

    Args:
        every: Steps between two looks. 10: it goes on for long.
        decades: Spread of the norm, in powers of ten. 1: half of it would be usual for small batches.
        correlation: Least size of the correlation from step to step. 0.4: of 48 uncorrelated values the correlation
            has a standard deviation of 0.14.
        crossings: Least number of crossings of the middle. 6: three full swings.
        return_to: Loss that the peaks must reach, in units of the largest of the first 8 steps. 0.75: nearly all that
            was learned is lost again.
        one_sided: Gradient of the output's bias, in units of what a batch of one class gives, for (2). 0.6: 16 random
            samples give 0.25 on average.
        contrary: Share of the gradients, 0..1, that turns take from each other, for (5). 0.2: ten times
            what 96 random batches have at each period; two noise levels in turn, of one denoiser, come to 0.14. Half of
            it where nothing is learned.
        share: Share of the newest 48 steps, 0..1, at which the gradient and the loss must be so. 0.5: what was learned
            of a class while it came may lower the loss at the others.
    """

    code: ClassVar[str] = "GW105"
    kind: ClassVar[str] = "oscillating-gradient"
    every: int = 10
    decades: float = 1.0
    correlation: float = 0.4
    crossings: int = 6
    return_to: float = 0.75
    one_sided: float = 0.6
    contrary: float = 0.2
    share: float = 0.5

    def rules_out(self, ahead: Ahead) -> NDArray[np.bool_]:
        """Say at which steps neither norms nor losses swing, jump or stay as in any of the five."""
        is_early_D = (ahead.counts_D < LENGTH) | (ahead.steps_D < LENGTH + BEGINNING)
        if not len(ahead.history.run.steps(1)) or len(beginning(ahead.history, "loss")) < STEPS:
            return np.asarray(is_early_D, np.bool_)
        high = self.return_to * float(np.fmax.reduce(beginning(ahead.history, "loss", BEGINNING)))
        short_DW, long_DW = (ahead.scalars("loss", length) for length in WAVES)
        log_DW = log10(ahead.scalars(NORM, LENGTH))
        lowest_D, highest_D = np.fmin.reduce(long_DW, axis=1), np.fmax.reduce(long_DW, axis=1)
        swings_D = (highest_D >= high) & (lowest_D < high / 3)
        if not (highest_D <= 3 * lowest_D).all():  # else no loss is as wide as in waves
            swings_D |= self._may_be_waves(log_DW, short_DW)
            swings_D |= self._may_be_waves(log10(ahead.scalars(NORM, 2 * LENGTH)), long_DW)
        is_due_D = (ahead.steps_D >= PATIENCE) & (ahead.steps_D % SELDOM == 0)
        swings_D |= is_due_D & (median(short_DW.T) >= LEFT * start(ahead.history)[0])
        swings_D |= (np.abs(apart(log_DW)) >= NO_CHANCE).any(axis=1)
        for event in ahead.history.events:
            if event.kind == CLASSES.name:
                swings_D |= self._may_be_one_sided(ahead, event)
        return np.asarray(~swings_D | is_early_D, np.bool_)

    def _may_be_waves(self, log_DW: Floats, loss_DW: Floats) -> NDArray[np.bool_]:
        """Say at which steps norms may be as wide as in waves, and the loss is.

        Of values whose 10 % and 90 % quantiles lie a distance apart, the mean square is a twentieth of its square or
        more, and taking a trend off them makes it no larger.
        """
        sorted_DW, tenth = np.sort(loss_DW, axis=1), loss_DW.shape[1] // 10
        is_wide_D = log_DW.var(axis=1) >= self.decades**2 / 20 * (1 - ROUNDING)
        return np.asarray(is_wide_D & (sorted_DW[:, -tenth - 1] > 3 * np.abs(sorted_DW[:, tenth])))

    def _may_be_one_sided(self, ahead: Ahead, event: Event) -> NDArray[np.bool_]:
        """Say at which steps the gradient of the output's bias is mostly that of batches of one class."""
        if not len(ahead.history.run.steps(1)):
            return np.ones(len(ahead), np.bool_)
        scale = _knowing_nothing(ahead.history, event) / math.log(event.values["classes"])
        size_DW = ahead.windows("grad.l2", LENGTH, _place(ahead.history, event))
        return np.asarray((size_DW >= self.one_sided * scale * (1 - ROUNDING)).mean(axis=1) >= self.share)

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run."""
        if history.step < LENGTH + BEGINNING or len(history.run.steps(LENGTH)) < LENGTH:
            return
        for event in noted(history, CLASSES):
            yield from self._one_sided(history, event)
        yield from self._in_turn(history)
        yield from self._in_stretches(history)
        yield from self._contrary(history)
        yield from next((found for length in WAVES if (found := [*self._in_waves(history, length)])), ())

    def _in_waves(self, history: History, length: int) -> Iterator[Finding]:
        """Yield a finding where the norm swings over so many steps, and the loss back up to where it began."""
        loss_T, log_T = np.sort(history.scalar("loss", length)), log10(history.scalar(NORM, length))
        if len(loss_T) < length:
            return
        low, high = float(loss_T[length // 10]), float(loss_T[-length // 10])
        if not high > 3 * abs(low):  # also where one is nan
            return
        spread, correlation, crossings = swing(log_T)
        is_swinging = spread >= self.decades and abs(correlation) >= self.correlation and crossings >= self.crossings
        if not is_swinging or not self._comes_back(history, length):
            return
        if _is_growing(history, high) or takes_turns(history):
            return
        yield finding_of(
            self,
            history,
            f"the gradient norm swings by a factor of {10**spread:.3g}, and the loss bounces back to its start",
            Quantity(
                key="grad_norm.spread_decades", label="spread of grad_norm.before_clip", value=spread, unit="decades"
            ),
            Quantity(key="grad_norm.autocorrelation", label="correlation from step to step", value=correlation),
            Quantity(
                key="grad_norm.crossings", label=f"crossings of the middle in {length} steps", value=float(crossings)
            ),
            Quantity(key="loss.low", label="loss, 10 % quantile", value=low),
            Quantity(key="loss.high", label="loss, 90 % quantile", value=high),
            severity=settled(history, self.kind),
        )

    def _one_sided(self, history: History, event: Event) -> Iterator[Finding]:
        """Yield a finding where the batches hold one class each, and seldom the one that was predicted."""
        of, loss_T = event.values, history.scalar("loss", LENGTH)
        nats, knowing_nothing = math.log(of["classes"]), _knowing_nothing(history, event)
        if of["samples"] < SAMPLES or of["classes"] < CLASSES_AT_LEAST or not loss_T.max() > knowing_nothing > 0:
            return
        scale = knowing_nothing / nats
        size_T = history.param.window("grad.l2", LENGTH)[:, _place(history, event)] / scale
        is_ill_T = (size_T >= self.one_sided) & (loss_T >= knowing_nothing)
        if not is_ill_T.mean() >= self.share:
            return
        size = float(median(size_T))
        yield finding_of(
            self,
            history,
            "nearly all samples of a batch are of one class, and seldom of the one that the last ones taught",
            Quantity(key="batch.one_sided", label="labels minus predictions, mean over the batch", value=size),
            Quantity(
                key="batch.one_sided_random",
                label="the same of as many random samples, at most",
                value=of["samples"] ** -0.5,
            ),
            Quantity(key="loss.chance", label="loss of knowing nothing", value=knowing_nothing),
            Quantity(key="loss.median", label="loss, median of 48 steps", value=float(median(loss_T))),
            severity=settled(history, self.kind),
        )

    def _in_turn(self, history: History) -> Iterator[Finding]:
        """Yield a finding where the batches of one source in turn drown those of another."""
        log_T = log10(history.scalar(NORM, LENGTH))
        if np.isnan(log_T).any() or "+" in history.info.optimizer:
            return
        far_K = apart(log_T[None])[0]
        found = [k for k in np.argsort(-np.abs(far_K)).tolist() if abs(far_K[k]) >= NO_CHANCE]
        for k in sorted(found, key=lambda k: TURNS[k][0])[:1]:
            (period, turn), far = TURNS[k], far_K[k]
            is_quiet_T = (np.arange(LENGTH)[::-1] % period == turn) == (far < 0)
            gap = float(median(log_T[~is_quiet_T]) - median(log_T[is_quiet_T]))
            loss_T = history.scalar("loss", LENGTH)
            loss = float(median(loss_T[is_quiet_T])), float(median(loss_T[~is_quiet_T]))
            first = first_losses(history, is_quiet_T, period, STEPS if gap >= self.decades else FEW)
            if self._is_unheard(history, is_quiet_T, gap=gap, loss=loss, first=first):
                yield self._turns(history, period=period, gap=gap, loss=loss[0], first=first[0])

    def _is_unheard(
        self, history: History, is_quiet_T: NDArray[np.bool_], *, gap: float, loss: Pair, first: Pair
    ) -> bool:
        """Say whether nothing is learned of the batches with small gradients, for the others' sake."""
        if not loss[0] > UNHEARD * first[0] > 0:
            return False
        are_the_same = have_the_same_gradients(history, is_quiet_T)
        if gap >= self.decades:
            is_drowned = gap >= (DROWNED if history.step < PATIENCE else DROWNED_FOR_LONG)
            return is_drowned or (are_the_same and (loss[0] > loss[1] / 3 or loss[0] > WORSE * first[0]))
        return are_the_same and loss[0] / first[0] > WORSE * max(1, loss[1] / first[1])

    def _turns(self, history: History, *, period: int, gap: float, loss: float, first: float) -> Finding:
        return finding_of(
            self,
            history,
            f"gradient norms are of two kinds in turn, {10**gap:.3g} times apart: one every {period} steps, "
            "and what gives the smaller ones is not learned",
            Quantity(
                key="sources.gap_decades", label="gap between the medians of the two kinds", value=gap, unit="decades"
            ),
            Quantity(key="period", value=float(period), unit="steps"),
            Quantity(key="sources.quiet_loss", label="loss of the batches with small gradients", value=loss),
            Quantity(key="sources.quiet_loss_first", label="the same in the beginning", value=first),
            severity=settled(history, self.kind),
        )

    def _in_stretches(self, history: History) -> Iterator[Finding]:
        """Yield a finding where the loss jumps back to where the run began after every so many steps."""
        first = float(np.fmax.reduce(beginning(history, "loss", BEGINNING)))
        high = self.return_to * first
        length = stretch(history.scalar("loss", 2 * LENGTH), high=high, low=high / 3)
        if length is None or takes_turns(history):
            return
        yield finding_of(
            self,
            history,
            f"every {length} steps the loss jumps back to where it began: other batches come, and what was "
            "learned of the last ones is lost",
            Quantity(key="stretches.steps", label="steps from jump to jump", value=float(length), unit="steps"),
            Quantity(key="loss.first_max", label="loss of the first steps, at most", value=first),
            Quantity(
                key="loss.median", label="loss, median of 48 steps", value=float(median(history.scalar("loss", LENGTH)))
            ),
            severity=settled(history, self.kind),
        )

    def _contrary(self, history: History) -> Iterator[Finding]:
        """Yield a finding where batches in turn pull against each other, and much of the loss is left."""
        loss, begun = float(median(history.scalar("loss", LENGTH))), start(history)[0]
        is_due = history.step >= PATIENCE and history.step % SELDOM == 0
        if not is_due or not loss >= LEFT * begun > 0 or "+" in history.info.optimizer or takes_turns(history):
            return
        mean_TL, l2_TL = (history.param.window(name, 2 * LENGTH) for name in ("grad.mean", "grad.l2"))
        if len(mean_TL) < 2 * LENGTH:
            return
        period, share = contrary(mean_TL, l2_TL, np.square(depth(history).root_numel_L))
        is_unlearned = loss >= UNHEARD * begun
        if share < self.contrary / (1 + is_unlearned) or (period > THREE and not is_unlearned):
            return
        yield finding_of(
            self,
            history,
            f"every {period} steps gradients pull against those between, and what one update teaches the others undo",
            Quantity(
                key="contrary.share",
                label="share of the gradients that the turns take from each other",
                value=share,
                unit="0..1",
            ),
            Quantity(key="contrary.period", label="steps until a turn comes again", value=float(period), unit="steps"),
            Quantity(key="loss.median", label="loss, median of 48 steps", value=loss),
            Quantity(key="loss.start", label="the same where learning began", value=begun),
            severity=settled(history, self.kind),
        )

    def _comes_back(self, history: History, length: int) -> bool:
        """Say whether the loss has been far below its start, and back up there, again and again."""
        first = float(np.fmax.reduce(beginning(history, "loss", BEGINNING)))
        was_low, returns = False, 0
        for loss in history.scalar("loss", length).tolist():
            if was_low and loss >= self.return_to * first:
                was_low, returns = False, returns + 1
            was_low = was_low or loss < self.return_to * first / 3
        return returns >= 2

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("an optimizer overshoots at every step", bouncing(period=2), (None,))
        yield Example("the data come class after class", bouncing(period=12), (None,))
        yield Example(
            "the data come station after station, in waves of twenty-four steps", bouncing(period=24), (None,)
        )
        yield Example("every second batch has inputs of another scale", of_two_sources(learned=0.95), (None,))
        yield Example("two tasks in turn, of which both are learned", of_two_sources(learned=0.4))
        yield Example("one batch of three has other units", of_two_sources(learned=4, apart=3, period=3), (None,))
        yield Example("two noise levels in turn, one of them learned first", of_two_sources(learned=0.95, apart=3))
        tasks = made_to_bounce(period=2)
        tasks.grad_l2_TL[1::2, 11] = np.nan
        yield Example("two tasks in turn, each with a head and a loss of its own", tasks.history())
        tasks = made_of_two_sources(learned=0.95, apart=1000)
        tasks.grad_l2_TL[1::2, 11] = np.nan
        yield Example("two tasks in turn, one a thousand times as loud, the other unlearned", tasks.history(), (None,))
        worse = made_of_two_sources(learned=5.0, apart=40)
        worse.loss_T[1::2] = 80.0
        yield Example("one source unteaches the other, which has a smaller loss", worse.history(), (None,))
        yield Example("two sources of ten batches each in turn", stretches(10), (None,))
        yield Example("a new task every forty steps", stretches(40))
        yield Example("what half of the batches teach the others unteach", turned(back=0.2), (None,))
        yield Example("they differ, and most of it is the same for both", turned(back=0.2, common=0.4))
        yield Example("what they differ in is all that is left", turned(back=0.2, learned=0.1))
        yield Example("random batches that teach little", turned(back=0.0))
        yield Example("a healthy run", Synthetic(steps=140).history())
        yield Example("noise of tiny batches", Synthetic(steps=140, noise=1.5).history())
        yield Example("the swings grow, as values in Q-learning do", bouncing(period=12, level=0.02, growth=0.02))
        yield Example("norms alternate, but the run learns", Synthetic(steps=140).oscillating().history())
        yield Example(
            "batches of one class each, of which some is learned", sorted_classes(gradient=0.85, loss=1.1), (None,)
        )
        yield Example("random batches of labels that nobody can learn", sorted_classes(gradient=0.2, loss=1.1))
        yield Example("classes of unlike shares, before they are learned", sorted_classes(gradient=0.85, loss=0.9))


CLASSES_AT_LEAST = 3
"""Classes below which a batch of one class, with the other predicted, is what a share of 97 % looks like at first."""

SAMPLES = 16
"""Samples from which on random ones hardly ever are of one class."""

WAVES = (LENGTH, 2 * LENGTH)
"""Steps within which norms swing several times: the longer ones for waves of up to thirty."""

LOW, HIGH = LENGTH // 10, -LENGTH // 10
"""Places of the 10 % and the 90 % quantile of a window that is sorted."""

NORM = "grad_norm.before_clip"

ROUNDING = 1e-6
"""Relative error of what is computed in float32, with room to spare."""

PATIENCE = 120
"""Steps after which a run that has learned nothing is none that starts slowly."""

SELDOM = 40
"""Steps between two looks for contradictions, which take a look at many gradients."""

LEFT = 0.2
"""Part of the loss from which learning began above which much is left to learn."""

THREE = 3
"""Steps beyond which an optimizer, too, may swing at just that period; it learns meanwhile."""

WORSE = 3.0
"""Growth of the loss of one kind of batches from which on the other kind unteaches it."""

UNHEARD = 0.9
"""Part of its first loss that batches of a source keep, or all batches, which is not learned."""

FEW = 3
"""Batches of each kind that say where their loss began, before the others have spoilt it."""

DROWNED = 2.5
"""Decades between two tasks in turn from which on one rate cannot serve both; see `layer-imbalance`."""

DROWNED_FOR_LONG = 2.0
"""The same where a task is still unlearned when others have begun: what moves its layers is of the other by 99 %."""

GROWTH = 1.25
"""Growth of the loss's peaks from one window to the next beyond which they do not come back to where they were."""

BEGINNING = 8
"""Steps that say where the loss began."""


def _knowing_nothing(history: History, event: Event) -> float:
    """Return the loss of a model that has learned nothing; that of the first step, where its unit is not known."""
    of = event.values
    return math.log(of["classes"]) * of["nat"] if "nat" in of else float(beginning(history, "loss", 1)[0])


def _place(history: History, event: Event) -> int:
    """Return which parameter tensor an event is about."""
    return history.param.layers.index(event.layer or "")


def _is_growing(history: History, high: float) -> bool:
    """Say whether the loss swung in the window before this one too, by clearly less."""
    loss_T = np.sort(history.scalar("loss", 2 * LENGTH)[:-LENGTH])
    if len(loss_T) < LENGTH:
        return False
    low_before, high_before = float(loss_T[LOW]), float(loss_T[HIGH])
    return high_before > 3 * abs(low_before) and high > GROWTH * high_before
