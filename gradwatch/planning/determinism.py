"""Measure the price of deterministic algorithms: the time of a step with them and without."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from typing import Any, final

from gradwatch.errors import raised
from gradwatch.planning.modules import wall_clock
from gradwatch.planning.training import ConfigPlanner
from gradwatch.state.rng import preserved_random_state
from gradwatch.train.reproducible import reproducible

NUM_ROUNDS = 8
"""Pairs of steps to measure, after one pair that warms up."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeterminismPrice:
    """Time of a step with and without deterministic algorithms.

    Args:
        plain_ms: Median milliseconds without them.
        deterministic_ms: Median milliseconds with them.
        spread: Half of the distance between the quartiles of the ratios of the pairs: the noise of the machine.
        refusal: Reason why the step cannot run with them, such as an operation that has none; the times are then nan.
    """

    plain_ms: float = float("nan")
    deterministic_ms: float = float("nan")
    spread: float = float("nan")
    refusal: str = ""

    @property
    def text(self) -> str:
        """Return the price in one line."""
        if self.refusal:
            return f"deterministic algorithms cannot make this step: {self.refusal}"
        ratio = self.deterministic_ms / self.plain_ms - 1
        times = f"{self.deterministic_ms:.3g} ms a step instead of {self.plain_ms:.3g} ms"
        if abs(ratio) <= self.spread:
            return f"deterministic algorithms cost nothing that {NUM_ROUNDS} pairs of steps show: {times}"
        return f"deterministic algorithms change the time of a step by {100 * ratio:+.0f} %: {times}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        if self.refusal:
            return {"refusal": self.refusal}
        return {"plain_ms": self.plain_ms, "deterministic_ms": self.deterministic_ms, "spread": self.spread}


def price_of_determinism(planner: ConfigPlanner) -> DeterminismPrice:
    """Alternate steps with and without deterministic algorithms, so that a change of the machine affects both."""
    with preserved_random_state():
        training, window = planner.real_step()
        stepper, read = training.stepper(), wall_clock(training.device)
        training.model.train()

        def seconds() -> float:
            began = read()
            stepper.run(window)
            return read() - began

        pairs = []
        try:
            for _ in range(NUM_ROUNDS + 1):
                plain = seconds()
                with reproducible(0):
                    pairs.append((plain, seconds()))
        except RuntimeError as error:
            return DeterminismPrice(refusal=raised(error))
    times = list(itertools.islice(pairs, 1, None))
    ratios = statistics.quantiles([after / before for before, after in times], n=4)
    return DeterminismPrice(
        plain_ms=1e3 * statistics.median(before for before, _ in times),
        deterministic_ms=1e3 * statistics.median(after for _, after in times),
        spread=(ratios[2] - ratios[0]) / 2,
    )
