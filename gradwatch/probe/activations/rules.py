"""Define dead and saturated outputs of each activation function, from the slope of the function."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

FLAT = 0.05
"""Maximum slope of a flat part, as a fraction of the steepest slope: gradients shrink 20x there."""

# outputs at which the negative tail of the smooth functions begins: left of them the slope is below FLAT of its
# maximum, and the output creeps back to 0; tests/probe/activations/test_rules.py checks them by differentiation
_GELU_TAIL, _SILU_TAIL, _MISH_TAIL = -0.025, -0.0757, -0.0736
SIGMOID_EDGE = math.sqrt(1 - FLAT) / 2
"""Distance from 1/2, about 0.487, at which a sigmoid or the winner of a softmax is flat: the slope is y (1 - y)."""

Range = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ActivationRules:
    """Ranges of dead and saturated outputs of one activation.

    Args:
        dead: Range of outputs in which a unit learns nothing if it never leaves the range. None if there is no range.
        saturated: Range of outputs outside of flat tails, without the bounds; None if there is no flat tail.
        softmax_dim: Dimension over which a softmax normalizes; None for every other function.
    """

    dead: Range | None = None
    saturated: Range | None = None
    softmax_dim: int | None = None


def _exponential_tail(scale: float) -> ActivationRules:
    # in ELU, CELU and SELU, the slope of the negative side is the distance of the output from its limit, -scale
    limit = -(1 - FLAT) * scale
    return ActivationRules(dead=(-math.inf, limit), saturated=(limit, math.inf))


def rules_of(module: nn.Module) -> ActivationRules | None:
    """Return the ranges of a module, or None if the module is not an activation."""
    match module:
        case nn.ReLU6():  # before Hardtanh, which it is a subclass of
            return ActivationRules(dead=(-math.inf, 0.0), saturated=(-math.inf, 6.0))
        case nn.ReLU():
            return ActivationRules(dead=(-math.inf, 0.0))
        case nn.LeakyReLU() | nn.PReLU():  # a slope everywhere, but still an activation to watch
            return ActivationRules()
        case nn.ELU() | nn.CELU():
            return _exponential_tail(module.alpha)
        case nn.SELU():
            return _exponential_tail(1.7580993408473766)  # scale * alpha, arXiv:1706.02515, eq. 2 and appendix
        case nn.GELU():
            return ActivationRules(dead=(_GELU_TAIL, 0.0))
        case nn.SiLU():
            return ActivationRules(dead=(_SILU_TAIL, 0.0))
        case nn.Mish():
            return ActivationRules(dead=(_MISH_TAIL, 0.0))
        case nn.Hardswish():  # exactly 0 left of -3
            return ActivationRules(dead=(0.0, 0.0))
        case nn.Sigmoid():
            return ActivationRules(saturated=(0.5 - SIGMOID_EDGE, 0.5 + SIGMOID_EDGE))
        case nn.Hardsigmoid():
            return ActivationRules(saturated=(0.0, 1.0))
        case nn.Tanh():  # slope 1 - y^2, at most 1
            return ActivationRules(saturated=(-math.sqrt(1 - FLAT), math.sqrt(1 - FLAT)))
        case nn.Hardtanh():
            return ActivationRules(saturated=(module.min_val, module.max_val))
        case nn.Softmax() | nn.Softmax2d():
            dim = -3 if isinstance(module, nn.Softmax2d) else module.dim
            return ActivationRules(softmax_dim=-1 if dim is None else dim)  # torch guesses the dimension of None
    return None
