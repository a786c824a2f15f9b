"""A layer whose gradient dwarfs the others' is worth a warning until its group has a rate that makes up for it."""

from dataclasses import replace

import pytest

from gradwatch.detect.gradients.layer_imbalance import LayerImbalance
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Severity


@pytest.mark.parametrize(
    ("factor", "severity"),
    [(1e-3, Severity.INFO), (1e-2, Severity.INFO), (0.5, Severity.WARNING), (10.0, Severity.WARNING)],
)
def test_a_far_lower_rate_of_its_own_makes_up_for_a_large_gradient(factor, severity, replay):
    sick = Synthetic(steps=40).imbalance(4, factor=1e4).own_rate(4, factor=factor)

    assert {finding.severity for finding in replay(sick.history(), [LayerImbalance()])} == {severity}


@pytest.mark.parametrize(("bias", "layers"), [(0.01, {"layers.3"}), (100.0, set())])
def test_an_output_layer_leads_where_its_inputs_are_no_smaller_than_its_share_of_the_loss(bias, layers, replay):
    sick = Synthetic(steps=40, layers=4)
    sick.grad_l2_TL[:, 2] *= 1e4
    of_output = [replace(layer, module="layers.3") for layer in sick.info.layers[2:]]
    of_output[1] = replace(of_output[1], name="layers.3.bias", shape=(64,))
    sick.info = replace(sick.info, layers=(*sick.info.layers[:2], *of_output))
    sick.grad_l2_TL[:, 3] = bias * sick.grad_l2_TL[:, 2]

    assert {finding.layer for finding in replay(sick.history(), [LayerImbalance()])} == layers


def test_a_low_rate_that_all_layers_share_makes_up_for_nothing(replay):
    sick = Synthetic(steps=40, lr=1e-6).imbalance(4, factor=1e4)

    assert [finding.severity for finding in replay(sick.history(), [LayerImbalance()])] == [Severity.WARNING]


@pytest.mark.parametrize(("fall", "growth", "severity"), [(1e4, 1, Severity.INFO), (10, 1e3, Severity.WARNING)])
def test_a_lead_that_comes_from_the_fall_of_all_others_is_for_information(fall, growth, severity, replay):
    sick = Synthetic(steps=60)
    sick.grad_l2_TL[20:] /= fall
    sick.grad_l2_TL[20:, 4] *= fall * growth

    assert {finding.severity for finding in replay(sick.history(), [LayerImbalance()])} == {severity}
