"""Find the line that called an operation: the innermost frame outside of torch, Python and gradwatch."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, FrameType

import torch

from gradwatch.errors import PACKAGE
from gradwatch.probe.place import NOWHERE, Place

TORCH = Path(torch.__file__).parent
STANDARD = Path(sysconfig.get_path("stdlib"))
INSTALLED = tuple(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib"))
MODELS = PACKAGE / "models"
PLUMBING = ("beartype", "einops", "jaxtyping", "typeguard")
"""Packages between a model's line and torch, whose lines say nothing about the purpose of the operation."""
ENGINE = "_engine_run_backward"  # torch/autograd/graph.py: frames outside of it called backward(), not the operation
RECOMPUTING = str(TORCH / "utils" / "checkpoint.py")


def find_call_site(within: CodeType | None, *, skip: int = 1) -> tuple[Place, bool]:
    """Return the calling line, and whether the call recomputes a forward pass for activation checkpointing.

    Args:
        within: Code of the frame at which to stop, since frames outside of it are not part of the step.
        skip: Number of the caller's frames to skip.
    """
    frame: FrameType | None = sys._getframe(skip)
    place, again = NOWHERE, False
    while frame is not None and frame.f_code is not within and frame.f_code.co_name != ENGINE:
        file = frame.f_code.co_filename
        # the walk continues after the line is found: the frame of the recomputation is further out
        again = again or file == RECOMPUTING
        if not place and is_user_code(file):
            place = Place(file, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return place, again


@cache  # asked for every frame of every operation
def is_user_code(file: str) -> bool:
    """Return whether a file belongs to a model or a training loop, not to torch, Python or gradwatch."""
    path = Path(file)
    if file.startswith("<") or path.is_relative_to(TORCH):  # `<string>`, `<frozen ...>`: no file to show
        return False
    if path.is_relative_to(PACKAGE):
        return path.is_relative_to(MODELS)  # the models that come with gradwatch are trained like a user's model
    # before the standard library, since site-packages may be a folder of it
    for folder in INSTALLED:
        if path.is_relative_to(folder):
            return path.relative_to(folder).parts[0] not in PLUMBING
    return not path.is_relative_to(STANDARD)
