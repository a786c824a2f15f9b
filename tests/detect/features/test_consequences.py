"""Symptoms that an earlier finding explains are reported, and do not count as faults of their own."""

import graphlib
from dataclasses import replace

import numpy as np
import pytest

from gradwatch.detect import detectors
from gradwatch.detect.activations.dead_relu import DeadRelu
from gradwatch.detect.features.consequences import FOLLOWS, cause_depth, is_consequence, severity_after
from gradwatch.detect.updates.learning_rate_too_high import LearningRateTooHigh
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Severity

SICK = Finding(code="GW107", kind="layer-imbalance", layer="head", step=10, severity=Severity.WARNING, message="large")


@pytest.fixture
def history():
    return Synthetic(steps=30).history()


def test_a_symptom_that_nothing_explains_is_a_warning(history):
    assert severity_after(history, "rising-sparsity") == Severity.WARNING


def test_a_symptom_that_an_earlier_finding_explains_is_for_information(history):
    history.report(SICK)

    assert severity_after(history, "rising-sparsity") == Severity.INFO
    assert severity_after(history, "gradient-spike") == Severity.WARNING, "a large head makes no single spike"


def test_what_is_for_information_explains_nothing(history):
    history.report(replace(SICK, severity=Severity.INFO))

    assert not is_consequence(history, "rising-sparsity")


@pytest.mark.parametrize(("step", "severity"), [(4, Severity.WARNING), (0, Severity.INFO)])
def test_an_update_before_numbers_ceased_to_be_finite_does_not_follow_from_that(step, severity):
    made = Synthetic(steps=6)
    made.update_factor_TL[0] = 1e4
    history = made.history()
    history.report(replace(SICK, kind="non-finite", step=step))

    assert {finding.severity for finding in LearningRateTooHigh().detect(history)} == {severity}


def test_only_kinds_that_exist_follow_from_each_other_and_none_from_itself():
    kinds = {detector.kind for detector in detectors()}

    assert set(FOLLOWS) <= kinds
    assert all(roots <= kinds for roots in FOLLOWS.values())
    assert all(kind not in roots for kind, roots in FOLLOWS.items())


def test_no_kind_excuses_itself_by_way_of_others():
    assert set(graphlib.TopologicalSorter(FOLLOWS).static_order()) >= set(FOLLOWS), "a circle would raise"
    assert all(cause_depth(root) < cause_depth(kind) for kind, roots in FOLLOWS.items() for root in roots)


def test_a_cause_that_is_found_at_the_same_step_explains_its_consequence(replay):
    made = Synthetic(steps=40).imbalance(9)
    unowned = (replace(layer, group=None) if i == 6 else layer for i, layer in enumerate(made.info.layers))
    made.info = replace(made.info, layers=tuple(unowned))
    made.update_factor_TL[:, 6] = 0

    found = {f.kind: (f.step, f.severity) for f in replay(made.history(), detectors())}

    assert found["not-optimized"][0] == found["layer-imbalance"][0], "they are found at the same step"
    assert (found["not-optimized"][1], found["layer-imbalance"][1]) == (Severity.WARNING, Severity.INFO)


def test_an_explosion_after_a_jump_of_the_rate_is_reported_as_the_jump(replay):
    made = Synthetic(steps=140).exploding(onset=60, rate=1.15)
    made.lr_T[60:] *= 100

    found = {f.kind: f.severity for f in replay(made.history(), detectors())}

    assert found["learning-rate-too-high"] == Severity.CRITICAL, "the loss is lost, and the jump is why"
    assert found["exploding-gradient"] == Severity.INFO


def test_a_jump_of_the_rate_that_costs_less_than_was_learned_stays_a_warning(replay):
    made = Synthetic(steps=140)
    made.lr_T[60:] *= 100
    made.loss_T[60:] *= 1.8

    found = {f.kind: f.severity for f in replay(made.history(), detectors())}

    assert found == {"learning-rate-too-high": Severity.WARNING}


def test_a_rate_is_critical_once_the_loss_is_lost_and_is_reported_where_it_was_found_first(replay):
    made = Synthetic(steps=140)
    made.lr_T[60:] *= 100
    made.loss_T[60:] *= 1.8
    made.loss_T[90:] *= 20

    (before,) = replay(made.history(until=90), detectors())
    (after, *_) = replay(made.history(), detectors())

    assert (before.kind, before.severity) == ("learning-rate-too-high", Severity.WARNING)
    assert (after.kind, after.severity) == ("learning-rate-too-high", Severity.CRITICAL)
    assert (after.step, after.layer) == (before.step, before.layer)
    assert after.message.endswith("the model is back at its initial loss")


def test_a_lost_loss_is_not_laid_to_the_rate_where_something_else_was_found_before(replay):
    made = Synthetic(steps=140).imbalance(4)
    made.update_factor_TL[:, 4] /= 10  # so that no update replaces the weight
    made.lr_T[60:] *= 100
    made.loss_T[60:] *= 40

    found = {f.kind: f.severity for f in replay(made.history(), detectors())}

    assert found["layer-imbalance"] == Severity.WARNING
    assert found["learning-rate-too-high"] == Severity.WARNING


def test_an_explosion_at_a_steady_rate_stays_critical(replay):
    found = {
        f.kind: f.severity for f in replay(Synthetic(steps=140).exploding(onset=60, rate=1.15).history(), detectors())
    }

    assert found["exploding-gradient"] == Severity.CRITICAL


def test_a_plateau_behind_a_rate_that_is_too_low_is_for_information(replay):
    made = Synthetic(steps=200, lr=1e-8)
    made.loss_T[:] = 2.3 * np.exp(0.03 * made.rng.standard_normal(made.steps))

    found = {f.kind: f.severity for f in replay(made.history(), detectors())}

    assert found == {"learning-rate-too-low": Severity.WARNING, "loss-plateau": Severity.INFO}


def test_what_a_collapsed_scale_flushes_is_for_information(history):
    assert severity_after(history, "fp16-underflow") == Severity.WARNING
    history.report(replace(SICK, kind="loss-scale-collapse", layer=None))

    assert severity_after(history, "fp16-underflow") == Severity.INFO


@pytest.mark.parametrize(("dead", "severity"), [(0.9, Severity.INFO), (1.0, Severity.CRITICAL)])
def test_units_that_bias_alone_silences_where_signals_vanish_are_for_information_until_nothing_passes(dead, severity):
    made = Synthetic(steps=60, activations=3)
    made.dead_frac_TA[20:, 1] = dead
    history = made.history()
    assert {f.severity for f in DeadRelu().detect(history)} == {max(severity, Severity.WARNING)}
    history.report(replace(SICK, kind="vanishing-gradient"))

    assert {f.severity for f in DeadRelu().detect(history)} == {severity}
