"""Findings become diagnoses: all of them explained, the root before what follows, as few causes as possible."""

import json
import math
from dataclasses import replace

import pytest

from gradwatch.detect import detectors
from gradwatch.detect.data_and_loss.loss_plateau_rules.examples import make_contracting
from gradwatch.diagnose.causes import CAUSES
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.pipeline.redetect import redetect
from gradwatch.records import ActivationInfo, Finding, Quantity, Severity

CODES = {kind: f"GW{i}" for i, kind in enumerate(sorted({k for c in CAUSES for k in (*c.leads, *c.explains)}))}


def found(kind: str, step: int, *, layer: str | None = None, severity: Severity = Severity.WARNING) -> Finding:
    return Finding(
        code=CODES.get(kind, "GW999"), kind=kind, layer=layer, step=step, severity=severity, message=f"{kind} it is"
    )


SETTINGS = {
    "model.activation": "sigmoid",
    "model.init": "default",
    "optim.lr": 1e-3,
    "schedule.name": "MultiStepLR",
    "train.scaler.enabled": False,
}


def with_findings(made: Synthetic, *findings: Finding) -> History:
    made.info = replace(made.info, settings=SETTINGS)
    history = made.history()
    history.findings.extend(findings)
    return history


def test_a_healthy_run_needs_no_diagnosis():
    assert diagnose(Synthetic(steps=40).history()) == ()


def test_a_nan_after_an_explosion_after_a_jump_of_the_rate_is_laid_to_the_jump():
    made = Synthetic(steps=120)
    made.lr_T[60:] *= 100
    history = with_findings(
        made,
        found("non-finite", 80, severity=Severity.CRITICAL),
        found("exploding-gradient", 75, severity=Severity.CRITICAL),
        found("learning-rate-too-high", 70),
    )

    (diagnosis,) = diagnose(history)

    assert diagnosis.cause_id == "learning-rate-too-high"
    assert [f.kind for f in diagnosis.findings] == ["learning-rate-too-high", "exploding-gradient", "non-finite"]
    assert diagnosis.certainty > 0.9
    assert "step 60" in diagnosis.because, "the jump is named"
    assert diagnosis.remedies[0].patch == {"schedule": None}, "optim.lr is what the rate was before the jump"


def test_dead_relus_after_a_jump_of_the_rate_are_laid_to_the_jump():
    made = Synthetic(steps=120, activations=2)
    made.lr_T[60:] *= 1000
    history = with_findings(made, found("dead-relu", 80, layer="acts.1", severity=Severity.CRITICAL))

    assert diagnose(history)[0].cause_id == "learning-rate-too-high"


def test_dead_relus_without_a_jump_are_laid_to_the_relus():
    history = with_findings(Synthetic(steps=120, activations=2), found("dead-relu", 10, layer="acts.1"))

    assert diagnose(history)[0].cause_id == "dead-relus"


def test_updates_that_point_at_the_origin_are_laid_to_a_decay():
    history = redetect(make_contracting(), detectors())

    assert diagnose(history)[0].cause_id == "strong-weight-decay"


@pytest.mark.parametrize(
    ("decays", "matrices", "is_decay"), [((0.0,), 1, False), ((0.01,), 1, True), ((), 1, True), ((0.0,), 2, True)]
)
def test_weights_of_a_linear_model_that_shrink_without_a_decay_are_laid_to_something_else(decays, matrices, is_decay):
    made = Synthetic(steps=200, layers=matrices)
    made.info = replace(made.info, initial_decays=decays)
    shrunk = Quantity(key="weight.l2.shrunk_decades", value=2.0)
    history = with_findings(made, replace(found("loss-plateau", 160), evidence=(shrunk,)))

    assert (diagnose(history)[0].cause_id == "strong-weight-decay") == is_decay


def test_a_nan_out_of_the_calm_is_laid_to_a_formula():
    history = with_findings(Synthetic(steps=120), found("non-finite", 100, severity=Severity.CRITICAL))

    assert diagnose(history)[0].cause_id == "singular-formula"


def test_a_nan_in_the_first_step_is_laid_to_the_data():
    made = Synthetic(steps=20)
    made.loss_T[0] = math.nan
    history = with_findings(made, found("non-finite", 0, severity=Severity.CRITICAL))

    assert diagnose(history)[0].cause_id == "bad-data"


def test_a_symptom_found_long_before_a_cause_does_not_follow_from_it():
    history = with_findings(Synthetic(steps=300), found("non-finite", 20), found("learning-rate-too-high", 250))

    causes = {d.cause_id: [f.kind for f in d.findings] for d in diagnose(history)}

    assert causes["learning-rate-too-high"] == ["learning-rate-too-high"]
    assert len(causes) == 2


def test_vanishing_gradients_are_laid_to_sigmoids_where_there_are_any():
    made = Synthetic(steps=40, activations=1)
    made.info = replace(made.info, activations=(ActivationInfo(name="acts.0", module_type="Sigmoid"),))
    findings = (found("vanishing-gradient", 10, layer="layers.0.weight"), found("loss-plateau", 160))

    with_sigmoid = diagnose(with_findings(made, *findings))
    without = diagnose(with_findings(Synthetic(steps=40), *findings))

    assert [d.cause_id for d in with_sigmoid] == ["saturating-stack"]
    assert {f.kind for f in with_sigmoid[0].findings} == {"vanishing-gradient", "loss-plateau"}, "one cause for both"
    assert "model.activation" in with_sigmoid[0].remedies[0].patch
    assert without[0].cause_id != "saturating-stack"


def test_underflow_is_laid_to_the_missing_scaler_only_where_it_is_missing():
    missing = Synthetic(steps=40, precision="fp16")
    missing.info = replace(missing.info, loss_scaling=False)
    finding = found("fp16-underflow", 5, layer="layers.0")

    assert diagnose(with_findings(missing, finding))[0].remedies[0].patch == {"train.scaler.enabled": True}
    assert diagnose(with_findings(Synthetic(steps=40, precision="fp16"), finding))[0].cause == "loss scale too low"


def test_a_layer_cut_from_the_graph_is_named_in_the_advice():
    diagnosis = diagnose(with_findings(Synthetic(steps=40), found("no-gradient", 10, layer="encoder")))[0]

    assert "encoder" in diagnosis.remedies[0].text
    assert diagnosis.remedies[0].patch == {}, "no config can mend a detach()"


@pytest.mark.parametrize("seed", range(20))
def test_every_finding_ends_in_exactly_one_diagnosis(seed):
    made = Synthetic(steps=200)
    kinds = list(CODES)
    findings = []
    for i in range(12):
        kind = kinds[int(made.rng.integers(len(kinds))) - seed]
        step, layer = int(made.rng.integers(200)), f"layers.{i}.weight" if made.rng.random() < 0.5 else None
        findings.append(found(kind, step, layer=layer, severity=Severity(int(made.rng.integers(3)))))
    history = with_findings(made, *findings)

    explained = [f for d in diagnose(history) for f in d.findings]

    assert sorted(map(repr, explained)) == sorted(map(repr, findings))


@pytest.mark.parametrize(("severity", "causes"), [(Severity.WARNING, 1), (Severity.INFO, 2)])
def test_batches_that_may_be_all_the_data_explain_no_plateau(severity, causes):
    history = with_findings(
        Synthetic(steps=200), found("constant-batch", 30, severity=severity), found("loss-plateau", 120)
    )

    made = {d.cause_id: [f.kind for f in d.findings] for d in diagnose(history)}

    assert len(made) == causes
    assert ("loss-plateau" in made["constant-batch"]) == (causes == 1)


def test_diagnoses_come_gravest_first_and_then_earliest():
    history = with_findings(
        Synthetic(steps=200),
        found("overfitting", 10, severity=Severity.INFO),
        found("constant-batch", 100),
        found("not-optimized", 50, layer="layers.3.weight"),
        found("loss-scale-collapse", 150, severity=Severity.CRITICAL),
    )

    made = [(d.severity, d.findings[0].step) for d in diagnose(history)]

    assert made == sorted(made, key=lambda m: (-m[0], m[1]))


def test_an_unknown_kind_is_unexplained_but_says_what_to_look_at():
    diagnosis = diagnose(with_findings(Synthetic(steps=40), found("something-new", 30)))[0]

    assert (diagnosis.cause, diagnosis.cause_id) == ("something-new, unexplained", "")
    assert diagnosis.certainty == 0
    assert "gradwatch explain" in diagnosis.confirm


@pytest.mark.parametrize("kind", sorted({k for c in CAUSES for k in c.leads}))
def test_every_kind_that_leads_somewhere_gets_a_diagnosis_that_can_be_written_as_json(kind):
    for diagnosis in diagnose(with_findings(Synthetic(steps=60), found(kind, 30, layer="layers.3.weight"))):
        text = json.dumps(diagnosis.to_json(), allow_nan=False)

        assert json.loads(text)["cause_id"] == diagnosis.cause_id
        assert 0 <= diagnosis.certainty <= 0.95
        assert diagnosis.because
        assert diagnosis.confirm


def test_more_signs_make_surer():
    alone = diagnose(with_findings(Synthetic(steps=200), found("missing-zero-grad", 8)))[0]
    more = diagnose(
        with_findings(Synthetic(steps=200), found("missing-zero-grad", 8), found("exploding-gradient", 30))
    )[0]

    assert more.certainty > alone.certainty
    assert more.cause_id == alone.cause_id


def test_the_same_history_gives_the_same_diagnoses():
    history = with_findings(
        Synthetic(steps=60), found("exploding-gradient", 30), found("dead-relu", 40, layer="acts.0")
    )

    assert diagnose(history) == diagnose(history)


@pytest.mark.parametrize(
    ("certainty", "word"),
    [
        (0.95, "almost certain"),
        (0.85, "almost certain"),
        (0.7, "likely"),
        (0.5, "one of two"),
        (0.3, "possible"),
        (0.0, "possible"),
    ],
)
def test_people_read_a_certainty_in_words(certainty, word):
    made = diagnose(with_findings(Synthetic(steps=60), found("non-finite", 30)))[0]

    assert replace(made, certainty=certainty).sureness == word
