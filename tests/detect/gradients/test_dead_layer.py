"""Dead experts show a router that has collapsed."""

import pytest

from gradwatch.detect.gradients.dead_layer import DeadLayer
from gradwatch.detect.gradients.dead_layer_rules.examples import make_collapsed_router
from gradwatch.events import PARAMETERS_JOINED
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Finding, Severity


def found(made, kind):
    """Return the severities of what is found in a run after something else was."""
    history = made.history()
    history.report(Finding(code="GW202", kind=kind, layer="gate", step=70, severity=Severity.WARNING, message=""))
    return {finding.severity for finding in DeadLayer().detect(history)}


def test_a_saturated_router_does_not_explain_the_experts_that_it_leaves_alone():
    assert found(make_collapsed_router(), "saturated-activation") == {Severity.WARNING}
    assert found(make_collapsed_router(), "exploding-gradient") == {Severity.INFO}


def test_a_saturated_activation_explains_a_layer_that_stands_by_itself():
    assert found(Synthetic(steps=120).dead(5, onset=60), "saturated-activation") == {Severity.INFO}


@pytest.mark.parametrize(
    ("onset", "severity"),
    [
        pytest.param(57, Severity.INFO, id="between the two comparisons"),
        pytest.param(45, Severity.WARNING, id="before the first"),
        pytest.param(65, Severity.WARNING, id="after the second"),
    ],
)
def test_a_head_waits_for_its_task_if_its_gradient_ended_as_another_head_joined(onset, severity):
    made = Synthetic(steps=120).dead(11, onset=onset)
    made.add_event(PARAMETERS_JOINED, step=60, values={"tensors": 2, "since": 50})

    assert [finding.severity for finding in DeadLayer().detect(made.history())] == [severity]
