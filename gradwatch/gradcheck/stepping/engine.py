"""Replace the function of torch that runs every backward pass."""

from __future__ import annotations

from typing import Any

import torch

from gradwatch.replay.locate.call_site import ENGINE

CREATE_GRAPH = 3
"""Position of its argument `create_graph`."""
PLACES = tuple(m for m in (torch.autograd, torch.autograd.graph) if hasattr(m, ENGINE))
"""Modules that hold it under this name."""


def backward_engine() -> Any:
    """Return the function that runs backward passes now."""
    return getattr(torch.autograd.graph, ENGINE)


def put_engine(run: Any) -> None:
    """Make another function run backward passes."""
    for place in PLACES:
        setattr(place, ENGINE, run)


def is_inner_pass() -> bool:
    """Return whether a backward pass is running, such as one in which a checkpoint computes its part again."""
    return torch._C._current_graph_task_id() != -1
