"""The table of checks: every detector, with what became of it."""

from dataclasses import replace

import pytest

from gradwatch.detect import detector_classes
from gradwatch.events import LEFT_OUT
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Severity
from gradwatch.render.common.run_stats import too_short_for
from gradwatch.render.report.checks import check_table, checks


def _by_kind(history, **options):
    return {row.kind: row for row in checks(history, **options)}


@pytest.fixture
def copied(healthy):
    """Return a healthy history of its own."""
    history = History(healthy.history.info)
    history.param.fill(*healthy.history.param.rows())
    history.run.fill(*healthy.history.run.rows())
    return history


def test_every_detector_has_a_row_and_passes_a_healthy_run(healthy):
    rows = checks(healthy.history)

    assert {row.code for row in rows} == {detector.code for detector in detector_classes()}
    assert {row.status for row in rows} == {"passed"}
    assert all(row.note.endswith(".") for row in rows), "what each looks for"


def test_findings_are_counted_and_come_first(broken, vanishing):
    assert [(row.kind, row.status) for row in checks(broken.history)[:3]] == [
        ("non-finite", "problem"),
        ("dead-layer", "problem"),
        ("loss-plateau", "note"),
    ]
    row = _by_kind(vanishing.history)["vanishing-gradient"]
    assert (row.status, row.times, row.severity) == ("problem", 14, Severity.CRITICAL)
    assert row.note.startswith("step 44, layers.0.weight: ")


def test_a_run_too_short_for_a_detector_has_not_passed_it():
    history = Synthetic(layers=2, steps=40).history()
    short = too_short_for(history)

    rows = _by_kind(history)

    assert "oscillating-gradient" in short
    assert {kind for kind, row in rows.items() if row.status == "not judged yet"} == set(short)


def test_a_withdrawn_finding_is_no_longer_a_problem(copied, make_finding):
    finding = make_finding("dead-layer", layer="layers.0.weight", step=10, severity=Severity.WARNING, code="GW103")
    copied.report(finding)
    copied.withdraw(replace(finding, withdrawn=60, ended=50, reason="it got a gradient"))

    row = _by_kind(copied)["dead-layer"]

    assert (row.status, row.times) == ("is over", 1)
    assert "from step 10 to 49; then it got a gradient" in row.note


def test_a_detector_that_raised_or_is_switched_off_did_not_pass(copied):
    left_out = LEFT_OUT.emit(step=9, values={"detector": 1}, part="detector dead-relu", reason="ValueError: no")
    copied.add_event(left_out)

    rows = _by_kind(copied, config_text="detect: {overfitting: {enabled: false}, dead-layer: {enabled: true}}")

    assert (rows["dead-relu"].status, rows["dead-relu"].note) == ("left out", "detector dead-relu (ValueError: no)")
    assert (rows["overfitting"].status, rows["dead-layer"].status) == ("switched off", "passed")


@pytest.mark.parametrize("text", ["", "detect: 3", "- 1", "{", "detect: {dead-layer: 3}"])
def test_a_damaged_config_switches_nothing_off(healthy, text):
    assert {row.status for row in checks(healthy.history, config_text=text)} == {"passed"}


def test_the_table_sums_up_and_a_run_without_a_step_has_none(vanishing):
    total = len(list(detector_classes()))

    assert f"{total} checks: 2 found a problem, {total - 2} passed." in check_table(vanishing.history)
    assert check_table(History(vanishing.history.info)) == ""
