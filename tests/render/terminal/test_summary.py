"""The summary at the end of a run."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reference import newest_row

from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import RunInfo, Severity
from gradwatch.render.terminal.summary import print_summary, summary_html


@pytest.fixture
def summary(make_console, written):
    def text(run, **options):
        console = make_console(**options)
        print_summary(console, run.history, run.diagnoses, run_dir=Path("runs/some-run"))
        return written(console)

    return text


def test_a_healthy_run_takes_three_lines(summary, healthy):
    lines = summary(healthy).splitlines()

    assert re.fullmatch(r"✔ healthy  quick  120 steps in \d\.\d s", lines[0])
    assert re.fullmatch(r"  loss \S+ to \S+ [▁-█]{16}  validation loss 0\.700  accuracy 87\.5 %", lines[1])
    last = r"  6,\d{3} samples/s  monitoring took 12 ms \(1\.0 %\)  tensorboard --logdir runs"
    assert re.fullmatch(last, lines[2])
    assert len(lines) == 3


def test_a_sick_run_begins_with_its_findings_and_ends_with_where_to_look(summary, vanishing):
    lines = summary(vanishing).splitlines()

    assert lines[0].startswith("✖ 14 critical problems, 1 warning  deep  120 steps")
    assert lines[-2:] == [
        "  Details:  gradwatch diagnose runs/some-run",
        "  Charts:   tensorboard --logdir runs",
    ]


def test_findings_come_with_cause_certainty_evidence_and_remedy(summary, vanishing):
    text = summary(vanishing)

    assert "✖ critical  saturating activations in a deep network  almost certain" in text
    assert "evidence grad.l2 3.10e-9 · decades 8.40" in text
    assert "confirm Train 200 steps with relu." in text
    assert "fix Use ReLU" in text
    assert re.search(r"model: *\n +activation: relu *\n +residual: true *\n", text)
    assert "Add normalisation" not in text, "the summary has the smallest remedy only"


def test_large_models_show_the_sick_layers_and_group_the_rest(summary, vanishing):
    lines = summary(vanishing).splitlines()

    rows = [line for line in lines if re.match(r"✖ layers\.\d+ ", line)]
    shown = [int(row.split()[1].removeprefix("layers.")) for row in rows]
    assert len(shown) == 12
    assert shown == sorted(shown), "in the order of the model"
    assert set(shown) <= set(range(14)), "the sick ones"
    assert all("vanishing-gradient" in row for row in rows)
    assert any(re.match(r"▲ acts\.0 +saturated-activation", line) for line in lines)
    assert "12 more layers" in [line.strip() for line in lines]


def test_the_table_tells_missing_broken_and_dead_gradients(summary, broken):
    lines = summary(broken, width=120).splitlines()

    row = {line.split()[1]: line for line in lines if re.match(r"[✖▲ ]  layers\.", line) and line[0] != " "}
    assert re.search(r"NaN or Inf .*non-finite, step 100", row["layers.0"])
    assert re.search(r" 0  [▁-█·]+ .* 100 %  dead-layer, step 60", row["layers.3"])
    missing = next(line for line in lines if line.startswith("   layers.2"))
    assert re.search(r"layers\.2 +none ", missing), "no finding names it, so it has no mark"


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", ["healthy", "vanishing", "broken"])
def test_it_fits_the_terminal(request, summary, name, width):
    text = summary(request.getfixturevalue(name), width=width)

    assert max(map(len, text.splitlines())) <= width
    assert ("over the run" in text) == (name != "healthy" and width == 200), "short headings where it is narrow"


def test_colour_is_left_out_where_nobody_wants_it_and_nothing_is_lost(summary, broken, monkeypatch, make_console):
    coloured = summary(broken, terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")

    plain = summary(broken)

    assert "\x1b[38;" in coloured
    assert "\x1b[" not in plain
    strip = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert strip == plain


def test_a_terminal_without_unicode_gets_plain_ascii(summary, vanishing, broken):
    for run in (vanishing, broken):
        assert summary(run, encoding="ascii").isascii()


def test_an_interrupted_run_says_how_far_it_came(summary, broken):
    assert "120 steps of 1,000 in" in summary(broken)


def test_findings_without_a_diagnosis_are_shown_all_the_same(summary, broken):
    text = summary(broken)

    assert "✖ critical  no known cause" in text
    for kind in ("GW001 non-finite", "GW104 dead-layer", "GW507 loss-plateau"):
        assert kind in text


def test_a_run_of_one_step_has_a_summary(make_console, written):
    console = make_console()

    print_summary(console, Synthetic(layers=2, steps=1).history(), (), run_dir=None)

    assert "1 step in" in written(console)


class _Reader(HTMLParser):
    """Reads text and tags, and complains of a tag that is not closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.text = [], set(), ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize("name", ["healthy", "vanishing", "broken"])
def test_the_html_of_a_summary_is_well_formed_and_begins_with_its_health(request, name):
    run = request.getfixturevalue(name)

    read = _Reader(summary_html(run.history, run.diagnoses))

    assert read.text.startswith("✔ healthy" if name == "healthy" else "✖ ")
    assert read.tags == {"pre", "span"}, "nothing that a notebook would run or load"


def test_the_html_of_a_healthy_run_has_its_layers_and_no_findings(healthy):
    text = _Reader(summary_html(healthy.history, ())).text

    assert re.findall(r"✔ +(layers\.\d)", text) == [f"layers.{i}" for i in range(4)]
    assert "found" not in text


def test_the_html_of_an_ill_run_has_cause_and_remedy(vanishing):
    text = _Reader(summary_html(vanishing.history, vanishing.diagnoses)).text

    assert "saturating activations in a deep network  almost certain" in text
    assert re.search(r"model: *\n +activation: relu", text)


def test_names_are_escaped_in_html(make_finding, healthy):
    history = History(RunInfo(name="<b>x</b>", created="", layers=healthy.history.info.layers))
    history.report(make_finding("<i>kind", layer='<img src="x">', step=1, severity=Severity.WARNING, code="GW1"))
    history.append(0, run={"loss": 1.0}, param_SL=newest_row(healthy.history.param))

    assert _Reader(summary_html(history, ())).tags == {"pre", "span"}


def test_the_html_of_a_run_without_a_step_says_so():
    page = summary_html(History(RunInfo(name="early", created="", layers=())), ())

    assert "no steps recorded" in page
    assert "healthy" not in page
