"""A plateau is reported after as many steps as its settings ask for, and never before a trend can be seen."""

from dataclasses import replace

import pytest

from gradwatch.detect.data_and_loss.loss_plateau import LossPlateau
from gradwatch.detect.data_and_loss.loss_plateau_rules.examples import make_flat
from gradwatch.detect.data_and_loss.loss_plateau_rules.stall import MIN_WAIT_STEPS
from gradwatch.events import POLICY
from gradwatch.records import Severity


@pytest.mark.parametrize("patience", [0, 1, 31, 33])
def test_a_short_patience_waits_for_settled_losses(patience):
    detector = LossPlateau(patience=patience)
    run = make_flat()

    early = [list(detector.detect(run.history(until=steps))) for steps in range(1, MIN_WAIT_STEPS + 1)]

    assert early == [[]] * MIN_WAIT_STEPS
    assert any(list(detector.detect(run.history(until=steps))) for steps in range(60, 160, 10))


@pytest.mark.parametrize(("planned", "steps"), [(3200, [160]), (4000, [])])
def test_a_long_run_waits_for_one_in_twenty_of_its_planned_steps(planned, steps, replay):
    run = make_flat()
    (usual,) = replay(run.history(), [LossPlateau()])
    run.info = replace(run.info, total_steps=planned)

    found = replay(run.history(), [LossPlateau()])

    assert usual.step < 160
    assert [finding.step for finding in found] == steps


@pytest.mark.parametrize(("entropy", "severity"), [(0.9, Severity.INFO), (float("nan"), Severity.WARNING)])
def test_only_advantages_of_both_signs_make_a_plateau_information(entropy, severity):
    """A weight for each sample of a classification looks like an advantage, but no entropy is read then."""
    run = make_flat().add_event(POLICY).policy_gradient(divergence=0.02, clipped=0.1, entropy=entropy, onset=0)

    (finding,) = LossPlateau().detect(run.history())

    assert finding.severity is severity
