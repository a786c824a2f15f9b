"""A layer whose gradient dwarfs the others' is worth a warning until its group has a rate that makes up for it."""

import pytest

from gradwatch.detect.layer_imbalance import LayerImbalance
from gradwatch.history.synthetic import Synthetic
from gradwatch.records import Severity


@pytest.mark.parametrize(
    ("factor", "severity"),
    [(1e-3, Severity.INFO), (1e-2, Severity.INFO), (0.5, Severity.WARNING), (10.0, Severity.WARNING)],
)
def test_a_far_lower_rate_of_its_own_makes_up_for_a_large_gradient(factor, severity, replay):
    sick = Synthetic(steps=40).imbalance(4, factor=1e4).own_rate(4, factor=factor)

    assert {finding.severity for finding in replay(sick.history(), [LayerImbalance()])} == {severity}


def test_a_low_rate_that_all_layers_share_makes_up_for_nothing(replay):
    sick = Synthetic(steps=40, lr=1e-6).imbalance(4, factor=1e4)

    assert [finding.severity for finding in replay(sick.history(), [LayerImbalance()])] == [Severity.WARNING]
