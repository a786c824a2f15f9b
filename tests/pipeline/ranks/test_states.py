"""States of the ranks at equal steps give the gradient noise scale."""

import numpy as np
import pytest

from gradwatch import catalogue
from gradwatch.diagnose.gradient_noise import noise_scale
from gradwatch.events import RANK_NOISE, RANK_STATE
from gradwatch.history.store import History
from gradwatch.pipeline.ranks.states import StateComparison
from gradwatch.records import RunInfo

NUM_RANKS, BATCH, SIZE = 4, 16, 20_000
STEPS = (0, 1, 2, 3, 4, 8, 16, 32)
SCALE = 200.0
"""The planted noise scale, in samples."""


def states(step, *, clip=1.0, loss_scale=1.0, is_averaged=True):
    """The states of all ranks, with a gradient of norm 1 and noise of `SCALE` per sample."""
    draw = np.random.default_rng(step)
    signal = np.full(SIZE, SIZE**-0.5)
    local_RN = signal + draw.normal(0.0, np.sqrt(SCALE / BATCH / SIZE), (NUM_RANKS, SIZE))
    update_RN = clip * (np.broadcast_to(local_RN.mean(0), local_RN.shape) if is_averaged else local_RN)
    scaled_RN = loss_scale * local_RN
    return {
        rank: {"local": float(scaled @ scaled), "product": float(scaled @ update), "reduced": float(update @ update)}
        for rank, (scaled, update) in enumerate(zip(scaled_RN, update_RN, strict=True))
    }


def noise_events(**settings):
    comparison = StateComparison(NUM_RANKS, has_scale=False, has_own_batches=True)
    for step in STEPS:
        for rank, values in states(step, **settings).items():
            comparison.add(rank, RANK_STATE.emit(step=step, values=values))
    return [e for e in comparison.compare(dict.fromkeys(range(NUM_RANKS), True)) if e.kind == RANK_NOISE.name]


@pytest.mark.parametrize("settings", [{}, {"clip": 0.01}, {"loss_scale": 1024.0}], ids=str)
def test_the_noise_scale_follows_from_gradients_before_and_after_the_average(settings):
    history = History(RunInfo(name="", created="", layers=(), world_size=NUM_RANKS))
    history.append(
        0, run={"samples_per_s": 2.0 * BATCH, "step_ms": 500.0}, param_SL=np.empty((len(catalogue.PARAM), 0))
    )
    for event in noise_events(**settings):
        history.add_event(event)

    found = noise_scale(history)

    # the noise is known to 1 / sqrt(SIZE), and the signal to about 2 sqrt(SCALE / BATCH / NUM_RANKS / SIZE)
    assert found.samples == pytest.approx(SCALE, rel=0.1)
    assert (found.batch, found.steps) == (NUM_RANKS * BATCH, len(STEPS))


def test_gradients_that_were_not_averaged_give_no_noise_scale():
    assert noise_events(is_averaged=False) == []
