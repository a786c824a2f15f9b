"""Make a module of a step, so that the parameters of its model can be replaced for one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import nn


@final
class SteppedModel(nn.Module):
    """A module whose forward is a step, for `torch.func.functional_call` with names that begin with `model.`.

    Args:
        model: Model that the step uses.
        call: The step, called with the parts of the batch.
    """

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self._call_step = call

    def forward(self, *batch: Any) -> Any:
        """Run the step."""
        return self._call_step(*batch)
