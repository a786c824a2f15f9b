"""What a loop of the user's own prints about its findings."""

from dataclasses import replace
from pathlib import Path

import pytest

from gradwatch.detect import detectors
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.pipeline.redetect import redetect
from gradwatch.records import Finding, Severity
from gradwatch.render.own_loop.finding_lines import MAX_LINES_PER_KIND, FindingLines


def finding(layer, *, kind="dead-layer", severity=Severity.WARNING, step=12):
    return Finding(code="GW103", kind=kind, layer=layer, step=step, severity=severity, message="it stopped learning")


def test_a_finding_is_one_line_with_step_kind_code_and_layer(capsys):
    FindingLines(None).report(finding("blocks.3", step=1200))

    line = "gradwatch: step 1,200: warning dead-layer (GW103) in blocks.3: it stopped learning\n"
    assert capsys.readouterr() == ("", line)


def test_information_is_not_printed(capsys):
    FindingLines(None).report(finding(None, severity=Severity.INFO))

    assert capsys.readouterr() == ("", "")


def test_the_first_findings_of_a_kind_get_a_line_each(capsys):
    lines = FindingLines(None)
    for i in range(20):
        lines.report(finding(f"blocks.{i}"))
    lines.report(finding(None, kind="loss-plateau"))

    printed = capsys.readouterr().err.splitlines()

    assert len(printed) == MAX_LINES_PER_KIND + 2
    assert printed[MAX_LINES_PER_KIND] == "gradwatch: more findings of dead-layer are not printed"
    assert "loss-plateau" in printed[-1]


def test_the_end_of_a_run_with_problems_is_three_lines(capsys):
    history = redetect(Synthetic(steps=60).non_finite(step=40, lasting=True).history(), detectors())

    FindingLines(Path("runs/mine")).close(history, diagnose(history))

    problems, cause, details = capsys.readouterr().err.splitlines()
    assert problems == "gradwatch: 1 problem in 60 steps: non-finite (step 40)"
    assert cause.startswith("gradwatch: most likely cause: ")
    assert "; fix: " in cause
    assert details == "gradwatch: details: gradwatch diagnose runs/mine"


def test_the_end_names_few_kinds(capsys):
    history = Synthetic(steps=60).history()
    for i in range(7):
        history.report(finding(None, kind=f"kind-{i}", step=i))

    FindingLines(None).close(history, ())

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gradwatch: 7 problems in 60 steps: kind-0 (step 0), kind-1 (step 1)")
    assert line.endswith(" and 3 more kinds")


@pytest.mark.parametrize("run_dir", [Path("runs/mine"), None])
def test_a_healthy_run_says_so(run_dir, capsys):
    FindingLines(run_dir).close(Synthetic(steps=200).history(), ())

    first, *others = capsys.readouterr().err.splitlines()
    assert first == "gradwatch: healthy: no problems found in 200 steps"
    assert others == (["gradwatch: details: gradwatch diagnose runs/mine"] if run_dir else [])


def test_a_run_that_is_too_short_to_be_judged_is_not_called_healthy(capsys):
    made = Synthetic(steps=1)

    FindingLines(None).close(made.history(), ())

    assert capsys.readouterr().err == (
        "gradwatch: no problems found in 1 step; too short for: rising-sparsity, oscillating-gradient, loss-plateau\n"
    )


def test_a_run_without_steps_says_how_to_record_one(capsys):
    FindingLines(None).close(Synthetic(steps=0).history(), ())

    assert "no step was recorded: call `monitor.step(loss)`" in capsys.readouterr().err


def test_a_withdrawn_finding_is_announced_and_named_at_the_end(capsys):
    made = Synthetic(steps=120)
    usual_TL = made.grad_l2_TL.copy()
    made.no_gradient(4, zero=True)
    made.grad_l2_TL[60:], made.zero_frac_TL[60:] = usual_TL[60:], 0
    history = redetect(made.history(), detectors())
    (over,) = history.withdrawn
    lines = FindingLines(None)

    lines.report(replace(over, withdrawn=None, ended=None, reason=""))
    lines.withdraw(over)
    lines.close(history, diagnose(history))

    found, withdrawn, health, at_end = capsys.readouterr().err.splitlines()
    assert found.startswith(
        "gradwatch: since step 0 (found at step 10): warning no-gradient (GW108) in layers.4.weight"
    )
    assert withdrawn == at_end
    assert at_end == ("gradwatch: withdrawn: no-gradient in layers.4.weight, from step 0 to 59; then it got a gradient")
    assert "no problems found" in health
