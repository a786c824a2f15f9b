"""Choose the activation checkpointing with which a training fits into a budget, proved by a plan of each choice."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

from gradwatch.config.sections.train import BlocksSection
from gradwatch.config.sizes import parse_size
from gradwatch.errors import GradwatchError
from gradwatch.planning.recomputation import ModuleTree, cheapest_recomputation, recomputation_cost
from gradwatch.planning.result import Plan, work
from gradwatch.planning.training import ConfigPlanner
from gradwatch.render.common.format import shown_size

KEY = "train.activation_checkpointing"
WITHOUT_MATMULS = "recompute the blocks, but keep their matrix products"
MAX_LIMITS = 6
"""Limits to try for the saved activations: the peak of a choice shows how far its limit was off."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeChoice:
    """A setting of activation checkpointing, with its plan.

    Args:
        setting: Value of `train.activation_checkpointing`.
        text: The setting in words.
        plan: Plan of the config with it.
    """

    setting: Any
    text: str
    plan: Plan

    @property
    def changes(self) -> dict[str, Any]:
        """Return the setting by its dotted key."""
        return {KEY: self.setting}


def cheapest_choice(planner: ConfigPlanner, budget: int, *, rows: Plan | None = None) -> RecomputeChoice | None:
    """Return the choice that fits into a budget and costs least, or None if none fits.

    Args:
        planner: Plans the config, which recomputes nothing by itself.
        budget: Bytes that the training may take.
        rows: Measured plan, whose times are the cost of each module; by default, its work is.
    """
    plain = planner.plan()
    if plain.peak_bytes <= budget:
        return RecomputeChoice(setting="none", text="recompute nothing", plan=plain)
    tree = ModuleTree.of((rows or plain).modules)
    modules = _fitting_modules(planner, tree, budget)
    selective = _without_matmuls(planner)
    if selective and selective.plan.peak_bytes <= budget:
        if modules is None:
            return selective
        # the price of recomputing all blocks but their matrix products: what the other operations move
        moved = sum(row.moved_bytes for row in plain.modules if row.name in planner.blocks)
        if rows is None and work(0, moved, plain.device) < _cost(plain, modules.setting["modules"]):
            return selective
    return modules or _fitting_segments(planner, budget)


def settle(planner: ConfigPlanner) -> RecomputeChoice | None:
    """Choose for the budget in the planner's config, and let the planner plan with the choice from now on.

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
    planner.settle(choice.changes)
    return choice


def _fitting_modules(planner: ConfigPlanner, tree: ModuleTree, budget: int) -> RecomputeChoice | None:
    """Return the cheapest choice of modules whose plan fits.

    What the step needs beside its saved activations differs from choice to choice. So the limit of the activations
    moves by what the plan of the last choice is off, and is halved between a limit that fits and one that does not.
    """
    plain = planner.plan()
    fits, exceeds = 0, tree.row.saved_bytes
    limit = exceeds - (plain.peak_bytes - budget)
    best: RecomputeChoice | None = None
    tried: dict[tuple[str, ...], Plan | None] = {}
    for _ in range(MAX_LIMITS):
        limit = min(max(limit, fits), exceeds)
        modules = cheapest_recomputation(tree, limit, plain.device)
        if modules is None:
            fits, limit = limit, (limit + exceeds) // 2  # such a limit is too low for any choice
            continue
        if modules in tried:
            break
        plan = tried[modules] = _planned(planner, {"modules": list(modules)}) if modules else plain
        if plan is None:
            break
        if plan.peak_bytes <= budget:
            fits, count = limit, len(modules)
            text = f"recompute the activations of {count} module{'s' * (count > 1)}"
            best = RecomputeChoice(setting={"modules": list(modules)}, text=text, plan=plan)
        else:
            exceeds = limit
        limit += budget - plan.peak_bytes
        if not fits < limit < exceeds:
            limit = (fits + exceeds) // 2
    return best


def _without_matmuls(planner: ConfigPlanner) -> RecomputeChoice | None:
    """Return the choice that recomputes all blocks but keeps their matrix products, if the blocks can run twice."""
    setting = {"modules": list(planner.blocks), "save": "matmuls"}
    plan = _planned(planner, setting) if planner.blocks else None
    return plan and RecomputeChoice(setting=setting, text=WITHOUT_MATMULS, plan=plan)


def _fitting_segments(planner: ConfigPlanner, budget: int) -> RecomputeChoice | None:
    """Return the longest segments of blocks that fit, by which the fewest blocks are recomputed."""
    count = len(planner.blocks)
    lengths = sorted(range(1, count // 2 + 1), key=lambda k: abs(k - math.sqrt(count)))
    for k in sorted(lengths[:MAX_LIMITS], reverse=True):
        plan = _planned(planner, {"every": k})
        if plan and plan.peak_bytes <= budget:
            return RecomputeChoice(
                setting={"every": k}, text=f"recompute activations in segments of {k} blocks", plan=plan
            )
    return None


def _planned(planner: ConfigPlanner, setting: dict[str, Any]) -> Plan | None:
    try:
        return planner.plan({KEY: setting})
    except GradwatchError:  # the blocks cannot be grouped, or a module cannot run twice
        return None


def _cost(plan: Plan, names: list[str]) -> float:
    return sum(recomputation_cost(row, plan.device) for row in plan.modules if row.name in names)
