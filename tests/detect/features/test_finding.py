"""Factors in sentences have the digits that a person reads."""

import pytest

from gradwatch.detect.features.finding import format_factor


@pytest.mark.parametrize(
    ("ratio", "text"), [(1.2034, "1.2"), (527.98, "528"), (2056.4, "2,060"), (0.5, "0.5"), (1e30, "1e+30")]
)
def test_a_factor_has_three_digits_at_most(ratio, text):
    assert format_factor(ratio) == text
