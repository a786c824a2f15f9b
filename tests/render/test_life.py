"""An onset and a withdrawal are shown wherever findings are shown."""

import json
import re
from dataclasses import replace

import pytest

from gradwatch.detect import detectors
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.pipeline.redetect import redetect
from gradwatch.records import Severity
from gradwatch.render.common.layers import matrices
from gradwatch.render.common.sparkline import UNICODE
from gradwatch.render.json_document import document, dumps
from gradwatch.render.report.page import page
from gradwatch.render.tensorboard import markdown
from gradwatch.render.terminal.diagnosis import print_diagnosis
from gradwatch.render.terminal.live_view import panel
from gradwatch.render.terminal.sink import Terminal
from gradwatch.render.terminal.summary import print_summary

OVER = "no-gradient in layers.4.weight, from step 0 to 59; then it got a gradient"
SINCE = "since step 60 (found at step 65)"


@pytest.fixture(scope="module")
def recovered():
    """A run in which a layer gets a gradient from step 60."""
    made = Synthetic(steps=160)
    usual_TL = made.grad_l2_TL.copy()
    made.no_gradient(4, zero=True)
    made.grad_l2_TL[60:], made.zero_frac_TL[60:] = usual_TL[60:], 0
    return redetect(made.history(), detectors())


@pytest.fixture
def late(make_finding):
    """A run with a finding that was found 5 steps after its onset, in four layers."""
    history = Synthetic(steps=160, noise=0.05).dead(range(4), onset=60, level=1e-9).history()
    names = history.param.layers[:4]
    found = make_finding("dead-layer", layer=names[0], step=65, severity=Severity.WARNING, code="GW103", grad__l2=1e-9)
    history.report(replace(found, onset=60, layers=tuple(names)))
    return history


@pytest.mark.parametrize("show", [print_diagnosis, print_summary])
def test_the_terminal_says_that_a_finding_was_withdrawn(show, recovered, make_console, written):
    console = make_console(120)

    show(console, recovered, (), **({"run_dir": None} if show is print_summary else {}))

    text = written(console)
    assert text.startswith("✔ healthy")
    assert f"withdrawn {OVER}" in re.sub(" +", " ", text)


def test_lines_of_a_live_run_say_so_as_it_happens(recovered, make_console, written):
    (over,) = recovered.withdrawn
    plain, lines = make_console(160), make_console(160)

    Terminal(console=plain).withdraw(over)
    Terminal(console=lines, log_format="json").withdraw(over)

    assert written(plain).strip() == f"withdrawn {OVER}"
    event = json.loads(written(lines))
    assert (event["event"], event["ended"], event["withdrawn"]) == ("withdrawn", 60, 70)


def test_the_live_view_counts_withdrawn_findings(recovered):
    text = panel(recovered, matrices(recovered.info.layers), width=120, signs=UNICODE).plain

    assert re.search(r"findings +1 withdrawn", text)


def test_json_has_open_and_withdrawn_findings_in_two_lists(recovered):
    data = json.loads(dumps(recovered, ()))

    assert (data["verdict"], data["findings"]) == ("healthy", [])
    assert [(f["onset"], f["step"], f["ended"], f["withdrawn"], f["reason"]) for f in data["withdrawn"]] == [
        (0, 10, 60, 70, "it got a gradient")
    ]


def test_report_and_tensorboard_say_that_a_finding_was_withdrawn(recovered):
    assert f"<dt>withdrawn</dt><dd>{OVER}</dd>" in page(recovered, ())
    text = markdown.diagnosis(recovered, (), run="mine")
    assert text.startswith("**✔ healthy**")
    assert text.endswith(f"* ✔ withdrawn: {OVER}")
    (over,) = recovered.withdrawn
    assert "**Withdrawn at step 70: it got a gradient.**" in markdown.finding(over, run="mine")


def test_the_onset_stands_in_titles_and_under_the_trend(late, make_console, written):
    console = make_console(140)
    print_diagnosis(console, late, ())

    text = re.sub(r"\s+", " ", written(console))
    assert f"layers.3.weight {SINCE}" in text
    assert "▲ step 60" in text
    assert "step 65 " not in text.replace(SINCE, "")


def test_the_onset_stands_in_report_tensorboard_and_json(late):
    text = page(late, ())
    assert "layers.0.weight, layers.1.weight, layers.2.weight and 1 more" in text
    assert SINCE in text
    assert 'data-step="60"' in text
    assert SINCE in markdown.finding(late.findings[0], run="mine")
    assert document(late, ())["findings"][0]["onset"] == 60


def test_each_layer_of_a_joint_finding_is_marked(late, make_console, written):
    console = make_console(140)
    print_diagnosis(console, late, ())

    rows = [line for line in written(console).splitlines() if "dead-layer, step 60" in line]
    assert len(rows) == 4
