"""Choose the modules to recompute in a step of a user's own loop, so that it fits into a budget."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from torch import nn

from gradwatch.config.sections.train import BlocksSection
from gradwatch.errors import GradwatchError, raised
from gradwatch.planning.checkpointing import KEY, checkpointing_choices
from gradwatch.planning.result import Plan, Recomputation
from gradwatch.train.activation_checkpointing import recompute
from gradwatch.train.blocks import block_names


@final
class LoopPlanner:
    """Plans a step of a user's own loop as it is, and with some of its modules recomputed.

    Args:
        model: Model that is trained. After each plan it is as before.
        plain: Plan of the step as it is.
        trace: Returns the plan of the step with the model as it is now.
    """

    def __init__(self, model: nn.Module, plain: Plan, trace: Callable[[], Plan]) -> None:
        self.blocks = block_names(model)
        self._model, self._plain, self._trace = model, plain, trace

    def plan(self, changes: Mapping[str, Any] | None = None) -> Plan:
        """Return the plan of the step, with `train.activation_checkpointing` of a config if it is given.

        Raises:
            GradwatchError: The step cannot be traced with it.
        """
        if not changes:
            return self._plain
        try:
            with _recomputing(self._model, changes[KEY]):
                return self._trace()
        except GradwatchError:
            raise
        except Exception as error:  # a step may do anything that cannot run twice
            raise GradwatchError(f"the step cannot be traced with {dict(changes)}: {raised(error)}") from error

    def recomputations(self, budget: int) -> tuple[Recomputation, ...]:
        """Return the choices that save memory, those that fit and cost least first."""
        if self._plain.peak_bytes <= budget:
            return ()
        saving = [choice for choice in checkpointing_choices(self, budget) if choice.saved_bytes > 0]
        return tuple(sorted(saving, key=lambda one: (not one.fits, one.extra_work, one.peak_bytes)))


@contextlib.contextmanager
def _recomputing(model: nn.Module, setting: Any) -> Iterator[None]:
    """Recompute parts of a model inside a `with` block."""
    forwards = {module: module.__dict__.get("forward") for module in model.modules()}
    try:
        recompute(model, BlocksSection(**setting) if isinstance(setting, dict) else setting)
        yield
    finally:
        for module, forward in forwards.items():
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward
