"""Find norms that swing widely between updates while the loss keeps returning to its start (GW105)."""

# T = steps of a window

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, final

import numpy as np

from gradwatch.detect import Example
from gradwatch.detect.features.events import events_of
from gradwatch.detect.features.finding import Sign, findings_of
from gradwatch.detect.gradients.oscillating_gradient_rules.alternating_sources import find_drowned_source
from gradwatch.detect.gradients.oscillating_gradient_rules.examples import (
    make_bouncing,
    make_sorted_classes,
    make_two_sources,
)
from gradwatch.detect.gradients.oscillating_gradient_rules.one_sided_batches import find_one_sided_batches
from gradwatch.detect.gradients.oscillating_gradient_rules.opposed_optimizers import find_opposed_optimizers
from gradwatch.detect.gradients.oscillating_gradient_rules.waves import WAVE_WINDOWS_STEPS, WaveBounds, find_waves
from gradwatch.detect.gradients.oscillating_gradient_rules.window import FIRST_LOSS_STEPS, WINDOW_STEPS, max_first_loss
from gradwatch.events import CHOSEN_OUTPUTS, CLASSES, OPTIMIZERS_OPPOSED, POLICY
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OscillatingGradient:
    """Gradient norms that swing up and down while the loss does not fall.

    What it measures: swings of the gradient norm and of the loss over the newest 48 or 96 steps.

    Why it matters: each update undoes what the last updates learned.

    Example: `DataLoader(dataset, shuffle=False)` with a data set that is sorted by class.

    What to do: shuffle the data, the usual fix for waves. Lower the learning rate or the momentum, the usual fix for
    alternating norms. Use a larger batch.

    When it is wrong: alternating tasks whose losses differ greatly and stay high; targets that move, as in Q-learning,
    do not count.

    How it is detected: (1) Waves: the log of the total norm, without its trend. It has to spread widely from its 10 %
    to its 90 % quantile, cross its middle often, and correlate from step to step. At least twice the loss must come
    back up to where the run began, from a third of it. (2) Batches of one class, if the loss is a cross entropy: the
    gradient of the output's bias, which is predictions minus labels. It is near 1 if the batch holds one class that was
    not predicted, and 1 / root n for n random samples. The loss must be above chance level. (3) Two sources in turn:
    norms of two kinds, every second to fourth step, further apart than in a random order. The source with the small
    gradients is not learned: its loss stays, and is as high as the other's, or it grows threefold. At a gap of 2.5
    orders of magnitude, or 2 after 120 steps, this holds for tasks with their own tensors and losses too.

    (4) Two optimizers hold the same weights, and the cosine of their gradients is -0.8 or less, as the median over 16
    updates in turn: one takes back what the other did.

    Exceptions to the rules: tasks in turn whose losses differ by that much and stay as high as at the start. Up to a
    gap of 2 orders of magnitude, tasks are recognized if they have layers of their own. A loss whose swings grow from
    window to window follows targets that move, as values in Q-learning do, and is left out. So are waves of a
    regression of chosen outputs, such as the values of actions: each copy of the target network raises that loss again.
    So are those of a policy gradient, whose loss has the size of the advantages of its batch.

    Source: LeCun et al. 1998, "Efficient BackProp", sec. 4.2 (shuffling) and 4.5 (a learning rate beyond 2 / curvature
    overshoots); Cohen et al. 2021, https://arxiv.org/abs/2103.00065, sec. 2.

    Args:
        every: Steps between two checks. 10: the fault lasts for many steps.
        decades: Spread of the norm, in powers of ten. 1: half of it would be usual for small batches.
        correlation: Least size of the correlation from step to step. 0.4: of 48 uncorrelated values the correlation
            has a standard deviation of 0.14.
        crossings: Least number of crossings of the middle. 6: three full swings.
        return_to: Loss that the peaks must reach, in units of the largest of the first 8 steps. 0.75: nearly all that
            was learned is lost again.
        one_sided: Gradient of the output's bias, in units of the gradient of a batch of one class, for (2). 0.6: 16
            random samples give 0.25 on average.
        share: Share of the newest 48 steps, 0..1, at which gradient and loss must be so, for (2). 0.5: what was learned
            of a class in its batches may lower the loss of others.
        loss_ratio: Ratio of high to low losses, and of peaks to the valleys between them, for (1). 3: two thirds of the
            loss are learned and lost again in each swing.
        returns: Times that the loss must rise back to its start within the window, for (1). 2: one rise is not a swing.
        peak_growth: Growth of the peaks of the loss from one window to the next, above which they follow targets that
            move, for (1). 1.25: peaks that return to their start do not grow.
        task_frac: Fraction of the steps with a gradient, and of the steps without one, 0..1, above which a tensor
            belongs to one of several tasks, for (1). 0.2: with four tasks in turn it has one at a quarter of the steps.
        classes: Least number of classes, for (2). 3: with two, a batch of one class looks like a class of 97 % that is
            not learned yet.
        samples: Least number of samples per batch, for (2). 16: a random batch of them is hardly ever of one class.
        unlearned_frac: Fraction of the first loss of a source, 0..1, above which it is not learned, for (3). 0.9: a
            tenth of the loss is a clear fall.
        unlearning: Growth of the loss of the source with the small gradients at which the other one unteaches it, for
            (3). 3: a source that is merely ignored keeps its loss.
        task_ratio: Loss of the source with the large gradients over the loss of the other, from which they are
            different tasks, for (3). 3: sources of one task have losses of one size as long as neither is learned.
        drowned_decades: Gap between two tasks, in powers of ten, at which one rate cannot serve both, for (3). 2.5: the
            lead at which `layer-imbalance` reports a layer.
        drowned_late_decades: The same gap for a task that is unlearned after `drowned_late_steps`. 2: the other task
            makes 99 % of its updates.
        drowned_late_steps: Steps after which an unlearned task does not merely start slowly, for (3). 120: more than
            two windows.
    """

    code: ClassVar[str] = "GW105"
    kind: ClassVar[str] = "oscillating-gradient"
    every: int = 10
    decades: float = 1.0
    correlation: float = 0.4
    crossings: int = 6
    return_to: float = 0.75
    one_sided: float = 0.6
    share: float = 0.5
    loss_ratio: float = 3.0
    returns: int = 2
    peak_growth: float = 1.25
    task_frac: float = 0.2
    classes: int = 3
    samples: int = 16
    unlearned_frac: float = 0.9
    unlearning: float = 3.0
    task_ratio: float = 3.0
    drowned_decades: float = 2.5
    drowned_late_decades: float = 2.0
    drowned_late_steps: int = 120

    def detect(self, history: History) -> Iterator[Finding]:
        """Yield a finding for the run, or for the weights that two optimizers hold."""
        yield from findings_of(self, history, find_opposed_optimizers(history))
        if not self.can_judge(history) or len(history.run.steps(WINDOW_STEPS)) < WINDOW_STEPS:
            return
        yield from findings_of(self, history, self._signs(history))

    def can_judge(self, history: History) -> bool:
        """Return whether a window follows the first losses."""
        return history.step >= WINDOW_STEPS + FIRST_LOSS_STEPS

    def _signs(self, history: History) -> Iterator[Sign | None]:
        """Yield the observation of each mechanism, in a fixed order."""
        for event in events_of(history, CLASSES):
            yield find_one_sided_batches(
                history,
                event,
                one_sided=self.one_sided,
                share=self.share,
                classes=self.classes,
                samples=self.samples,
            )
        is_late = history.step >= self.drowned_late_steps
        yield find_drowned_source(
            history,
            every=self.every,
            decades=self.decades,
            drowned_decades=self.drowned_late_decades if is_late else self.drowned_decades,
            unlearned_frac=self.unlearned_frac,
            unlearning=self.unlearning,
            task_ratio=self.task_ratio,
        )
        if self._may_return(history):
            waves = (self._find_waves(history, length) for length in WAVE_WINDOWS_STEPS)
            # the first window with waves suffices
            yield next((sign for sign in waves if sign), None)

    def _may_return(self, history: History) -> bool:
        """Return whether the loss has been near its start and far below it: cheap, and necessary for a return."""
        loss_T = history.scalar("loss", 2 * WINDOW_STEPS)
        highest, lowest = float(np.fmax.reduce(loss_T)), float(np.fmin.reduce(loss_T))
        return not highest <= self.loss_ratio * lowest and highest >= self.return_to * max_first_loss(history)

    def _find_waves(self, history: History, length: int) -> Sign | None:
        bounds = WaveBounds(
            decades=self.decades,
            correlation=self.correlation,
            crossings=self.crossings,
            return_to=self.return_to,
            loss_ratio=self.loss_ratio,
            returns=self.returns,
            peak_growth=self.peak_growth,
            task_frac=self.task_frac,
        )
        return find_waves(history, bounds, length=length)

    @classmethod
    def examples(cls) -> Iterator[Example]:
        """Yield histories that fire, that stay quiet, and near misses."""
        yield Example("an optimizer overshoots at every step", make_bouncing(period=2).history(), (None,))
        yield Example("batches come class after class", make_bouncing(period=12).history(), (None,))
        yield Example(
            "batches come station after station, in waves of 24 steps", make_bouncing(period=24).history(), (None,)
        )
        yield Example(
            "every second batch has inputs of another scale", make_two_sources(learned=0.95).history(), (None,)
        )
        yield Example("two tasks in turn, both of which are learned", make_two_sources(learned=0.4).history())
        yield Example(
            "every third batch has other units", make_two_sources(learned=4, apart=3, period=3).history(), (None,)
        )
        yield Example(
            "two noise levels in turn, one of them learned first", make_two_sources(learned=0.95, apart=3).history()
        )
        tasks = make_bouncing(period=2)
        tasks.grad_l2_TL[1::2, 11] = np.nan
        yield Example("two tasks in turn, each with a head and a loss of its own", tasks.history())
        tasks = make_two_sources(learned=0.95, apart=1000)
        tasks.grad_l2_TL[1::2, 11] = np.nan
        yield Example(
            "two tasks in turn, one with gradients 1,000 times as large, the other unlearned", tasks.history(), (None,)
        )
        worse = make_two_sources(learned=5.0, apart=40)
        worse.loss_T[1::2] = 80.0
        yield Example(
            "one source makes the loss of the other grow, but that stays the smaller one", worse.history(), (None,)
        )
        text, values = "two optimizers move it by opposite gradients", {"cosine": -0.9, "tensors": 4.0}
        both = Synthetic(steps=40).add_event(OPTIMIZERS_OPPOSED, layer="judge", text=text, values=values)
        yield Example("two optimizers undo each other", both.history(), ("judge",))
        yield Example("a healthy run", Synthetic(steps=140).history())
        yield Example("noise of tiny batches", Synthetic(steps=140, noise=1.5).history())
        yield Example(
            "the swings grow, as values in Q-learning do", make_bouncing(period=12, level=0.02, growth=0.02).history()
        )
        copies = make_bouncing(period=24).add_event(CHOSEN_OUTPUTS)
        yield Example("values of actions follow a target network that is copied every 24 steps", copies.history())
        pieces = make_bouncing(period=24).add_event(POLICY).policy_gradient(divergence=0.02, clipped=0.1)
        yield Example("a policy gradient whose batches are pieces of episodes", pieces.history())
        yield Example("norms alternate, but the loss falls", Synthetic(steps=140).oscillating().history())
        yield Example(
            "batches of one class each, partly learned", make_sorted_classes(gradient=0.85, loss=1.1), (None,)
        )
        yield Example("random batches of labels that cannot be learned", make_sorted_classes(gradient=0.2, loss=1.1))
        yield Example(
            "classes of unequal frequency, before they are learned", make_sorted_classes(gradient=0.85, loss=0.9)
        )
