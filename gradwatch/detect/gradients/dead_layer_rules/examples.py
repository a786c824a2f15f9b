"""Make runs with a collapsing router, a skipped layer, an annealed loss or a zero input, for `dead_layer`."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gradwatch.events import SIDE_BY_SIDE
from gradwatch.history.synthetic.builder import Synthetic


def make_collapsed_router() -> Synthetic:
    """Return a run of twelve layers, ten of them experts, in which only the last expert keeps a gradient."""
    made = Synthetic(steps=120).dead(range(2, 11), onset=60)
    layers = made.info.layers
    experts = (replace(la, name=f"experts.{la.name}", module=f"experts.{la.module}") for la in layers[2:])
    made.info = replace(made.info, layers=(*layers[:2], *experts))
    return made.add_event(SIDE_BY_SIDE, layer="experts.layers", values={"modules": 10.0})


def make_faded(*, until: int, fades: bool = True) -> Synthetic:
    """Return a run of 160 steps in which a layer is skipped at a rate that rises to 1, or at once, at a step."""
    made = Synthetic(steps=160)
    rate_T = made.t_T / until if fades else made.t_T >= until
    made.grad_l2_TL[made.rng.random(160) < rate_T, 5] = np.nan
    return made


def make_routed(*, unused: int, onset: int = 60, end: int | None = None, tokens: float = 32) -> Synthetic:
    """Return a run of 140 steps with a router `gate`, which sends no token to some of its 64 experts for some steps."""
    made = Synthetic(steps=140, activations=3)
    return made.routed(1, unused=unused, tokens=tokens, onset=onset, end=end)


def make_zero_input() -> Synthetic:
    """Return a run of 120 steps in which only the bias of the last layer has a gradient, from step 60 on."""
    made = Synthetic(steps=120).dead(range(11), onset=60)
    *others, last = made.info.layers
    bias = replace(last, name="layers.10.bias", module="layers.10", shape=(64,))
    made.info = replace(made.info, layers=(*others, bias))
    return made


def make_annealed() -> Synthetic:
    """Return a run of 120 steps in which the gradient of the last layer shrinks evenly, to zero at step 60."""
    made = Synthetic(steps=120)
    made.grad_l2_TL[:, 11] *= np.clip(1 - made.t_T / 60, 0, None)
    return made
