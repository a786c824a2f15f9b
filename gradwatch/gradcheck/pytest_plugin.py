"""Offer `gradwatch.check` to tests as the pytest fixture `gradient_check`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from gradwatch.gradcheck.result import GradientCheck


@pytest.fixture(scope="session")
def gradient_check() -> Callable[..., GradientCheck]:
    """Check the gradient of a step as `gradwatch.check` does, and fail the test with the report if it is wrong."""

    def run(step: Callable[..., Any], *batch: Any, **options: Any) -> GradientCheck:
        from gradwatch.gradcheck.check import check  # pytest loads this file in every session; torch takes seconds

        found = check(step, *batch, **options)
        if found.is_wrong:
            pytest.fail(str(found), pytrace=False)
        return found

    return run
