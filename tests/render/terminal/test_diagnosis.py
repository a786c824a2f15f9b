"""What `gradwatch diagnose` prints."""

import re
from html.parser import HTMLParser

import pytest
import yaml
from reference import newest_row

from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Diagnosis, Remedy, RunInfo, Severity
from gradwatch.render.common.config_patch import patch_yaml
from gradwatch.render.common.series import series_of
from gradwatch.render.terminal.diagnosis import diagnosis_html, print_diagnosis


@pytest.fixture
def diagnosis(make_console, written):
    def text(history, diagnoses, **options):
        console = make_console(**options)
        print_diagnosis(console, history, diagnoses)
        return written(console)

    return text


def test_it_says_everything_about_a_cause(diagnosis, vanishing):
    text = diagnosis(vanishing.history, vanishing.diagnoses, width=120)

    assert text.startswith(
        "✖ 1 problem (critical): saturating activations in a deep network (almost certain, 2 symptoms)"
    )
    assert "almost certain" in text
    assert re.search(
        r"found GW101 vanishing-gradient critical in layers\.0\.weight, .*and 2 more\s+at steps 44 to 57", text, re.S
    )
    assert "also GW203 saturated-activation warning in acts.0 at step 35" in text
    assert "why Each sigmoid" in text
    assert "fix Use ReLU" in text
    assert "or Add normalisation" in text
    assert "source Glorot and Bengio 2010" in text


def test_the_onset_is_marked_under_the_trend(diagnosis, vanishing):
    lines = diagnosis(vanishing.history, vanishing.diagnoses, width=120).splitlines()

    i = next(i for i, line in enumerate(lines) if line.strip().startswith("trend"))
    bars = re.search(r"[▁-█·]+", lines[i])
    onset = lines[i + 1].index("▲")
    assert lines[i + 1][onset:].strip() == "▲ step 44"
    fell = bars.group().index(min(bars.group()))
    assert abs(onset - bars.start() - fell) <= 2, "the gradient falls at step 40 and is found at step 44"
    assert "grad.l2, " in lines[i]
    assert "log scale" in lines[i]


def test_a_single_spike_is_seen_in_the_trend_of_its_finding(diagnosis, make_finding):
    history = Synthetic(layers=3, steps=250, noise=0.05).spike(step=111, factor=1e4, layers=1).history()
    spike = make_finding(
        "gradient-spike", layer="layers.1.weight", step=111, severity=Severity.WARNING, code="GW105", grad__l2=100.0
    )
    history.report(spike)

    lines = diagnosis(history, ()).splitlines()

    i = next(i for i, line in enumerate(lines) if line.strip().startswith("trend"))
    assert lines[i][lines[i + 1].index("▲")] == "█"
    assert lines[i].count("█") == 1


def test_the_gravest_cause_comes_first(diagnosis, healthy, make_finding):
    history = Synthetic(layers=3, steps=20).history()
    found = [
        make_finding(kind, layer="layers.1.weight", step=9, severity=severity, code="GW1")
        for kind, severity in (("b", Severity.INFO), ("a", Severity.CRITICAL), ("c", Severity.WARNING))
    ]
    for each in found:
        history.report(each)
    causes = [
        Diagnosis(cause=f"cause {f.kind}", certainty=0.5, findings=(f,), because="x", confirm="y", remedies=())
        for f in found
    ]

    text = diagnosis(history, causes)

    assert re.findall(r"cause \w", text) == ["cause a", "cause c", "cause b"]


def test_a_remedy_is_yaml_that_a_config_can_take():
    patch = {"train.clip": {"norm": 1.0}, "optim.lr": 3e-4, "optim.name": "adamw", "data.augment": ["RandomCrop"]}

    read = yaml.safe_load(patch_yaml(patch))

    assert read == {
        "train": {"clip": {"norm": 1.0}},
        "optim": {"lr": 3e-4, "name": "adamw"},
        "data": {"augment": ["RandomCrop"]},
    }


def test_a_remedy_that_no_config_expresses_is_a_sentence(diagnosis, make_finding):
    history = Synthetic(layers=3, steps=20).history()
    found = make_finding("no-gradient", layer="layers.1.weight", step=9, severity=Severity.WARNING, code="GW106")
    history.report(found)
    cause = Diagnosis(
        cause="cut from the graph",
        certainty=0.9,
        findings=(found,),
        because="x",
        confirm="y",
        remedies=(Remedy(text="Remove the detach() before it"),),
    )

    lines = diagnosis(history, [cause]).splitlines()

    assert lines[-1].strip() == "fix Remove the detach() before it"


def test_a_healthy_run_has_its_numbers_and_its_layers(diagnosis, healthy):
    lines = diagnosis(healthy.history, ()).splitlines()

    assert lines[0].startswith("✔ healthy  quick")
    assert [line.split()[1] for line in lines[5:]] == [f"layers.{i}" for i in range(4)]


@pytest.mark.parametrize("width", [80, 200])
def test_it_fits_the_terminal(diagnosis, vanishing, width):
    text = diagnosis(vanishing.history, vanishing.diagnoses, width=width)

    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize(
    ("layer", "evidence", "statistic"),
    [
        ("layers.0.weight", {"grad__zero_frac": 1.0}, "grad.zero_frac"),
        ("layers.0.weight", {"unheard_of": 1.0}, "grad.l2"),
        ("layers.0", {}, "grad.l2"),
        ("acts.1", {}, "act.dead_frac"),
        (None, {"grad_norm__before_clip": 1.0}, "grad_norm.before_clip"),
        (None, {"val_loss": 1.0}, "val_loss"),
        (None, {}, "loss"),
        ("elsewhere", {"grad__l2": 1.0}, None),
    ],
)
def test_the_series_of_a_finding_is_the_first_that_is_recorded_for_its_layer(
    healthy, make_finding, layer, evidence, statistic
):
    found = make_finding("any", layer=layer, step=5, severity=Severity.INFO, code="GW1", **evidence)

    series = series_of(found, healthy.history)

    assert (series.statistic if series else None) == statistic


def test_a_series_leaves_out_what_was_not_measured_and_keeps_what_broke(broken, healthy, make_finding):
    def series(run, layer, statistic):
        name = statistic.replace(".", "__")
        found = make_finding("any", layer=layer, step=5, severity=Severity.INFO, code="GW1", **{name: 0.0})
        return series_of(found, run.history)

    assert series(healthy, None, "val_loss").steps_T.tolist() == [23, 47, 71, 95, 119]
    assert series(broken, None, "loss").caption.endswith("to NaN or Inf")
    assert series(broken, "layers.0.weight", "grad.l2").caption.endswith("to NaN or Inf, log scale")
    assert series(broken, "layers.2.weight", "grad.l2") is None, "it never had a gradient"


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
def test_the_html_of_a_run_is_well_formed_and_begins_with_its_health(request, name):
    run = request.getfixturevalue(name)

    read = _Reader(diagnosis_html(run.history, run.diagnoses))

    assert read.text.startswith("✔ healthy" if name == "healthy" else "✖ ")
    assert read.tags == {"pre", "span"}, "nothing that a notebook would run or load"


def test_the_html_of_a_healthy_run_has_its_layers_and_no_findings(healthy):
    text = _Reader(diagnosis_html(healthy.history, ())).text

    assert re.findall(r"✔ +(layers\.\d)", text) == [f"layers.{i}" for i in range(4)]
    assert "found" not in text


def test_the_html_of_an_ill_run_has_cause_and_remedy(vanishing):
    text = _Reader(diagnosis_html(vanishing.history, vanishing.diagnoses)).text

    assert "saturating activations in a deep network (almost certain, 2 symptoms)" in text
    assert re.search(r"model: *\n +activation: relu", text)


def test_names_are_escaped_in_html(make_finding, healthy):
    history = History(RunInfo(name="<b>x</b>", created="", layers=healthy.history.info.layers))
    history.report(make_finding("<i>kind", layer='<img src="x">', step=1, severity=Severity.WARNING, code="GW1"))
    history.append(0, run={"loss": 1.0}, param_SL=newest_row(healthy.history.param))

    assert _Reader(diagnosis_html(history, ())).tags == {"pre", "span"}


def test_the_html_of_a_run_without_a_step_says_so():
    page = diagnosis_html(History(RunInfo(name="early", created="", layers=())), ())

    assert "no steps recorded" in page
    assert "healthy" not in page
