"""Find custom Functions whose backward autograd cannot differentiate, or differentiates incorrectly."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

from torch.autograd import Function

from gradwatch.gradcheck.explain.kinds import backward_line, detaching_line
from gradwatch.gradcheck.explain.nodes import NodeCheck
from gradwatch.gradcheck.judge import Judge
from gradwatch.gradcheck.result import Fault
from gradwatch.gradcheck.stepping.function_calls import RecordedCall


@final
@dataclass(slots=True)
class SecondDerivatives:
    """The second derivatives of the custom Functions of a step.

    Args:
        faults: Functions whose second derivative is wrong.
        right: Names of the Functions whose second derivative is right.
        absent: Names of the Functions that raise if differentiated twice, such as with `once_differentiable`.
    """

    faults: list[Fault] = field(default_factory=list)
    right: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


def second_derivatives(judge: Judge, calls: Iterable[RecordedCall], tensors: tuple[str, ...]) -> SecondDerivatives:
    """Compare the second derivative of each custom Function with differences of its gradients.

    Args:
        judge: Knows which Functions may differ on purpose.
        calls: Calls in the step; the first of each Function is checked.
        tensors: Names of the leaves that a mistake makes wrong.
    """
    nodes = NodeCheck(judge.generator, judge.step.epsilon)
    found = SecondDerivatives()
    seen: set[type[Function]] = set()
    for call in calls:
        if call.function in seen or not call.ran_backward or judge.is_allowed(call.function):
            continue
        seen.add(call.function)
        is_right = nodes.has_right_second(call)
        if is_right is None:
            found.absent.append(call.name)
        elif is_right:
            found.right.append(call.name)
        else:
            place = detaching_line(call.function)
            found.faults.append(
                Fault(
                    kind="detach" if place else "missing_term",
                    where=call.name,
                    text=f"the second derivative through {call.name}.backward is wrong: a part of it leaves the graph",
                    tensors=tensors,
                    place=place or backward_line(call.function),
                )
            )
    return found
