"""Numbers as people read them."""

import math

import pytest

from gradwatch.records import Quantity
from gradwatch.render.common import format as units


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (0.041234, "0.0412"),
        (1.0, "1.00"),
        (123.4, "123"),
        (98765.0, "98,765"),
        (1.234e-9, "1.23e-9"),
        (4.1e18, "4.10e18"),
        (-0.5, "-0.500"),
        (math.nan, "-"),
        (math.inf, "Inf"),
        (-math.inf, "-Inf"),
    ],
)
def test_a_number_has_three_significant_digits(value, shown):
    assert units.number(value) == shown


@pytest.mark.parametrize(
    ("fraction", "shown"),
    [(0.0, "0 %"), (1.0, "100 %"), (0.0001, "<0.1 %"), (0.99999, ">99.9 %"), (0.9833, "98.3 %"), (math.nan, "-")],
)
def test_a_percentage_is_never_rounded_to_all_or_nothing(fraction, shown):
    assert units.percent(fraction) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0002, "<1 ms"),
        (0.0643, "64 ms"),
        (0.25, "0.2 s"),
        (41.4, "41 s"),
        (59.6, "1 min 0 s"),
        (192, "3 min 12 s"),
        (7500, "2 h 5 min"),
        (math.inf, "-"),
    ],
)
def test_a_duration_has_two_units_at_most(seconds, shown):
    assert units.duration(seconds) == shown


def test_a_value_that_every_step_has_is_named_where_it_is_not_finite():
    assert units.value(math.nan) == "NaN", "the loss is never missing"
    assert units.value(0.5) == "0.500"


def test_evidence_shows_fractions_as_percent_and_keeps_other_units():
    assert units.quantity(Quantity(key="act.dead_frac", value=0.95)) == "95 %", "the unit is that of the catalogue"
    assert units.quantity(Quantity(key="gap", value=8.41, unit="decades")) == "8.41 decades"
    assert units.quantity(Quantity(key="grad.nonfinite", value=4096.0)) == "4,096 elements"


def test_a_long_name_keeps_its_end_which_tells_layers_apart():
    shown = units.shorten("encoder.blocks.11.attention.proj", 16)

    assert len(shown) == 16
    assert shown.endswith("attention.proj")
    assert units.shorten("fc", 16) == "fc"


def test_factors_are_rounded_to_two_digits():
    assert units.times(30854.0) == "31,000x"
    assert units.times(2.34) == "2.3x"
    assert units.times(2.34e9) == "2.3e9x"
