"""Write the stable form of an unstable formula in the autograd graph."""

from __future__ import annotations

from gradwatch.diagnose.case import Case
from gradwatch.events import LOG_OF_SOFTMAX, SINGULAR, UNSTABLE
from gradwatch.formulas import ARGUMENTS, Formula, stable_code
from gradwatch.records import Remedy


def stable_formula(case: Case) -> Remedy | None:
    """Return the stable form of the likeliest unstable formula of the graph, or None if the graph shows none."""
    singular = sorted((e for e in case.events if e.kind == SINGULAR.name), key=lambda e: e.values.get("rank", 0))
    latent = [e for e in case.events if e.kind in (UNSTABLE.name, LOG_OF_SOFTMAX.name)]
    event = next((e for e in (*singular, *latent) if "formula" in e.values), None)
    if event is None:  # older runs record no formula
        is_log = any(e.kind == LOG_OF_SOFTMAX.name for e in case.events)
        return _remedy(case, stable_code(Formula.LOG_OF_FRACTION, ""), None) if is_log else None
    formula, argument = Formula(int(event.values["formula"])), ARGUMENTS[int(event.values["argument"])]
    return _remedy(case, stable_code(formula, argument), event.layer)


def _remedy(case: Case, code: str, layer: str | None) -> Remedy:
    after = f" after {case.variable(layer)}" if layer else ""
    guard = ", with eps = 1e-6" if "eps" in code else ""
    return Remedy(text=f"rewrite the operation{after}, which the autograd graph shows, as {code}{guard}", code=code)
