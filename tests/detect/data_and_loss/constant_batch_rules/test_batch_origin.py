"""A batch that comes again is a mistake only if there are more data: full-batch training needs no others."""

import pytest

from gradwatch.detect.data_and_loss.constant_batch import ConstantBatch
from gradwatch.detect.data_and_loss.constant_batch_rules.examples import make_alike, make_batches
from gradwatch.events import BATCH_ALIKE, PART_BATCH, TENSOR_HELD
from gradwatch.records import Severity


def severity(history):
    """Return how severe the only finding is."""
    (finding,) = ConstantBatch().detect(history)
    return finding.severity


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ([PART_BATCH], Severity.WARNING),
        ([TENSOR_HELD, PART_BATCH], Severity.WARNING),
        ([TENSOR_HELD], Severity.INFO),
        ([], Severity.INFO),
    ],
    ids=lambda it: "+".join(kind.name for kind in it) if isinstance(it, list) else "",
)
def test_what_is_known_of_the_data_decides_whether_it_is_a_mistake(kinds, expected):
    assert severity(make_batches([0] * 100, *kinds)) == expected


def test_batches_that_came_before_show_that_there_are_more_data():
    assert severity(make_batches([*range(20), *[20] * 20])) == Severity.WARNING


def test_what_needs_the_same_batch_is_no_mistake():
    assert severity(make_batches([0] * 40, PART_BATCH, optimizer="LBFGS")) == Severity.INFO
    assert severity(make_batches([0] * 40, PART_BATCH, width=2)) == Severity.INFO, "points of an equation"
    assert severity(make_batches([0] * 40, PART_BATCH, width=28)) == Severity.WARNING, "a penalty on gradients"


def test_samples_in_another_order_are_a_mistake_if_there_are_more():
    assert severity(make_alike(BATCH_ALIKE, part=1)) == Severity.WARNING
    assert severity(make_alike(BATCH_ALIKE)) == Severity.INFO
