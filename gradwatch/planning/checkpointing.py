"""Choose the activation checkpointing with which a training fits into a budget, proved by a plan of each choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from gradwatch.config.sections.train import BlocksSection
from gradwatch.config.sizes import parse_size
from gradwatch.errors import GradwatchError
from gradwatch.planning.recomputation import ModuleTree, cheapest_recomputation
from gradwatch.planning.result import Plan, Recomputation
from gradwatch.render.common.format import plural, shown_size
from gradwatch.train.activation_checkpointing import sqrt_length

if TYPE_CHECKING:
    from gradwatch.planning.training import ConfigPlanner

KEY = "train.activation_checkpointing"
MAX_LIMITS = 6
"""Limits to try for the saved activations: the peak of a choice shows how far its limit was off."""
MAX_LENGTHS = 5
"""Segment lengths to try around sqrt(n), which needs the least memory if all blocks are equal."""


class Planner(Protocol):
    """Plans a training step as it is, and with other settings."""

    blocks: tuple[str, ...]

    def plan(self, changes: Mapping[str, Any] | None = None) -> Plan:
        """Return the plan of the step with some settings by dotted key, or raise a GradwatchError."""
        ...


def checkpointing_choices(planner: Planner, budget: int, *, rows: Plan | None = None) -> Iterator[Recomputation]:
    """Yield the choices for a budget: sqrt, the best other `every`, keeping matrix products, and the optimal modules.

    Args:
        planner: Plans the step, which recomputes nothing by itself.
        budget: Bytes that the training may take. If no choice of a kind fits, the closest one is yielded.
        rows: Measured plan, whose times are the costs of the modules; by default, their work is.
    """
    yield from _segments(planner, budget)
    yield from _without_matmuls(planner, budget)
    yield from _optimal_modules(planner, budget, rows)


def cheapest_choice(planner: Planner, budget: int) -> Recomputation | None:
    """Return the choice that fits into a budget with the least work, or None if none fits.

    Args:
        planner: Plans the step, which recomputes nothing by itself.
        budget: Bytes that the training may take.
    """
    plain = planner.plan()
    if plain.peak_bytes <= budget:
        return _choice(planner, budget, plain, "none", "none", "recompute nothing")
    found = [*_optimal_modules(planner, budget, None), *_without_matmuls(planner, budget)]
    if not any(choice.fits for choice in found):  # segments store less, and cost more
        found += _segments(planner, budget)
    return min((choice for choice in found if choice.fits), key=lambda choice: choice.extra_work, default=None)


def settle(planner: ConfigPlanner) -> Recomputation | None:
    """Choose for the budget in the planner's config, and apply the choice to all later plans.

    Returns:
        The choice, or None if the config names no budget.

    Raises:
        GradwatchError: The training cannot be planned without running it, or no choice fits.
    """
    section = planner.config.train.activation_checkpointing
    if not isinstance(section, BlocksSection) or section.budget is None:
        return None
    plain = planner.plan()
    if not plain.is_traced:
        raise GradwatchError(
            f"{KEY}.budget: {plain.notes[-1]}, so nothing can be chosen; name the modules: {{modules: ['blocks.*']}}"
        )
    budget = parse_size(section.budget, key=f"{KEY}.budget")
    choice = cheapest_choice(planner, budget)
    if choice is None:
        raise GradwatchError(
            f"{KEY}.budget: got {section.budget}, but the training takes {shown_size(plain.peak_bytes)}, and no choice "
            f"of modules to recompute makes it fit; gradwatch plan CONFIG --set {KEY}=none --budget {section.budget} "
            "shows what else saves memory"
        )
    planner.settle({KEY: choice.setting})
    return choice


def _optimal_modules(planner: Planner, budget: int, rows: Plan | None) -> Iterator[Recomputation]:
    """Yield the cheapest choice of modules whose plan fits, or if none does, the one with the lowest peak.

    The memory of a step without its saved activations depends on the choice. So the limit of the activations moves by
    the error of the last plan, and is halved between a limit that fits and one that does not.
    """
    plain = planner.plan()
    tree = ModuleTree.of((rows or plain).modules)
    fits, exceeds = 0, tree.row.saved_bytes
    limit = exceeds - (plain.peak_bytes - budget)
    best: Recomputation | None = None
    tried: set[tuple[str, ...]] = {()}
    for _ in range(MAX_LIMITS):
        limit = min(max(limit, fits), exceeds)
        modules = cheapest_recomputation(tree, limit, plain.device)
        if modules is None:
            fits, limit = limit, (limit + exceeds) // 2  # such a limit is too low for any choice
            continue
        plan = _planned(planner, {"modules": list(modules)}) if modules not in tried else None
        if plan is None:
            break
        tried.add(modules)
        if best is None or plan.peak_bytes <= budget or plan.peak_bytes < best.peak_bytes:
            text = f"recompute {plural(len(modules), 'module')} (optimal)"
            best = _choice(planner, budget, plan, "optimal", {"modules": list(modules)}, text)
        fits, exceeds = (limit, exceeds) if plan.peak_bytes <= budget else (fits, limit)
        limit += budget - plan.peak_bytes
        if not fits < limit < exceeds:
            limit = (fits + exceeds) // 2
    if best:
        yield best


def _without_matmuls(planner: Planner, budget: int) -> Iterator[Recomputation]:
    """Yield the choice that recomputes all blocks but keeps their matrix products, if the blocks can run twice."""
    setting = {"modules": list(planner.blocks), "save": "matmuls"}
    text = "recompute the blocks, but keep their matrix products"
    if planner.blocks and (plan := _planned(planner, setting)):
        yield _choice(planner, budget, plan, "save-matmuls", setting, text)


def _segments(planner: Planner, budget: int) -> Iterator[Recomputation]:
    """Yield segments of sqrt(n) blocks, and of other lengths the longest that fits, or the one with the lowest peak.

    The longer the segments, the fewer blocks are recomputed, because the last segment is not.
    """
    count, root = len(planner.blocks), sqrt_length(len(planner.blocks))
    if plan := _planned(planner, "sqrt") if count else None:
        text = f"recompute segments of {plural(root, 'block')} (sqrt)"
        yield _choice(planner, budget, plan, "sqrt", "sqrt", text)
    lengths = sorted({*range(1, count // 2 + 1)} - {root}, key=lambda k: abs(k - root))[:MAX_LENGTHS]
    best: Recomputation | None = None
    for k in sorted(lengths, reverse=True):
        plan = _planned(planner, {"every": k})
        if plan and (best is None or plan.peak_bytes < best.peak_bytes):
            text = f"recompute segments of {plural(k, 'block')} (best every k)"
            best = _choice(planner, budget, plan, "every", {"every": k}, text)
        if plan and plan.peak_bytes <= budget:
            break
    if best:
        yield best


def _choice(planner: Planner, budget: int, plan: Plan, name: str, setting: Any, text: str) -> Recomputation:
    plain = planner.plan()
    return Recomputation(
        name=name,
        text=text,
        setting=setting,
        peak_bytes=plan.peak_bytes,
        saved_bytes=plain.peak_bytes - plan.peak_bytes,
        extra_work=plan.work / plain.work - 1 if plain.work else 0.0,
        fits=plan.peak_bytes <= budget,
    )


def _planned(planner: Planner, setting: Any) -> Plan | None:
    try:
        return planner.plan({KEY: setting})
    except GradwatchError:  # the blocks cannot be grouped, or a module cannot run twice
        return None
