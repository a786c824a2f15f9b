"""Losses that no batch changes any more are found; losses that merely stand still, or of equal batches, are not."""

import numpy as np
import pytest

from gradwatch.detect.data_and_loss.loss_plateau_rules.constant_loss import find_constant_loss
from gradwatch.history.synthetic.builder import Synthetic


def sign(spread, *, floor=0.9, hashes=None, seed=0):
    made = Synthetic(steps=160, seed=seed)
    noise_T = np.where(made.t_T < 60, 0.03, spread) * made.rng.standard_normal(160)
    made.loss_T = (floor + (1 - floor) * np.exp(-made.t_T / 10)) * np.exp(noise_T)
    if hashes is not None:
        made.batch_hash_T[:] = hashes
    return find_constant_loss(made.history(), constant=0.0003, left=0.5, first=10.0, batches=0.5)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("spread", [0.0, 1e-6, 5e-5])
@pytest.mark.parametrize("floor", [1.0, 0.9, 0.6])
def test_a_loss_that_no_batch_changes_is_found(spread, floor, seed):
    assert sign(spread, floor=floor, seed=seed)


@pytest.mark.parametrize(
    "options",
    [
        {"spread": 1e-3},
        {"spread": 0.03},
        {"spread": 1e-6, "floor": 0.3},
        {"spread": 1e-6, "hashes": 5.0},
        {"spread": 1e-6, "hashes": np.nan},
    ],
    ids=["a large batch", "a plateau", "most is learned", "one batch", "no batches are passed"],
)
def test_other_losses_are_no_news(options):
    assert sign(**options) is None
