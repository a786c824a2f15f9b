"""What dead and saturated mean for each activation function, from its slope."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

FLAT = 0.05
"""A function is flat where its slope is below this fraction of its steepest: gradients shrink twentyfold there."""

# Where the negative tail of the smooth functions begins, as an output: left of it the slope is below FLAT of its
# maximum and the output creeps back to 0. tests/probe/activations/test_rules.py checks them by differentiation.
_GELU_TAIL, _SILU_TAIL, _MISH_TAIL = -0.025, -0.0757, -0.0736
SIGMOID_EDGE = math.sqrt(1 - FLAT) / 2
"""How far from 1/2 a sigmoid, or the winner of a softmax, is flat: its slope y (1 - y) is at most 1/4. About 0.487."""

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rules:
    """What to look for in one module.

    Args:
        dead: Range of outputs in which a unit that never leaves it learns nothing; None where there is no such thing.
        saturated: Range of outputs that are not in a flat tail, without its bounds; None where there is no such thing.
        softmax_dim: Dimension over which a softmax normalises; None for every other function.
    """

    dead: Range | None = None
    saturated: Range | None = None
    softmax_dim: int | None = None


def _exponential_tail(scale: float) -> Rules:
    """ELU and its kin: the slope of the negative side is the output's distance from its limit, -scale."""
    limit = -(1 - FLAT) * scale
    return Rules(dead=(-math.inf, limit), saturated=(limit, math.inf))


def rules_of(module: nn.Module) -> Rules | None:
    """Return what to look for in a module, or None where it is no activation."""
    match module:
        case nn.ReLU6():  # before Hardtanh, whose subclass it is
            return Rules(dead=(-math.inf, 0.0), saturated=(-math.inf, 6.0))
        case nn.ReLU():
            return Rules(dead=(-math.inf, 0.0))
        case nn.LeakyReLU() | nn.PReLU():
            return Rules()
        case nn.ELU() | nn.CELU():
            return _exponential_tail(module.alpha)
        case nn.SELU():
            return _exponential_tail(1.7580993408473766)  # scale * alpha, arXiv:1706.02515, eq. 2 and appendix
        case nn.GELU():
            return Rules(dead=(_GELU_TAIL, 0.0))
        case nn.SiLU():
            return Rules(dead=(_SILU_TAIL, 0.0))
        case nn.Mish():
            return Rules(dead=(_MISH_TAIL, 0.0))
        case nn.Hardswish():
            return Rules(dead=(0.0, 0.0))
        case nn.Sigmoid():
            return Rules(saturated=(0.5 - SIGMOID_EDGE, 0.5 + SIGMOID_EDGE))
        case nn.Hardsigmoid():
            return Rules(saturated=(0.0, 1.0))
        case nn.Tanh():  # slope 1 - y^2, at most 1
            return Rules(saturated=(-math.sqrt(1 - FLAT), math.sqrt(1 - FLAT)))
        case nn.Hardtanh():
            return Rules(saturated=(module.min_val, module.max_val))
        case nn.Softmax() | nn.Softmax2d():
            dim = -3 if isinstance(module, nn.Softmax2d) else module.dim
            return Rules(softmax_dim=-1 if dim is None else dim)
    return None
