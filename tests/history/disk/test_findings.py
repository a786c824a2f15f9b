"""Findings on disk: as they were made, and withdrawn."""

from dataclasses import replace

from gradwatch.history.disk.findings import FINDINGS, open_findings
from gradwatch.history.disk.writer import Writer, read
from gradwatch.history.store import History
from gradwatch.records import Severity


def test_findings_come_back_as_they_were(tmp_path, finding):
    made = [finding(5), finding(9, layer=None, severity=Severity.CRITICAL), finding(11, layer="l2")]
    (tmp_path / FINDINGS.name).write_bytes(b"".join(FINDINGS.line(f, at=f.step) for f in made))
    assert FINDINGS.read(tmp_path) == (made, [])


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
