"""Train PyTorch models, watch the gradients of every layer, and report which layer has a problem and why.

Under `gradwatch run`, this package is imported before pytest, which then could not rewrite it: PYTEST_DONT_REWRITE.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from gradwatch._version import __version__ as __version__

# for type checkers and editors, which do not run `__getattr__`; the same names as in _HOME
if TYPE_CHECKING:
    from gradwatch.attribution.attribute import attribute as attribute
    from gradwatch.diagnose.gradient_noise import noise_scale as noise_scale
    from gradwatch.errors import FindingError as FindingError
    from gradwatch.gradcheck.audit.audit import audit_step as audit_step
    from gradwatch.gradcheck.check import check as check
    from gradwatch.gradcheck.implicit.check_fixed_point import check_fixed_point as check_fixed_point
    from gradwatch.gradcheck.layer.check_layer import check_layer as check_layer
    from gradwatch.gradcheck.precision.measure import precision as precision
    from gradwatch.history.store import History as History
    from gradwatch.monitor import Monitor as Monitor
    from gradwatch.monitor import Schedule as Schedule
    from gradwatch.monitor.watch import watch as watch
    from gradwatch.planning.plan import plan as plan
    from gradwatch.probe.hessian.curvature import curvature as curvature
    from gradwatch.probe.hessian.products import hvp as hvp
    from gradwatch.probe.hessian.products import jvp as jvp
    from gradwatch.probe.hessian.spectrum import spectrum as spectrum
    from gradwatch.records import Finding as Finding
    from gradwatch.replay.incident import incidents as incidents
    from gradwatch.replay.locate.locate import locate as locate
    from gradwatch.replay.samples.sample_gradients import sample_gradients as sample_gradients
    from gradwatch.run import Run as Run
    from gradwatch.run import load_run as load_run
    from gradwatch.train.reproducible import reproducible as reproducible

_HOME = {
    "Finding": "gradwatch.records",
    "FindingError": "gradwatch.errors",
    "History": "gradwatch.history.store",
    "Monitor": "gradwatch.monitor",
    "Run": "gradwatch.run",
    "Schedule": "gradwatch.monitor",
    "attribute": "gradwatch.attribution.attribute",
    "audit_step": "gradwatch.gradcheck.audit.audit",
    "check": "gradwatch.gradcheck.check",
    "check_fixed_point": "gradwatch.gradcheck.implicit.check_fixed_point",
    "check_layer": "gradwatch.gradcheck.layer.check_layer",
    "curvature": "gradwatch.probe.hessian.curvature",
    "hvp": "gradwatch.probe.hessian.products",
    "incidents": "gradwatch.replay.incident",
    "jvp": "gradwatch.probe.hessian.products",
    "load_run": "gradwatch.run",
    "locate": "gradwatch.replay.locate.locate",
    "noise_scale": "gradwatch.diagnose.gradient_noise",
    "plan": "gradwatch.planning.plan",
    "precision": "gradwatch.gradcheck.precision.measure",
    "reproducible": "gradwatch.train.reproducible",
    "sample_gradients": "gradwatch.replay.samples.sample_gradients",
    "spectrum": "gradwatch.probe.hessian.spectrum",
    "watch": "gradwatch.monitor.watch",
}

__all__ = [*_HOME, "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that the command line starts without torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'gradwatch' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)
