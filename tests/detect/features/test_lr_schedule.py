"""Jumps of the learning rate, and what is none."""

import numpy as np
import pytest

from gradwatch.detect.features.lr_schedule import last_jump


@pytest.mark.parametrize(
    ("rates", "row"),
    [
        ([0.1, 0.1, 1.0, 1.0], 2),
        ([0.1, 1.0, 0.1, 5.0, 5.0], 3),
        ([0.1, 0.2, 0.4, 0.8], None),
        ([1.0, 0.1, 1.0, 0.1], None),
        ([0.0, 0.1, 0.2], None),
        ([0.1], None),
    ],
    ids=["a jump", "the last of two", "a warm-up", "a restart", "a start from zero", "a single step"],
)
def test_the_last_rise_beyond_all_before_is_found(rates, row):
    assert last_jump(np.array(rates), 3.0) == row
