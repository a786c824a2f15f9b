"""gradwatch: train PyTorch models, watch every layer's gradients, and say which layer is ill and why."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from gradwatch.attach import watch as watch
    from gradwatch.history.store import History as History
    from gradwatch.monitor import Monitor as Monitor
    from gradwatch.probe.curvature import curvature as curvature
    from gradwatch.recorded import Run as Run
    from gradwatch.recorded import load_run as load_run
    from gradwatch.records import Finding as Finding
    from gradwatch.replay.locate import locate as locate
    from gradwatch.train.reproduce import reproducible as reproducible

_HOME = {
    "Finding": "gradwatch.records",
    "History": "gradwatch.history.store",
    "Monitor": "gradwatch.monitor",
    "Run": "gradwatch.recorded",
    "curvature": "gradwatch.probe.curvature",
    "load_run": "gradwatch.recorded",
    "locate": "gradwatch.replay.locate",
    "reproducible": "gradwatch.train.reproduce",
    "watch": "gradwatch.attach",
}

__all__ = [
    "Finding",
    "History",
    "Monitor",
    "Run",
    "__version__",
    "curvature",
    "load_run",
    "locate",
    "reproducible",
    "watch",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that the command line starts without torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'gradwatch' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)
