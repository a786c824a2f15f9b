"""Steps without an update say nothing about which parameters the loss reaches."""

import warnings

from gradwatch.detect.no_gradient import NoGradient
from gradwatch.history.synthetic import Synthetic


def test_skipped_steps_alone_are_no_evidence_and_no_trouble(replay):
    made = Synthetic(steps=40).no_gradient(None)
    made.skipped_T[:] = 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replay(made.history(), [NoGradient()]) == (), "nothing was looked at"
