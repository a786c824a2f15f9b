"""Make runs with a loss that stands still, as examples for `loss_plateau`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradwatch.events import EMBEDDING_PRODUCT, WEIGHTS_TRAINED, EventKind
from gradwatch.history.store import History
from gradwatch.history.synthetic.builder import Synthetic


def make_flat(*, fall: float = 0.0, was_trained: bool = False) -> Synthetic:
    """Return a run in which the loss stands still, or falls by a fraction in 160 steps."""
    made = Synthetic(steps=200)
    made.loss_T = 2.3 * (1 - fall * made.t_T / 160) * np.exp(0.03 * made.rng.standard_normal(made.steps))
    return made.add_event(WEIGHTS_TRAINED, values={"changes": 300}) if was_trained else made


def make_climbing(*, until: int) -> History:
    """Return a run in which the loss climbs at each step, with noise, and from one step on is half of the first."""
    made = make_flat()
    made.loss_T *= np.where(made.t_T < until, 1 + 0.05 * made.t_T, 0.5)
    return made.history()


def make_decayed(*, fall: float = 0.0) -> Synthetic:
    """Return a run in which all weights shrink a thousandfold in 100 steps, and the loss falls by a fraction."""
    made = make_flat(fall=fall)
    made.weight_l2_TL *= 10 ** (-3 * np.minimum(made.t_T / 100, 1.0))[:, None]
    return made


def make_constant(*kinds: EventKind, unread: float = 0.0) -> History:
    """Return a run in which the loss halves at once and then stands, with events about its predictions."""
    made = make_flat()
    made.loss_T[20:] *= 0.5
    made.info = replace(made.info, layers=tuple(replace(i, module_type="Embedding") for i in made.info.layers))
    made.zero_frac_TL[:] = unread
    for kind in kinds:
        made.add_event(kind, step=100)
    return made.history()


def make_product() -> History:
    """Return a flat run in which only two multiplied embeddings grow."""
    made = make_flat().add_event(EMBEDDING_PRODUCT, values={"first": 0.0, "second": 1.0, "dimension": 16.0})
    tables = (replace(layer, module_type="Embedding") for layer in made.info.layers[:2])
    made.info = replace(made.info, layers=(*tables, *made.info.layers[2:]))
    made.weight_l2_TL[:, :2] *= 1 + 0.002 * made.t_T[:, None]
    return made.history()


def make_collapsed(*, spread: float, equal_batches: bool = False) -> History:
    """Return a run in which the loss falls a little, and then differs from batch to batch by a fraction only."""
    made = Synthetic(steps=120)
    noise_T = np.where(made.t_T < 40, 0.05, spread) * made.rng.standard_normal(made.steps)
    made.loss_T = 0.5 * (1 + 0.1 * np.exp(-made.t_T / 10)) * np.exp(noise_T)
    if equal_batches:
        made.batch_hash_T[:] = 7.0
    return made.history()
