"""SGD with an instrumented step."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from gradwatch.optim.instrumented import InstrumentedOptimizer


@final
class SGD(InstrumentedOptimizer, torch.optim.SGD):
    """torch.optim.SGD with the same arguments and state; its step also computes statistics, see the base class."""

    rule: ClassVar[int] = 0

    def _make_state(self) -> set[Tensor]:
        made: set[Tensor] = set()
        for group in self.param_groups:
            for param in group["params"]:
                if group["momentum"] == 0 or param.grad is None or self._has_buffer(param):
                    continue
                made.add(param)
                self.state[param]["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return made

    def _has_buffer(self, param: Tensor) -> bool:
        return self.state.get(param, {}).get("momentum_buffer") is not None
