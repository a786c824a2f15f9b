"""Check the measured price of deterministic algorithms."""

import time
from types import SimpleNamespace

import pytest
import torch

from gradwatch.planning.determinism import price_of_determinism


def planner(step):
    """Return a planner whose training makes a step."""
    training = SimpleNamespace(
        stepper=lambda: SimpleNamespace(run=step), device=torch.device("cpu"), model=torch.nn.Linear(1, 1)
    )
    return SimpleNamespace(real_step=lambda: (training, []))


def test_a_step_that_waits_for_its_deterministic_algorithm_costs_the_wait():
    def step(window):
        time.sleep(0.03 if torch.are_deterministic_algorithms_enabled() else 0.01)

    price = price_of_determinism(planner(step))

    assert price.plain_ms >= 10
    assert price.deterministic_ms >= 30
    assert "change the time of a step by +" in price.text
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_a_deterministic_algorithm_is_named():
    def step(window):
        torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())
        if torch.are_deterministic_algorithms_enabled():
            raise RuntimeError("upsample does not have a deterministic implementation")

    price = price_of_determinism(planner(step))

    assert price.to_json() == {"refusal": price.refusal}
    assert "cannot make this step: " in price.text
    assert "upsample does not have" in price.text


def test_equal_times_are_no_price(monkeypatch):
    monkeypatch.setattr("gradwatch.planning.determinism.wall_clock", lambda device: iter(range(10_000)).__next__)

    price = price_of_determinism(planner(lambda window: None))

    assert price.plain_ms == price.deterministic_ms == pytest.approx(1e3)
    assert "cost nothing that 8 pairs of steps show" in price.text
