"""The findings of a run: at most one open per kind and layer, and a record of the withdrawn ones."""

from dataclasses import replace

import pytest

from gradwatch.history.finding_log import MAX_WITHDRAWALS, FindingLog
from gradwatch.records import Finding, Severity


@pytest.fixture
def log():
    return FindingLog()


def over(finding, at, ended=None):
    return replace(finding, withdrawn=at, ended=at if ended is None else ended, reason="it got a gradient")


def test_a_withdrawn_finding_moves_to_the_record_and_may_come_back(log, finding):
    first = finding(step=10)
    log.report(first)

    assert log.withdraw(over(first, 60, ended=55))
    assert (log.open, [f.when for f in log.withdrawn]) == ([], ["from step 10 to 54"])

    assert log.report(finding(step=100)), "the symptom is back: a new finding"
    assert [f.step for f in log.open] == [100]


def test_only_an_open_finding_is_withdrawn(log, finding):
    log.report(finding(layer="l1"))

    assert not log.withdraw(over(finding(layer="l0"), 60))
    assert len(log.open) == 1
    assert log.withdrawn == []


def test_a_symptom_that_comes_and_goes_stays_open_in_the_end(log, finding):
    for step in range(0, 100, 10):
        log.report(finding(step=step))
        log.withdraw(over(finding(step=step), step + 5))

    assert len(log.withdrawn) == MAX_WITHDRAWALS
    assert len(log.open) == 1


def test_the_other_findings_are_still_known_after_a_withdrawal(log, finding):
    for layer in ("l0", "l1", "l2"):
        log.report(finding(layer=layer))
    log.withdraw(over(finding(layer="l0"), 60))

    assert not log.report(finding(layer="l2", step=70)), "it is known"
    assert log.report(finding(layer="l2", step=70, severity=Severity.CRITICAL))
    assert [(f.layer, f.step, str(f.severity)) for f in log.open] == [("l1", 5, "warning"), ("l2", 5, "critical")]


def test_a_more_severe_finding_keeps_the_earliest_onset(log, finding):
    log.report(replace(finding(step=20), onset=15))
    log.report(replace(finding(step=30, severity=Severity.CRITICAL), onset=25))

    (kept,) = log.open
    assert (kept.step, kept.onset, kept.severity) == (20, 15, Severity.CRITICAL)


@pytest.mark.parametrize(("step", "open_steps", "withdrawn"), [(70, [10], 1), (50, [10], 0), (5, [], 0)])
def test_a_rewind_undoes_later_withdrawals(log, finding, step, open_steps, withdrawn):
    log.report(finding(step=10))
    log.withdraw(over(finding(step=10), 60))
    if step == 70:
        log.report(finding(step=70))
        open_steps = [70]

    log.truncate(step)

    assert ([f.step for f in log.open], len(log.withdrawn)) == (open_steps, withdrawn)
    assert all(f.ended is None and f.reason == "" for f in log.open)


def test_json_of_an_older_version_has_no_life(finding):
    data = finding().to_json()
    for name in ("onset", "layers", "withdrawn", "ended", "reason"):
        del data[name]

    assert Finding.from_json(data) == finding()


def test_json_keeps_layers_and_life(finding):
    lived = over(replace(finding(), layers=("l0", "l1"), onset=3), 60)

    assert Finding.from_json(lived.to_json()) == lived


@pytest.mark.parametrize(
    ("onset", "expected"),
    [(None, "step 65"), (65, "step 65"), (60, "since step 60 (found at step 65)")],
)
def test_the_onset_is_named_if_it_differs_from_the_step_of_the_report(finding, onset, expected):
    assert replace(finding(step=65), onset=onset).when == expected


def test_at_most_three_layers_are_named(finding):
    assert replace(finding(), layers=tuple("abcde")).place == "a, b, c and 2 more"
    assert finding(layer=None).place == "the whole run"
