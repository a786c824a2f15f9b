"""An expert that is not chosen for a while is no dead layer, however long the run; one that stays away is."""

import math
from dataclasses import replace

import numpy as np
import pytest

from gradwatch.detect.gradients.dead_layer_rules.experts import chance_of_absence, experts_of, router_of
from gradwatch.history.synthetic.builder import Synthetic


def test_the_first_absence_is_never_chance():
    assert chance_of_absence(np.arange(60) >= 40) == 0


def test_an_absence_is_one_of_all_orders_of_the_blocks_that_earlier_ones_leave():
    away_T = np.zeros(60, bool)
    away_T[5:8] = away_T[40:] = True  # 3 steps, so blocks of 4: 10 with use, and then 5 without

    assert chance_of_absence(away_T) == pytest.approx(1 / math.comb(15, 5))


@pytest.mark.parametrize("share", [0.5, 0.1])
@pytest.mark.parametrize("stays", [1, 5])
def test_absences_of_experts_are_as_rare_as_they_claim(share, stays):
    rng = np.random.default_rng(0)
    chances = []
    for _ in range(3000):  # each choice holds for some steps, so the steps are not independent
        away_T = np.repeat(rng.random(256 // stays) >= share, stays)
        chances.append(chance_of_absence(away_T[: np.flatnonzero(away_T)[-1] + 1]))

    # without runs in which the expert had never been away before
    known = np.array([chance for chance in chances if chance])
    for chance in (0.05, 0.005):
        assert np.mean(known <= chance) <= chance + 3 * math.sqrt(chance / len(known))


@pytest.mark.parametrize(
    ("names", "experts"),
    [
        (("moe.gate", "moe.experts.{}"), "moe.experts.{}"),
        (("moe.gate.linear", "moe.experts.{}.fc"), "moe.experts.{}"),
        (("gate", "experts.{}"), "experts.{}"),
        (("blocks.0.moe.gate", "blocks.1.moe.experts.{}"), None),
        (("blocks.0.gate", "blocks.{}.fc"), None),
        (("decoder.moe.gate", "encoder.{}"), None),
    ],
)
def test_experts_are_numbered_next_to_their_router_as_many_as_its_outputs(names, experts):
    made = Synthetic(steps=20, activations=1, layers=10, width=4).routed(0, unused=0, tokens=8)
    router, module = names
    written = [router, *(module.format(i) for i in range(4)), *(f"head.{i}" for i in range(5))]
    layers = (replace(la, name=f"{n}.weight") for la, n in zip(made.info.layers, written, strict=True))
    routing = replace(made.info.activations[0], name=f"{router}.routing")
    made.info = replace(made.info, layers=tuple(layers), activations=(routing,))

    found = experts_of(made.history(), 0)

    assert found == ({experts.format(i): [1 + i] for i in range(4)} if experts else {})
    assert router_of(made.history(), f"{module.format(0)}.weight") == (0 if experts else None)
