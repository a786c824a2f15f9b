"""The summary at the end of a run."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Diagnosis, Remedy, Severity
from gradwatch.render.terminal.summary import print_summary

MAX_LINES = 18


def run(history, *diagnoses):
    return SimpleNamespace(history=history, diagnoses=diagnoses)


@pytest.fixture
def summary(make_console, written):
    def text(of, **options):
        console = make_console(**options)
        print_summary(console, of.history, of.diagnoses, run_dir=Path("runs/some-run"))
        return written(console)

    return text


def test_a_healthy_run_takes_four_lines(summary, healthy):
    lines = summary(healthy).splitlines()

    assert re.fullmatch(r"✔ healthy  quick  120 steps in \d\.\d s", lines[0])
    assert re.fullmatch(r"  loss \S+ to \S+ [▁-█]{16}  validation loss 0\.700  accuracy 87\.5 %", lines[1])
    assert re.fullmatch(r"  6,\d{3} samples/s  monitoring took 100 us per step", lines[2])
    assert lines[3:] == ["    charts tensorboard --logdir runs"]


def test_a_sick_run_begins_with_its_cause_and_ends_with_the_command_that_shows_the_rest(summary, vanishing):
    lines = summary(vanishing).splitlines()

    assert lines[0] == ("✖ 1 problem (critical): saturating activations in a deep network")
    assert lines[1] == "  (almost certain, 2 symptoms)"
    assert lines[-2:] == [
        "    charts tensorboard --logdir runs",
        "      more gradwatch diagnose runs/some-run --full",
    ]
    assert len(lines) <= MAX_LINES


def test_the_fix_comes_first_then_what_was_found_with_evidence_and_the_other_symptoms(summary, vanishing):
    lines = summary(vanishing).splitlines()

    labels = [line[:10].strip() for line in lines]
    assert [label for label in labels if label in ("fix", "found", "evidence", "also")] == [
        "fix",
        "found",
        "evidence",
        "also",
    ]
    fix = labels.index("fix")
    assert lines[fix] == "       fix Use ReLU"
    assert lines[fix + 1].strip() == (
        "gradwatch train runs/some-run/config.yaml --set model.activation=relu --set model.residual=true"
    )
    text = " ".join(summary(vanishing).split())
    assert "step 44: layers.0.weight, layers.1.weight, layers.2.weight and 11 more: This is what" in text
    assert "evidence grad.l2 3.10e-9 · decades 8.40" in text
    assert "also ▲ saturated-activation (step 35)" in text
    assert "Add normalisation" not in text, "the summary has the best remedy only"


def test_three_numbers_of_evidence_are_shown(summary, make_finding):
    history = Synthetic(layers=3, steps=20).history()
    history.report(make_finding("a", layer=None, step=9, severity=Severity.WARNING, code="GW1", p=1, q=2, r=3, s=4))

    assert "  evidence p 1 · q 2 · r 3\n" in summary(run(history))


def test_a_remedy_that_a_test_refuted_gives_way_to_the_next(summary, vanishing):
    (cause,) = vanishing.diagnoses
    first, second = cause.remedies
    tested = replace(cause, remedies=(replace(first, cures=False), replace(second, cures=True)))

    text = summary(run(vanishing.history, tested))

    assert "fix Add normalisation  tested: cures" in text
    assert "Use ReLU" not in text


def test_of_many_symptoms_the_gravest_stay_on_the_line(summary, make_finding):
    history = Synthetic(layers=3, steps=20).history()
    severities = {"first": Severity.CRITICAL, "last-of-all": Severity.CRITICAL}
    names = ["first", *(f"symptom-number-{i}" for i in range(6)), "last-of-all"]
    for name in names:
        grave = severities.get(name, Severity.INFO)
        history.report(make_finding(name, layer=None, step=9, severity=grave, code="GW1"))
    cause = Diagnosis(
        cause="c", cause_id="c", certainty=0.9, findings=tuple(history.findings), because="", confirm="", remedies=()
    )

    (also,) = [line for line in summary(run(history, cause)).splitlines() if line.startswith("      also")]

    assert also.startswith("      also ✖ last-of-all, • symptom-number-0, ")
    assert also.endswith(" more")
    assert len(also) <= 80


def test_further_problems_take_a_line_each_and_their_fix(summary, vanishing, make_finding):
    history, causes = Synthetic(layers=3, steps=20).history(), []
    for i, severity in enumerate((Severity.WARNING, Severity.CRITICAL, Severity.WARNING, Severity.WARNING)):
        found = make_finding(f"kind-{i}", layer=None, step=i, severity=severity, code="GW1")
        history.report(found)
        remedy = Remedy(text=f"do {i}")
        causes.append(replace(vanishing.diagnoses[0], cause=f"cause {i}", findings=(found,), remedies=(remedy,)))

    lines = summary(run(history, *causes)).splitlines()

    assert lines[0] == "✖ 4 problems (1 critical, 3 warnings)"
    told = [line.strip() for line in lines if re.search(r"cause \d|do \d|found|more problem", line)]
    assert told == [
        "✖ critical: cause 1 (almost certain)",
        "fix do 1",
        "found step 1: This is what kind-1 means. (GW1 kind-1)",
        "▲ warning: cause 0 (almost certain)",
        "fix do 0",
        "▲ warning: cause 2 (almost certain)",
        "fix do 2",
        "and 1 more problem",
    ]
    assert len(lines) <= MAX_LINES


def test_a_healthy_run_tells_its_notes(summary, make_finding):
    history = Synthetic(layers=3, steps=200).history()
    history.report(make_finding("dead-relu", layer="acts.0", step=9, severity=Severity.INFO, code="GW201"))

    lines = summary(run(history)).splitlines()

    assert lines[0].startswith("✔ healthy, 1 note  ")
    assert "      note • step 9: acts.0: This is what dead-relu means. (GW201 dead-relu)" in lines
    assert lines[-1].endswith("--full")


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", ["healthy", "vanishing", "broken"])
def test_it_fits_the_terminal(request, summary, name, width):
    text = summary(request.getfixturevalue(name), width=width)

    # a command goes on a line of its own, and only the terminal may break it
    assert all(len(line) <= width or line.lstrip().startswith("gradwatch ") for line in text.splitlines())


def test_colour_is_left_out_where_nobody_wants_it_and_nothing_is_lost(summary, broken, monkeypatch, make_console):
    coloured = summary(broken, terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")

    plain = summary(broken)

    assert "\x1b[1;91m" in coloured
    assert "\x1b[" not in plain
    strip = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert strip == plain


def test_a_terminal_without_unicode_gets_plain_ascii(summary, vanishing, broken):
    for run in (vanishing, broken):
        assert summary(run, encoding="ascii").isascii()


def test_an_interrupted_run_says_how_far_it_came(summary, broken):
    assert "120 steps of 1,000 in" in summary(broken)


def test_findings_without_a_diagnosis_are_shown_all_the_same(summary, broken):
    text = " ".join(summary(broken).split())

    assert "✖ 1 problem (critical): no known cause (3 symptoms)" in text
    for kind in ("GW001 non-finite", "dead-layer", "loss-plateau"):
        assert kind in text


def test_a_run_of_one_step_has_a_summary(make_console, written):
    console = make_console()

    print_summary(console, Synthetic(layers=2, steps=1).history(), (), run_dir=None)

    assert "1 step in" in written(console)
