"""Batch sizes are chosen by people, sizes of data sets are not: the size says which of both a batch is."""

import math

import pytest

from gradwatch.detect.data_and_loss.constant_batch import ConstantBatch
from gradwatch.detect.data_and_loss.constant_batch_rules.batch_size import are_points, is_surely_part, may_be_part
from gradwatch.detect.data_and_loss.constant_batch_rules.examples import make_batches
from gradwatch.events import DERIVATIVE
from gradwatch.records import Event, Severity


@pytest.mark.parametrize("size", [2, 7, 12, 24, 30, 75, 200, 256, 512, 4096, math.nan])
def test_round_sizes_may_be_chosen(size):
    assert may_be_part(make_batches([0]), size, chosen=256, small=12)


@pytest.mark.parametrize("size", [1, 34, 178, 257, 300, 1000, 60_001])
def test_one_sample_odd_sizes_and_large_ones_off_the_grid_are_all_the_data(size):
    assert not may_be_part(make_batches([0]), size, chosen=256, small=12)


@pytest.mark.parametrize(
    ("size", "is_sure"), [(32, True), (96, True), (40, False), (75, False), (512, False), (4, False)]
)
def test_powers_of_two_and_their_like_are_surely_chosen(size, is_sure):
    assert is_surely_part(make_batches([0]), size, chosen=256, toy=8) is is_sure
    assert not is_surely_part(make_batches([0]), math.nan, chosen=256, toy=8), "an unknown size is no evidence"


def test_every_size_is_what_lbfgs_needs():
    history = make_batches([0], optimizer="LBFGS")

    assert not may_be_part(history, 32, chosen=256, small=12)
    assert not is_surely_part(history, 32, chosen=256, toy=8)


@pytest.mark.parametrize(("values", "is_so"), [({"width": 2.0}, True), ({"width": 28.0}, False), ({}, False)])
def test_points_of_an_equation_are_few_numbers_by_which_the_loss_is_differentiated(values, is_so):
    event = Event(kind=DERIVATIVE.name, step=0, values={"tensors": 1.0, **values})
    history = make_batches([0] * 40, event=event)

    assert are_points(history, most=4) is is_so
    (found,) = ConstantBatch().detect(history)
    assert found.severity == (Severity.INFO if is_so else Severity.WARNING)
