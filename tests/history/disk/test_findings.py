"""Findings on disk: a line each, exact, robust against a kill."""

import json
import math
from dataclasses import replace

import pytest

from gradwatch.history.disk.findings import FINDINGS, open_findings
from gradwatch.history.disk.writer import Writer, read
from gradwatch.history.store import History
from gradwatch.records import Quantity, Severity


def write(directory, *lines):
    (directory / FINDINGS.name).write_bytes(b"".join(lines))


def test_findings_come_back_as_they_were(tmp_path, finding):
    made = [finding(5), finding(9, layer=None, severity=Severity.CRITICAL), finding(11, layer="l2")]
    write(tmp_path, *(FINDINGS.line(f, at=f.step) for f in made))
    assert FINDINGS.read(tmp_path) == (made, [])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e-300, 0.1])
def test_evidence_survives_whatever_its_value_in_plain_json(tmp_path, finding, value):
    line = FINDINGS.line(finding(value=value), at=5)
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    write(tmp_path, line)

    ((back,), _) = FINDINGS.read(tmp_path)
    assert repr(back.evidence) == repr((Quantity(key="grad.l2", value=value),))


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path, finding):
    whole, cut = FINDINGS.line(finding(5), at=5), FINDINGS.line(finding(9, layer="l1"), at=9)
    write(tmp_path, whole, cut[:-20])
    assert FINDINGS.read(tmp_path) == ([finding(5)], [])


def test_a_damaged_line_is_named_and_the_rest_read(tmp_path, finding):
    lines = [FINDINGS.line(finding(step, layer=f"l{step}"), at=step) for step in (1, 2, 3)]
    write(tmp_path, lines[0], b'{"at": 2, "kind"\n', lines[2])

    found, problems = FINDINGS.read(tmp_path)
    assert [f.step for f in found] == [1, 3]
    assert len(problems) == 1
    assert "findings.jsonl, line 2 is not a valid finding" in problems[0]


def test_truncate_goes_by_when_a_finding_was_written_not_by_the_step_it_carries(tmp_path, finding):
    first, graver = finding(5), finding(5, severity=Severity.CRITICAL)
    write(tmp_path, FINDINGS.line(first, at=5), FINDINGS.line(graver, at=90))

    FINDINGS.truncate(tmp_path, until=50)
    assert FINDINGS.read(tmp_path) == ([first], [])


def test_without_a_file_there_are_no_findings(tmp_path):
    FINDINGS.truncate(tmp_path, until=3)
    assert FINDINGS.read(tmp_path) == ([], [])


def lived(finding, at):
    return replace(finding, withdrawn=at, ended=at - 5, reason="it got a gradient")


def test_a_withdrawn_finding_is_read_back_with_its_record(tmp_path, run_info, append, finding):
    history = History(run_info())
    with Writer(tmp_path / "run", history) as writer:
        for step in range(70):
            append(history, step)
            writer.append()
            if step in (10, 65):
                history.report(finding(step=step))
                writer.report(finding(step=step))
            if step == 60:
                history.withdraw(lived(finding(step=10), 60))
                writer.report(lived(finding(step=10), 60))

    for until, steps, ends in ((None, [65], [60]), (62, [], [60]), (59, [10], [])):
        stored = read(tmp_path / "run", until=until)
        assert [f.step for f in stored.findings] == steps, until
        assert [f.withdrawn for f in stored.withdrawn] == ends, until


def test_a_resumed_run_forgets_the_withdrawals_after_its_checkpoint(tmp_path, run_info, append, finding):
    history = History(run_info())
    with Writer(tmp_path / "run", history) as writer:
        for step in range(70):
            append(history, step)
            writer.append()
            if step == 10:
                history.report(finding(step=10))
                writer.report(finding(step=10))
        history.withdraw(lived(finding(step=10), 69))
        writer.report(lived(finding(step=10), 69))

    writer, resumed = Writer.resume(tmp_path / "run", 50)
    writer.close()

    assert ([f.step for f in resumed.findings], resumed.withdrawn) == ([10], [])
    assert [f.step for f in read(tmp_path / "run").findings] == [10]


def test_the_state_of_a_checkpoint_has_the_withdrawn_findings(run_info, recorded, finding):
    history = recorded(70)
    history.report(finding(step=10))
    history.withdraw(lived(finding(step=10), 60))
    history.report(finding(step=65))

    copy = History(run_info())
    copy.restore(history.state())

    assert (copy.findings, copy.withdrawn) == (history.findings, history.withdrawn)


def test_a_list_of_runs_counts_open_findings_only(finding):
    first, other = finding(step=10), finding(step=20, layer="l1")

    assert open_findings([first, other, lived(first, 60)]) == [other]
    assert open_findings([first, lived(first, 60), finding(step=70)]) == [finding(step=70)]
