"""What a loop does with a finding: call a function, or raise it."""

import pytest

from gradwatch.errors import FindingError
from gradwatch.records import Finding, Severity
from gradwatch.render.own_loop.finding_handler import FindingStop, make_sink


def finding(severity, step=3):
    return Finding(code="GW001", kind="non-finite", layer=None, step=step, severity=severity, message="it is NaN")


def test_a_function_gets_every_finding():
    seen = []
    sink, stop = make_sink(seen.append, None)

    for severity in Severity:
        sink.report(finding(severity))

    assert [f.severity for f in seen] == list(Severity)
    assert stop is None


def test_a_stop_raises_the_first_problem_once():
    stop = FindingStop()
    stop.keep(finding(Severity.INFO, step=1))
    stop.keep(finding(Severity.CRITICAL, step=2))
    stop.keep(finding(Severity.CRITICAL, step=5))

    with pytest.raises(FindingError, match="step 2: critical non-finite"):
        stop.raise_finding()
    stop.raise_finding()


def test_nothing_is_done_for_none():
    assert make_sink(None, None) == (None, None)
