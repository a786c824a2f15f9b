"""Steps without an update say nothing about which parameters the loss reaches."""

import warnings
from dataclasses import replace

from gradwatch.detect.gradients.no_gradient import NoGradient
from gradwatch.detect.updates.not_optimized import NotOptimized
from gradwatch.history.synthetic.builder import Synthetic
from gradwatch.records import Severity


def test_skipped_steps_alone_are_no_evidence_and_no_trouble(replay):
    made = Synthetic(steps=40).no_gradient(None)
    made.skipped_T[:] = 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replay(made.history(), [NoGradient()]) == (), "nothing was looked at"


def test_a_factor_whose_other_one_nothing_moves_is_for_information(replay):
    made = Synthetic(steps=40).no_gradient(4, zero=True)
    left = tuple(replace(layer, group=None) if i == 5 else layer for i, layer in enumerate(made.info.layers))
    made.info = replace(made.info, layers=left)
    made.update_factor_TL[:, 5] = 0

    found = {f.kind: f.severity for f in replay(made.history(), [NoGradient(), NotOptimized()])}

    assert found == {"not-optimized": Severity.WARNING, "no-gradient": Severity.INFO}
