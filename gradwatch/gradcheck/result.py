"""Hold the verdict on each tensor, the mistakes with their places, and what the check covered."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, final

from gradwatch.mistakes import code_of, shown_code
from gradwatch.probe.place import NOWHERE, Place
from gradwatch.records import plain_fields

Verdict = Literal["right", "wrong", "cannot tell"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorVerdict:
    """The verdict on the gradient of one tensor, along one direction.

    Args:
        name: Parameter, or `input0` and so on.
        verdict: right, wrong or cannot tell.
        analytic: Derivative along the direction by the gradient that the step filled in.
        numeric: The same derivative by differences of the loss.
        error: Relative error, with the larger of the two and the usual size of the gradient as the denominator.
        noise: Relative error of the differences themselves.
        visible: Smallest relative mistake of this tensor's gradient that would have been seen; infinite if the gradient
            counts as 0 next to the others.
        visible_norm: Norm of the smallest mistake that would have been seen.
        note: Reason why there is no verdict, or the difference that is on purpose.
        forward_mode: The same derivative by forward-mode differentiation, or None if an operation lacks it.
    """

    name: str
    verdict: Verdict
    analytic: float
    numeric: float
    error: float
    noise: float
    visible: float = math.nan
    visible_norm: float = math.nan
    note: str = ""
    forward_mode: float | None = None

    @property
    def ratio(self) -> float:
        """Return the gradient of the step divided by the right one along the direction; nan if that is 0."""
        return self.analytic / self.numeric if self.numeric else math.nan


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A mistake in a gradient.

    Args:
        kind: Kind of the mistake, such as `factor` or `transposed`.
        where: Function, hook, module, function of the step or parameter at fault.
        text: One sentence for people.
        tensors: Names of the parameters and inputs whose gradient it makes wrong.
        place: Line of the mistake.
        ratio: Gradient divided by the right gradient, if it is the same for all elements; else nan.
    """

    kind: str
    where: str
    text: str
    tensors: tuple[str, ...] = ()
    place: Place = NOWHERE
    ratio: float = math.nan

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return plain_fields(self) | {"code": code_of(self.kind)}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The coverage of a check.

    Args:
        tensors: Number of tensors.
        directions: Number of directions.
        runs: Number of runs of the step.
        points: Number of points: the given one, and points near it.
        functions: Names of the custom Functions that ran.
        kinks: Directions left out for a kink.
        dtype: Format of the check.
        batches: Sizes of the batch that were checked.
        seconds: Duration of the check.
        left_out: Tensors without a verdict, since the time limit had passed.
        batch: Whether the gradient of the batch is the mean or the sum over its parts, in words.
    """

    tensors: int
    directions: int
    runs: int
    points: int
    functions: tuple[str, ...]
    kinks: int
    dtype: str
    batches: tuple[int, ...]
    seconds: float
    left_out: int = 0
    batch: str = ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCheck:
    """What `gradwatch.check` returns. Its text is the report that `gradwatch check` prints.

    Args:
        tensors: Verdict on each tensor.
        faults: Mistakes, the first one the most certain.
        coverage: Numbers of checked tensors, directions and points.
        notes: Differences on purpose, and other remarks.
    """

    tensors: tuple[TensorVerdict, ...]
    faults: tuple[Fault, ...]
    coverage: Coverage
    notes: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> Verdict:
        """Return wrong if any gradient is wrong, right if every one that could be judged is right."""
        verdicts = [t.verdict for t in self.tensors]
        if "wrong" in verdicts or self.faults:
            return "wrong"
        return "right" if "right" in verdicts else "cannot tell"

    @property
    def is_wrong(self) -> bool:
        """Return whether any gradient is wrong."""
        return self.verdict == "wrong"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"verdict": self.verdict} | plain_fields(self)

    def __str__(self) -> str:
        lines = [f"the gradient is {self.verdict}" if self.verdict != "cannot tell" else "the gradient: cannot tell"]
        for fault in self.faults:
            lines.append(f"  {fault.text}{shown_code(fault.kind)}")
            if fault.place.text:
                lines.append(f"      {fault.place}: {fault.place.text}")
        lines += [f"  note: {note}" for note in self.notes]
        lines += self._table()
        c = self.coverage
        covered = f"{c.tensors} tensors, {c.directions} directions, {c.points} points, {c.runs} runs in {c.dtype}"
        covered += f", batches of {' and '.join(map(str, c.batches))}" if c.batches else ""
        covered += f"; {c.kinks} left out at a kink" if c.kinks else ""
        covered += f"; no time for {c.left_out}" if c.left_out else ""
        lines.append(f"  checked {covered}, in {c.seconds:.1f} s")
        lines += [f"  batch   {c.batch}"] if c.batch else []
        lines += [f"  custom  {', '.join(c.functions)}"] if c.functions else []
        return "\n".join(lines + self._power())

    def _power(self) -> list[str]:
        """Return the smallest visible mistakes, for gradients that are not 0 and for gradients that are."""
        right = [t for t in self.tensors if t.verdict == "right"]
        seen = [t.visible for t in right if math.isfinite(t.visible)]
        lines = [f"  a mistake of {100 * max(seen):.2g} % of a tensor's gradient would have been seen"] if seen else []
        if zero := [t for t in right if t.visible == math.inf]:
            names = f"`{zero[0].name}`" + (f" and {len(zero) - 1} more" if zero[1:] else "")
            size = f"{max(t.visible_norm for t in zero):.1e}"
            lines.append(
                f"  the gradient of {names} is 0 next to the others: only a mistake of norm {size} would be seen"
            )
        return lines

    def _table(self) -> list[str]:
        """Return one line per tensor that is not right, or the worst right ones."""
        bad = [t for t in self.tensors if t.verdict != "right"]
        shown = bad[:12] or sorted(self.tensors, key=lambda t: -t.error)[:3]
        width = max((len(t.name) for t in shown), default=0)
        lines = [
            f"  {t.name:<{width}}  {t.verdict:<11}  by autograd {t.analytic:.6g}, by differences {t.numeric:.6g}"
            + (f", forward mode {t.forward_mode:.6g}" if t.forward_mode is not None else "")
            + f", error {t.error:.1e} (noise {t.noise:.0e})"
            + (f"; {t.note}" if t.note else "")
            for t in shown
        ]
        rest = (len(bad) or len(self.tensors)) - len(shown)
        return lines + ([f"  ... and {rest} more{'' if bad else ' right ones'}"] if rest > 0 else [])
