"""Find routers of mixtures that send no token to most of their experts.

Such a collapse feeds itself: an expert that is chosen learns, and is chosen more often. The choice is counted at
sampled steps. The first steps do not count, nor small batches in which few tokens go to many experts.
"""

# T = samples of the activations

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gradwatch.detect.features.recovery import start_of_state
from gradwatch.detect.features.routing import num_used, routings
from gradwatch.detect.features.silent_units import silent_units
from gradwatch.detect.gradients.dead_layer_rules.experts import experts_of
from gradwatch.history.store import History
from gradwatch.records import Finding, Quantity

UNUSED = "routing.unused"
"""Key of the number of experts without tokens."""


class CollapsedRouter(NamedTuple):
    """A router, the experts without tokens as far as their names are known, a message, evidence, and the onset."""

    router: str
    experts: tuple[str, ...]
    message: str
    evidence: tuple[Quantity, ...]
    since: int


def find_collapsed_routers(history: History, *, steps: int, fraction: float, tokens: int) -> Iterator[CollapsedRouter]:
    """Yield each router that has left most of its experts alone for long enough.

    Args:
        history: History of the run.
        steps: Least number of steps since the samples at which the same experts have had no token.
        fraction: Share of the experts above which it counts, 0..1.
        tokens: Least number of tokens per expert in these samples.
    """
    if not len(history.act.steps(1)):
        return
    for a in routings(history):
        silent, steps_T = silent_units(history, a), history.act.steps()
        if silent is None or silent.num_silent <= fraction * silent.num_units or steps_T[-1] - silent.since < steps:
            continue
        mean_T = history.act.window("act.mean")[:, a]
        if np.nansum(mean_T[steps_T >= silent.since]) >= tokens:
            yield describe_router(history, a, unused=silent.num_silent, steps=steps, since=silent.since)


def describe_router(
    history: History, activation: int, *, steps: int, unused: int | None = None, since: int | None = None
) -> CollapsedRouter:
    """Return what is known of a router that leaves most of its experts alone.

    Args:
        history: History of the run.
        activation: Index of its choice among the activations.
        steps: Number of newest steps at which an expert without a gradient counts as unused.
        unused: Number of experts without tokens; None for those without a gradient.
        since: First step of that state; None for the first of these steps.
    """
    is_used_L = np.asarray((history.param.window("grad.l2", steps) > 0).any(axis=0))
    experts = [expert for expert, group in experts_of(history, activation).items() if not is_used_L[group].any()]
    number, router = float(history.act.newest("act.units")[activation]), routings(history)[activation]
    unused = len(experts) if unused is None else unused
    mean, used = float(history.act.newest("act.mean")[activation]), float(num_used(history, activation)[-1])
    return CollapsedRouter(
        router,
        tuple(experts),
        f"the router {router} sends no token to {unused} of {number:.0f} experts",
        (
            Quantity(key=UNUSED, label="experts without tokens", value=float(unused), unit=f"of {number:.0f} experts"),
            Quantity(key="routing.used", label="equal experts with that spread", value=used, unit="experts"),
            Quantity(key="act.mean", label="tokens per expert", value=mean, unit="tokens"),
        ),
        int(history.param.steps(steps)[0]) if since is None else since,
    )


def used_experts_since(history: History, finding: Finding, *, least: int) -> int | None:
    """Return the first of at least `least` samples in a row at which a collapsed router used more experts, or None."""
    unused = next(quantity.value for quantity in finding.evidence if quantity.key == UNUSED)
    a = next((a for a, name in routings(history).items() if name == finding.layer), None)
    if a is None:
        return None
    dead_T, units_T = (history.act.window(f"act.{name}")[:, a] for name in ("dead_frac", "units"))
    return start_of_state(np.round(dead_T * units_T) < unused, history.act.steps(), least=least)
