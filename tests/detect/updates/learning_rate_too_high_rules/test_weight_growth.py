"""Weights that grow while the loss falls do no harm, unless the loss is a policy gradient."""

import numpy as np
import pytest

from gradwatch.detect import detectors
from gradwatch.events import POLICY
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.pipeline.redetect import redetect
from gradwatch.records import Severity


def severities(made):
    found = redetect(made.history(), detectors({})).findings
    return [finding.severity for finding in found if finding.kind == "learning-rate-too-high"]


@pytest.fixture
def growing():
    made = Synthetic(steps=60, lr=0.1)
    made.weight_l2_TL *= 1 + 0.2 * made.t_T[:, None]
    made.loss_T[:] = 2.3 * np.maximum(np.exp(-made.t_T / 10), 0.1)
    return made


def test_growth_is_for_information_while_the_loss_falls(growing):
    assert severities(growing) == [Severity.INFO]


def test_the_loss_of_a_policy_gradient_does_not_excuse_growth(growing):
    growing.add_event(POLICY).policy_gradient(divergence=0.02, clipped=0.1)

    assert severities(growing) == [Severity.WARNING]
