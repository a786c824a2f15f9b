"""Check that a package that gradwatch does not depend on is installed, without importing it."""

from __future__ import annotations

import importlib.util

from gradwatch.errors import GradwatchError

PACKAGES = ("wandb", "mlflow", "trackio", "torchao")
"""Packages that gradwatch does not depend on: of sinks, which are named like them, and of the optimizer adamw8bit."""


def installation(package: str) -> str:
    """Return the command that installs a package that is missing, or an empty string."""
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
