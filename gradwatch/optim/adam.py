"""Adam and AdamW with an instrumented step."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from torch import Tensor

from gradwatch.optim.instrumented import InstrumentedOptimizer, place_of_count


class _Moments(InstrumentedOptimizer):
    """The state of Adam, with the names and the order of torch's."""

    rule: ClassVar[int] = 1

    def _make_state(self) -> set[Tensor]:
        made: set[Tensor] = set()
        for group in self.param_groups:
            names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
            for param in group["params"]:
                if param.grad is None or self.state.get(param):
                    continue
                made.add(param)
                # a float32 each, as torch's fused step has them
                self.state[param] = {"step": torch.zeros((), dtype=torch.float32, device=place_of_count(param))}
                self.state[param] |= {n: torch.zeros_like(param, memory_format=torch.preserve_format) for n in names}
        return made


@final
class AdamW(_Moments, torch.optim.AdamW):
    """torch.optim.AdamW with the same arguments and state; its step also computes statistics, see the base class."""


@final
class Adam(_Moments, torch.optim.Adam):
    """torch.optim.Adam with the same arguments and state; its step also computes statistics, see the base class."""
