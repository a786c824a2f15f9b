"""Instrumented optimizers: torch's own, whose step also measures every gradient, weight and update.

Each class is defined when it is first used: libraries that look optimizers up by name must find torch's class of the
same name, unless this one was asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwatch.optim.adam import Adam as Adam
    from gradwatch.optim.adam import AdamW as AdamW
    from gradwatch.optim.instrumented import InstrumentedOptimizer as InstrumentedOptimizer
    from gradwatch.optim.sgd import SGD as SGD

_HOME = {"SGD": "sgd", "Adam": "adam", "AdamW": "adam", "InstrumentedOptimizer": "instrumented"}

__all__ = ["SGD", "Adam", "AdamW", "InstrumentedOptimizer"]


def __getattr__(name: str) -> object:
    """Import a class when it is first used."""
    if name not in _HOME:
        raise AttributeError(f"module 'gradwatch.optim' has no attribute '{name}'")
    return getattr(importlib.import_module(f"gradwatch.optim.{_HOME[name]}"), name)
