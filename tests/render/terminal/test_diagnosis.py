"""What `gradwatch diagnose` prints."""

import re

import pytest
import yaml

from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Diagnosis, Remedy, Severity
from gradwatch.render.common.config_patch import patch_yaml
from gradwatch.render.common.series import series_of
from gradwatch.render.terminal.diagnosis import print_diagnosis


@pytest.fixture
def diagnosis(make_console, written):
    def text(history, diagnoses, **options):
        console = make_console(**options)
        print_diagnosis(console, history, diagnoses)
        return written(console)

    return text


def test_it_says_everything_about_a_cause(diagnosis, vanishing):
    text = diagnosis(vanishing.history, vanishing.diagnoses, width=120)

    assert text.startswith("✖ 14 critical problems, 1 warning")
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


def test_a_healthy_run_takes_three_lines(diagnosis, healthy):
    lines = diagnosis(healthy.history, ()).splitlines()

    assert len(lines) == 3
    assert lines[0].startswith("✔ healthy  quick")


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

    assert series(healthy, None, "val_loss").steps_T.tolist() == [39, 79, 119]
    assert series(broken, None, "loss").caption.endswith("to NaN or Inf")
    assert series(broken, "layers.0.weight", "grad.l2").caption.endswith("to NaN or Inf, log scale")
    assert series(broken, "layers.2.weight", "grad.l2") is None, "it never had a gradient"
