"""Check that Captum is installed, without importing it."""

from __future__ import annotations

import importlib.util

from gradwatch.errors import GradwatchError


def require_captum() -> None:
    """Check that Captum is installed.

    Raises:
        GradwatchError: Captum is not installed.
    """
    if importlib.util.find_spec("captum") is None:
        raise GradwatchError("attribute: the package captum is not installed; pip install 'gradwatch[attribute]'")
