"""The pipeline: rows that come together are taken in as if each had come by itself."""

import itertools
import warnings

import numpy as np
import pytest

from gradwatch.attempts import MAX_FAILURES
from gradwatch.cli.options import exit_code
from gradwatch.detect import LATE_FACTOR, LATE_STEP, detectors
from gradwatch.detect.features.finding import finding_of
from gradwatch.events import LEFT_OUT
from gradwatch.history.disk.writer import Writer, read
from gradwatch.history.store import WINDOW, Histograms, History, Rows, SampledStep, concatenate
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.history.table import MAX_APPENDED_STEPS
from gradwatch.pipeline.ingest import Ingest
from gradwatch.pipeline.redetect import redetect

ALL = detectors()


def rows(history):
    """The rows of a history, as they were fed."""
    steps_T, param_TSL = history.param.rows()
    _, run_TS1 = history.run.rows()
    act_steps_T, act_TSL = history.act.rows()
    act = dict(zip(act_steps_T.tolist(), act_TSL, strict=True))
    for step, param_SL, run_S1 in zip(steps_T.tolist(), param_TSL, run_TS1, strict=True):
        run = dict(zip(history.run.statistics, run_S1[:, 0].tolist(), strict=True))
        yield history.row(step, run=run, param_SL=param_SL, act_SL=act.get(step))


def blocks(rows, length=MAX_APPENDED_STEPS):
    """The same rows, as many together as may be."""
    return (concatenate(part) for part in batched(rows, length))


def batched(rows, length):
    """The same rows in lists of at most so many."""
    rows = iter(rows)
    return iter(lambda: list(itertools.islice(rows, length)), [])


def ingest_of(history, **parts):
    ingest = Ingest(History(history.info, groups=history.groups), **parts)
    ingest.history.events.extend(history.events)
    return ingest


@pytest.fixture
def first_history():
    """The history of the first example of the first detector."""
    return next(iter(type(ALL[0]).examples())).history


@pytest.mark.parametrize("detector", ALL, ids=lambda detector: detector.kind)
def test_rows_that_come_together_give_the_findings_of_rows_that_come_one_by_one(detector):
    for example in type(detector).examples():
        asked = (
            ALL if example.layers else [detector]
        )  # others may speak of what is found, and say little of near misses
        together, apart = (ingest_of(example.history, detectors=asked) for _ in range(2))

        for block in blocks(rows(example.history)):
            together.ingest(block)
        for row in rows(example.history):
            apart.ingest(row)

        # as text: nan equals nothing
        assert repr(together.history.findings) == repr(apart.history.findings), example.name


class Listening:
    """A sink that keeps what it was shown."""

    every = 0

    def __init__(self):
        self.steps, self.histograms = [], []

    def write(self, history):
        self.steps.append(history.step)
        self.histograms.append(history.histograms_step)

    def report(self, finding):
        pass

    def close(self, history, diagnoses):
        pass


def test_sinks_see_each_step_at_which_detectors_are_asked_and_each_histogram(first_history):
    history, sink = first_history, Listening()
    made = list(rows(history))
    for i in (11, 12):
        counts_KB = np.zeros((1, 2))
        seen = Histograms(step=i, edges_B=np.arange(3), places_K=np.array([0]), grad_KB=counts_KB, weight_KB=counts_KB)
        made[i] = made[i]._replace(samples=(SampledStep(0, histograms=seen),))

    ingest = ingest_of(history, detectors=[d for d in ALL if d.every == 5], sinks=[sink])
    for block in blocks(made):
        ingest.ingest(block)

    assert {5, 10, 11, 12, 15, history.step} <= set(sink.steps)
    seen = dict(zip(sink.steps, sink.histograms, strict=True))
    assert (seen[11], seen[12], seen[15]) == (11, 12, 12)


@pytest.mark.parametrize("every", [1, 3, 20])
def test_sinks_see_each_step_that_they_ask_for(first_history, every):
    history, sink = first_history, Listening()
    sink.every = every

    ingest = ingest_of(history, sinks=[sink])
    for block in blocks(rows(history)):
        ingest.ingest(block)

    assert set(range(0, history.step + 1, every)) <= set(sink.steps)


def test_a_sink_that_asks_for_nothing_sees_each_step(first_history):
    class Plain(Listening):
        every = property()

    history, sink = first_history, Plain()

    ingest = ingest_of(history, sinks=[sink])
    for block in blocks(rows(history)):
        ingest.ingest(block)

    assert sink.steps == list(range(history.step + 1))


@pytest.mark.parametrize("length", [1, WINDOW // 2 - 1, WINDOW, MAX_APPENDED_STEPS - 1, MAX_APPENDED_STEPS])
def test_what_waits_on_the_way_to_the_disk_is_still_there_when_it_is_written(length):
    written = []

    class Writer:
        def append(self):
            before = written[-1] if written else -1
            written.extend(ingest.history.param.since(before)[0].tolist())

    history = Synthetic(steps=3000).history()
    ingest = ingest_of(history, writer=Writer())
    for block in blocks(rows(history), length=length):
        ingest.ingest(block)
    ingest.write()

    assert written == list(range(3000))


def test_rows_do_not_wait_for_a_slow_sink_to_be_written(monkeypatch):
    written_before_shown, now = [], 0.0

    class Writer:
        written = -1

        def append(self):
            self.written = ingest.history.step

    class Slow(Listening):
        every = 1

        def write(self, history):
            nonlocal now
            now += 0.3
            written_before_shown.append((writer.written, history.step))

    monkeypatch.setattr("gradwatch.pipeline.ingest.time.monotonic", lambda: now)
    history, writer = Synthetic(steps=40).history(), Writer()
    ingest = ingest_of(history, sinks=[Slow()], writer=writer)
    for block in blocks(rows(history)):
        ingest.ingest(block)

    behind = [shown - written for written, shown in written_before_shown]
    assert 1 < max(behind) <= 5, "rows of more than a second are never unwritten, and none is written by itself"


class Faulty:
    """A detector with one finding, which raises after it at some of its calls."""

    code, kind, every = "GW999", "broken", 1

    def __init__(self, faulty):
        self.faulty, self.calls = faulty, 0

    def detect(self, history):
        self.calls += 1
        yield finding_of(self, history, "something is wrong")
        if self.faulty(self.calls):
            raise RuntimeError("out of order")

    @classmethod
    def examples(cls):
        return iter(())


def ingest_all(ingest, history, length=MAX_APPENDED_STEPS):
    """Ingest the rows of a history, and return the texts of the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for block in blocks(rows(history), length):
            ingest.ingest(block)
        ingest.end_sinks()
    return [str(warning.message) for warning in caught]


def left_out(history):
    return [event.text for event in history.events if event.kind == LEFT_OUT.name]


def test_a_detector_that_raises_at_each_step_is_left_out_and_the_findings_before_it_stay(first_history):
    history, detector = first_history, Faulty(lambda call: True)
    ingest = ingest_of(history, detectors=[detector])

    (warning,) = ingest_all(ingest, history)

    assert warning.startswith("gradwatch: detector broken failed (RuntimeError: out of order); the rest of the run")
    assert detector.calls == MAX_FAILURES
    assert left_out(ingest.history) == ["detector broken (RuntimeError: out of order)"]
    assert [f.kind for f in ingest.history.findings] == ["broken"]
    assert ingest.unhandled_findings == ingest.history.findings


def test_a_detector_that_raises_at_times_goes_on(first_history):
    history, detector = first_history, Faulty(lambda call: call % MAX_FAILURES)
    ingest = ingest_of(history, detectors=[detector])
    num_steps = history.step + 1 - (history.step + 1) % MAX_FAILURES  # the last call succeeds

    assert ingest_all(ingest, Synthetic(steps=num_steps).history()) == []
    assert detector.calls == num_steps
    assert left_out(ingest.history) == []


def test_a_detector_that_raised_at_the_end_of_the_run_is_said_to_be_left_out():
    history = Synthetic(steps=4).history()
    ingest = ingest_of(history, detectors=[Faulty(lambda call: call == 4)])

    assert len(ingest_all(ingest, history)) == 1
    assert left_out(ingest.history) == ["detector broken (RuntimeError: out of order)"]


def test_one_warning_announces_all_checks_that_are_left_out():
    class Second(Faulty):
        kind = "second"

    history = Synthetic(steps=20).history()
    ingest = ingest_of(history, detectors=[kind(lambda call: True) for kind in (Faulty, Second)])

    assert len(ingest_all(ingest, history)) == 1
    assert len(left_out(ingest.history)) == 2


def test_detecting_again_attempts_what_the_run_left_out():
    history = Synthetic(steps=20).history()
    ingest = ingest_of(history, detectors=[Faulty(lambda call: True)])
    ingest_all(ingest, history)

    again = redetect(ingest.history, [Faulty(lambda call: False)])

    assert left_out(again) == []


def test_a_sink_that_raises_at_times_goes_on_and_one_that_always_raises_is_left_out():
    class Sink:
        def __init__(self, faulty):
            self.faulty, self.shown, self.is_closed = faulty, 0, False

        def write(self, history):
            self.shown += 1
            if self.faulty(self.shown):
                raise OSError(28, "No space left on device", "runs/a/file")

        def report(self, finding):
            pass

        def close(self, history, diagnoses):
            self.is_closed = True

    history = Synthetic(steps=9).history()
    at_times, always = Sink(lambda step: step % 3), type("Other", (Sink,), {})(lambda step: True)
    ingest = ingest_of(history, sinks=[at_times, always])

    assert ingest_all(ingest, history, 1) == [
        "gradwatch: sink Other failed (OSError: No space left on device); the rest of the run goes without"
    ]
    assert (at_times.shown, always.shown) == (9, MAX_FAILURES)
    assert (at_times.is_closed, always.is_closed) == (True, False)


@pytest.mark.parametrize("selection", [np.zeros(3, np.bool_), None])
def test_a_detector_that_selects_no_rows_of_the_batch_is_left_out(selection):
    class Broken:
        code, kind, every = "GW999", "broken", 1

        def triggers_T(self, rows, history):
            return selection if selection is not None else rows.missing

        def detect(self, history):
            raise AssertionError("no step was selected")

        @classmethod
        def examples(cls):
            return iter(())

    history = Synthetic(steps=20).history()
    ingest = ingest_of(history, detectors=[Broken()])

    (warning,) = ingest_all(ingest, history, 1)

    assert "detector broken failed" in warning
    assert ingest.history.step == history.step


def replayed(made):
    """The rows of a long made-up run, of which a history keeps only the newest in full."""
    for history in made.replay():
        step = history.step
        (steps_T, param_TSL), (_, run_TS1) = history.param.since(step - 1), history.run.since(step - 1)
        yield Rows(steps_T.copy(), run_TS1[:, :, 0].copy(), param_TSL.copy(), ())


class Counting:
    """A detector that notes when it is asked."""

    code, kind, every = "GW999", "counting", 10

    def __init__(self):
        self.steps = []

    def detect(self, history):
        self.steps.append(history.step)
        return iter(())


def test_a_detector_runs_less_often_once_a_run_is_old():
    made, counting = Synthetic(steps=LATE_STEP + 100), Counting()
    ingest = ingest_of(made.history(), detectors=[counting])

    for block in blocks(replayed(made)):
        ingest.ingest(block)

    assert counting.steps == [*range(0, LATE_STEP, 10), *range(1040, LATE_STEP + 100, 10 * LATE_FACTOR)]


@pytest.mark.parametrize("step", [LATE_STEP + 50, LATE_STEP + 61])
def test_no_spike_is_missed_between_two_late_checks(step):
    made = Synthetic(steps=LATE_STEP + 100).spike(step=step, factor=200)
    ingest = ingest_of(made.history(), detectors=ALL)

    for block in blocks(replayed(made)):
        ingest.ingest(block)

    (spike,) = [f for f in ingest.history.findings if f.kind == "gradient-spike"]
    assert [q.value for q in spike.evidence if q.key == "spike.step"] == [step]


class Hearing(Listening):
    """A sink that keeps the findings that come and go."""

    def __init__(self):
        super().__init__()
        self.told = []

    def report(self, finding):
        self.told.append(("found", finding.step))

    def withdraw(self, finding):
        self.told.append(("withdrawn", finding.withdrawn))


def withdrawing_run():
    made = Synthetic(steps=120)
    usual_TL = made.grad_l2_TL.copy()
    made.no_gradient(4, zero=True)
    made.grad_l2_TL[60:], made.zero_frac_TL[60:] = usual_TL[60:], 0
    return made.history()


def test_a_withdrawal_reaches_disk_and_the_sinks_that_want_it(tmp_path):
    history, hears, deaf = withdrawing_run(), Hearing(), Listening()
    ingest = Ingest(History(history.info), detectors=ALL, sinks=[hears, deaf])
    with Writer(tmp_path / "run", ingest.history) as writer:
        ingest.writer = writer
        for block in blocks(rows(history)):
            ingest.ingest(block)

    assert hears.told == [("found", 10), ("withdrawn", 70)]
    assert [f.step for f in ingest.unhandled_findings] == [10], "a withdrawal asks for no action"
    stored = read(tmp_path / "run")
    assert (stored.findings, stored.withdrawn) == (ingest.history.findings, ingest.history.withdrawn)
    again = redetect(stored, ALL)
    assert (again.findings, again.withdrawn) == (stored.findings, stored.withdrawn)


def test_a_withdrawn_finding_counts_neither_for_the_diagnosis_nor_for_the_exit_code():
    ingest = ingest_of(withdrawing_run(), detectors=ALL)
    for block in blocks(rows(withdrawing_run())):
        ingest.ingest(block)

    assert ingest.end_sinks() == ()
    assert exit_code(ingest.history.findings, "info") == 0
    (finding,) = ingest.history.withdrawn
    assert str(finding) == (
        "from step 0 to 59: warning no-gradient (GW108) in layers.4.weight: layers.4.weight gets no gradient: "
        "exactly zero at every step; then it got a gradient"
    )
