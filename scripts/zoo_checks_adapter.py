"""Serve the protocol of gradient checks: check a module with its loss, or a step, and answer in its words.

CHECK=zoo_checks_adapter:check
"""

from __future__ import annotations

from typing import Any

from gradwatch.gradcheck.check import run_check
from gradwatch.gradcheck.options import CheckOptions

OPTIONS = CheckOptions(within=20.0)


def check(built: Any, form: str) -> dict[str, Any]:
    """Return whether a gradient is wrong, and where, in which line and how.

    Args:
        built: `(module, inputs, loss_fn)` or `(step, model, batch)`.
        form: `module` or `step`.
    """
    if form == "module":
        module, inputs, loss_fn = built
        found = run_check(
            lambda *given: loss_fn(module(*given)),
            tuple(inputs),
            model=module,
            functions=(loss_fn, module),
            options=OPTIONS,
        )
    else:
        step, model, batch = built
        found = run_check(
            lambda given: step(model, given),
            (batch,),
            model=model,
            functions=(step,),
            options=OPTIONS,
        )
    if not found.is_wrong:
        return {"wrong": False}
    answer: dict[str, Any] = {"wrong": True, "where": [t.name for t in found.tensors if t.verdict == "wrong"]}
    if found.faults:
        first = found.faults[0]
        answer["where"] = [f.where for f in found.faults] + [t for f in found.faults for t in f.tensors]
        answer |= {"kind": first.kind, **first.place.to_json()}
    return answer
