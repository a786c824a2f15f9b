"""Check that a package that gradwatch does not depend on is installed, without importing it."""

from __future__ import annotations

import importlib.util

from gradwatch.errors import GradwatchError

PACKAGES = ("wandb", "mlflow", "trackio", "torchao")
"""Packages that gradwatch does not depend on: for the sinks of the same names, and for the optimizer adamw8bit."""


def installation(package: str) -> str:
    """Return the command that installs a missing package, or an empty string."""
    if package not in PACKAGES:
        return ""
    found = importlib.util.find_spec(package)
    # without an origin it is only a folder of that name, such as the folder `wandb` that wandb writes
    return "" if found and found.origin else f"pip install {package}"


def require(sink: str) -> None:
    """Check that the package of a sink is installed.

    Raises:
        GradwatchError: The package is not installed.
    """
    if command := installation(sink):
        raise GradwatchError(f"sinks.{sink}: the package {sink} is not installed; {command}")
