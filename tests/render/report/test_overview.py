"""The head of the report: verdict, ending and facts."""

from dataclasses import replace

import pytest

from gradwatch.history.ending import Ending
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Diagnosis, Severity
from gradwatch.render.report.overview import overview, verdict


@pytest.fixture
def history():
    return Synthetic(layers=4, steps=40).history()


def test_the_verdict_names_symptom_and_cause_once(vanishing):
    (diagnosis,) = vanishing.diagnoses
    same = replace(diagnosis, cause="vanishing gradient, unexplained")

    assert verdict(vanishing.history, (diagnosis,)) == ("Vanishing gradient: saturating activations in a deep network")
    assert verdict(vanishing.history, (same,)) == "Vanishing gradient, unexplained"


def test_the_gravest_problem_comes_first_and_the_others_are_counted(broken):
    lesser = broken.history.findings[1]
    assert [f.severity for f in broken.history.findings] == [Severity.CRITICAL, Severity.WARNING, Severity.INFO]
    dead = Diagnosis(cause="a dead unit", certainty=0.5, findings=(lesser,), because="", confirm="", remedies=())

    assert verdict(broken.history, ()) == "NaN or Inf"
    assert verdict(broken.history, (dead,)) == "NaN or Inf, and 1 other problem"


def test_a_run_without_problems_is_called_healthy(healthy):
    assert verdict(healthy.history, ()) == "healthy"


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        (Ending(kind="finished"), ""),
        (Ending(kind="killed"), "Killed at step 40."),
        (Ending(kind="interrupted"), "Interrupted at step 40."),
        (Ending(kind="failed", reason="no `x`"), "Failed at step 40: no <code>x</code>."),
        (Ending(kind="early-stop", reason="no progress"), "Stopped early at step 40: no progress."),
    ],
)
def test_an_ending_before_the_planned_one_is_said(history, ending, said):
    history.ending = ending

    text = overview(history, (), None)

    assert (f'<p class="ending">{said}</p>' in text) == bool(said)
    assert f"<dt>status</dt><dd>{ending.word.replace('-', ' ')}</dd>" in text


def test_waiting_for_data_and_memory_are_facts_of_a_run_that_measured_them(history):
    text = overview(history, (), None)

    assert "<dt>waiting for data</dt><dd>2.0 % of the time</dd>" in text, "0.02 of each step, as the builder has it"
    assert "<dt>peak memory</dt><dd>1 GB of the process</dd>" in text


def test_a_loop_that_measures_no_waits_has_no_such_fact(history):
    steps_T, values_TS1 = history.run.rows()
    for name in ("data_wait_ms", "peak_memory_bytes"):
        values_TS1[:, history.run.statistics.index(name)] = float("nan")
    bare = History(history.info)
    bare.param.fill(*history.param.rows())
    bare.run.fill(steps_T, values_TS1)

    text = overview(bare, (), None)

    assert "waiting for data" not in text
    assert "peak memory" not in text
