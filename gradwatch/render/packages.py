"""Check that the package of a sink is installed, without importing it."""

from __future__ import annotations

import importlib.util

from gradwatch.errors import GradwatchError

PACKAGES = ("wandb", "mlflow", "trackio")
"""Packages that gradwatch does not depend on. Each is named like its sink."""


def installation(sink: str) -> str:
    """Return the command that installs the missing package of a sink, or an empty string."""
    if sink not in PACKAGES:
        return ""
    found = importlib.util.find_spec(sink)
    # without an origin it is only a folder of that name, such as the folder `wandb` that wandb writes
    return "" if found and found.origin else f"pip install {sink}"


def require(sink: str) -> None:
    """Check that the package of a sink is installed.

    Raises:
        GradwatchError: The package is not installed.
    """
    if command := installation(sink):
        raise GradwatchError(f"sinks.{sink}: the package {sink} is not installed; {command}")
