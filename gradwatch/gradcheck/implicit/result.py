"""Hold the result of the check of a fixed-point layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, final

from gradwatch.mistakes import code_of, shown_code
from gradwatch.records import plain_fields

Verdict = Literal["right", "wrong", "cannot tell"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImplicitGradient:
    """The gradient of one tensor, computed in three ways.

    Args:
        name: Parameter, or `input0` and so on.
        error: Relative error of the layer's own gradient against the implicit one.
        unrolled: Relative error of the gradient through all iterations against the implicit one; nan if too many.
        numeric: Relative error of the implicit gradient against differences of the solution, along one direction.
    """

    name: str
    error: float
    unrolled: float
    numeric: float


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPointCheck:
    """What `gradwatch.check_fixed_point` returns. Its text is a report.

    Args:
        verdict: right, wrong or cannot tell: of the layer's own gradient.
        kind: Kind of the mistake, such as `skipped-solve`; empty if it is right or has no name.
        text: One sentence.
        format: Format of the layer.
        residual: Relative residual of the layer's output in that format.
        exact_residual: The same in float64.
        contraction: Factor by which an iteration shrinks an error in the long run: the spectral radius of the Jacobian.
        norm: Largest factor of one iteration: the largest singular value; nan for large states.
        iterations: Iterations for the precision of the format; infinite if the iteration does not contract.
        tolerance: Relative error up to which a gradient counts as right, from the residual and the contraction.
        gradients: One per tensor, the worst first.
    """

    verdict: Verdict
    kind: str
    text: str
    format: str
    residual: float
    exact_residual: float
    contraction: float
    norm: float
    iterations: float
    tolerance: float
    gradients: tuple[ImplicitGradient, ...]

    @property
    def is_wrong(self) -> bool:
        """Return whether the gradient of the layer is wrong."""
        return self.verdict == "wrong"

    def to_json(self) -> dict[str, Any]:
        """Return plain data; numbers that are not finite become None."""
        return plain_fields(self) | {"code": code_of(self.kind)}

    def __str__(self) -> str:
        head = "cannot be told" if self.verdict == "cannot tell" else f"is {self.verdict}"
        lines = [f"the gradient of the fixed point {head}"]
        lines += [f"  {self.text}{shown_code(self.kind)}"] if self.text else []
        lines.append(f"  residual     {self.residual:.1e} in {self.format}, {self.exact_residual:.1e} in float64")
        largest = "" if math.isnan(self.norm) else f", at most {self.norm:.3g} in one"
        needed = f"; {self.iterations:.0f} iterations for {self.format}" if math.isfinite(self.iterations) else ""
        lines.append(f"  contraction  {self.contraction:.3g} per iteration{largest}{needed}")
        width = max((len(g.name) for g in self.gradients), default=0)
        for g in self.gradients[:8]:
            unrolled = "too many iterations" if math.isnan(g.unrolled) else f"{g.unrolled:.1e}"
            lines.append(
                f"  {g.name:<{width}}  layer against implicit {g.error:.1e}, unrolled {unrolled}, "
                f"differences {g.numeric:.1e}"
            )
        rest = len(self.gradients) - 8
        lines += [f"  ... and {rest} more"] if rest > 0 else []
        return "\n".join(lines)
