"""A step that a detector rules out is one at which it finds nothing, whatever the history is like."""

import itertools

import numpy as np
import pytest

from gradwatch.detect import ChoosyDetector, detectors
from gradwatch.detect.data_and_loss.loss_plateau import LossPlateau
from gradwatch.history.lookahead import Ahead
from gradwatch.history.store import History, Rows, joined
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.table import LAID_WITHIN

ALL = detectors()
CHOOSY = [d for d in ALL if isinstance(d, ChoosyDetector)]
EXAMPLES = [(f"{d.kind}: {e.name}", e.history) for d in ALL for e in type(d).examples()]


def fed(history, first):
    """The rows of a history as they were fed, each by itself, from a step on."""
    steps_T, param_TSL = history.param.rows()
    run_TSL = history.run.rows()[1]
    act_steps_T, act_TSL = history.act.rows()
    act = dict(zip(act_steps_T.tolist(), act_TSL, strict=True))
    for step, param_SL, run_SL in zip(steps_T.tolist(), param_TSL, run_TSL, strict=True):
        run = dict(zip(history.run.statistics, run_SL[:, 0].tolist(), strict=True))
        if step >= first:
            yield history.row(step, run=run, param_SL=param_SL, act_SL=act.get(step))


def blocks(rows, rng):
    """The rows in blocks of any length, up to all that are taken in at once."""
    while part := list(itertools.islice(rows, int(np.exp(rng.uniform(0, np.log(LAID_WITHIN)))))):
        yield joined(part)


class Replay:
    """Asks all detectors about a history as it grows again.

    Attributes:
        found: Step and kind where `detect` yielded something.
        ruled_out: The same where it had been ruled out.
    """

    def __init__(self, stored, *, first=0, seed=0):
        self.history = History(stored.info, groups=stored.groups)
        self.history.events.extend(stored.events)
        self.history.begin(first)
        self.found, self.ruled_out = set(), set()
        for rows in blocks(fed(stored, first), np.random.default_rng(seed)):
            for _ in self.history.taking(rows, stops=self.asking(rows)):
                self.detect()

    def asking(self, rows):
        """Rule out what can be, anew after each finding, as the pipeline does."""
        known = None
        for stop in range(1, rows.num_steps + 1):
            if known != len(self.found):
                known = len(self.found)
                for detector in CHOOSY:
                    ahead = Ahead(self.history, every=detector.every, samples=rows.samples)
                    self.note(detector, ahead, detector.rules_out(ahead))
            yield stop

    def note(self, detector, ahead, is_out_D):
        assert is_out_D.shape == ahead.steps_D.shape
        for step, is_out in zip(ahead.steps_D.tolist(), is_out_D.tolist(), strict=True):
            (self.ruled_out.add if is_out else self.ruled_out.discard)((step, detector.kind))

    def detect(self):
        for detector in ALL:
            if self.history.step % detector.every == 0:
                for finding in detector.detect(self.history):
                    self.history.report(finding)
                    self.found.add((self.history.step, detector.kind))


@pytest.mark.parametrize(("name", "history"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_what_is_found_was_not_ruled_out(name, history):
    replay = Replay(history)

    assert sorted(replay.found & replay.ruled_out) == []


@pytest.mark.parametrize(("name", "history"), EXAMPLES, ids=[name for name, _ in EXAMPLES])
def test_what_is_found_in_a_history_that_begins_late_was_not_ruled_out(name, history):
    replay = Replay(history, first=history.step // 3, seed=1)

    assert sorted(replay.found & replay.ruled_out) == []


def disturbed(seed):
    """A run with stretches in which a statistic is missing, zero or something else, and a few wild values."""
    rng = np.random.default_rng(seed)
    made = Synthetic(steps=300, layers=int(rng.integers(1, 9)), activations=seed % 3, noise=rng.choice([0.1, 0.5, 1.5]))
    rows = joined([row._replace(samples=()) for row in fed(made.history(), 0)])
    counts = made.history().param.statistics.index("grad.nonfinite")
    for values_TSL in (rows.param_TSL[:, :counts], rows.param_TSL[:, counts + 1 :], rows.run_TS[:, :, None]):
        for _ in range(4):
            first, statistic, layer = (int(rng.integers(size)) for size in values_TSL.shape)
            stretch = slice(first, first + int(rng.integers(1, 200)))
            values_TSL[stretch, statistic, layer] *= rng.choice([np.nan, 0.0, 1e-9, 1e-3, 10.0, 1e4])
        wild = rng.random(values_TSL.shape) < 0.001
        values_TSL[wild] = rng.choice([np.nan, 0.0, 1e-6, 30.0, 1e20, np.inf], wild.sum())
    stored = History(made.info)
    for first in range(0, 300, 100):
        stored.extend(Rows(*(array[first : first + 100] for array in rows[:3])))
    return stored


def test_what_is_found_among_missing_and_wild_values_was_not_ruled_out():
    kinds = set()
    for seed in range(40):
        replay = Replay(disturbed(seed), seed=seed)
        assert sorted(replay.found & replay.ruled_out) == [], seed
        kinds |= {kind for _, kind in replay.found}

    assert len(kinds) > 6, "the test needs runs that are ill"


@pytest.fixture(scope="module")
def healthy():
    """What became of a healthy run whose weights are measured every 60 steps, as a tight budget has it."""
    made = Synthetic(steps=200, activations=2)
    made.weight_l2_TL[made.t_T % 60 > 0] = np.nan
    return Replay(made.history())


@pytest.mark.parametrize("detector", CHOOSY, ids=lambda d: d.kind)
def test_most_steps_of_a_healthy_run_are_ruled_out(detector, healthy):
    due = [step for step in range(200) if step % detector.every == 0]

    assert sum((step, detector.kind) in healthy.ruled_out for step in due) > len(due) / 2


def test_what_is_ahead_is_what_the_history_will_hold():
    made = Synthetic(steps=300, activations=2)
    history, seen = History(made.info), []

    def looking(rows):
        ahead = Ahead(history, every=3)
        seen.extend(
            zip(
                ahead.steps_D.tolist(),
                ahead.counts_D.tolist(),
                ahead.scalar("loss"),
                ahead.scalars("loss", 40),
                ahead.newest("grad.l2"),
                ahead.windows("grad.l2", 40, 5),
                strict=True,
            )
        )
        yield from range(1, rows.num_steps + 1)

    for rows in blocks(fed(made.history(), 0), np.random.default_rng(0)):
        for _ in history.taking(rows, stops=looking(rows)):
            if history.step % 3 == 0:
                step, count, loss, loss_W, l2_L, l2_W = seen.pop(0)
                assert (step, count) == (history.step, len(history.run.steps()))
                length = min(40, count)
                assert loss == history.run.newest("loss")[0]
                assert np.array_equal(l2_L, history.param.newest("grad.l2"))
                assert np.array_equal(loss_W[-length:], history.scalar("loss", 40))
                assert np.array_equal(l2_W[-length:], history.param.window("grad.l2", 40)[:, 5])
                assert np.isnan(loss_W[:-length]).all()
    assert not seen


@pytest.mark.parametrize(
    ("name", "ruled_out"),
    [("what fell was the mean of the targets", []), ("predictions began to fit", [*range(130, 200, 10)])],
)
def test_a_plateau_is_ruled_out_again_once_predictions_fit(name, ruled_out):
    (history,) = (e.history for e in LossPlateau.examples() if e.name == name)

    seen = Replay(history).ruled_out

    assert sorted(step for step, kind in seen if kind == LossPlateau.kind and step >= 130) == ruled_out
