"""The samples that make a step fail are found by halving the batch."""

import pytest
import torch

from gradwatch.replay.locate import bad_samples


def bisection(bad_rows, *, most=10**9):
    asked = []

    def fails(rows):
        asked.append(rows)
        if len(asked) > most:
            raise AssertionError("too many runs")
        return bool(set(bad_rows) & set(rows))

    return bad_samples.BatchBisection(fails), asked


@pytest.mark.parametrize("bad_rows", [(0,), (63,), (17, 40), (5, 6, 7)])
def test_the_bad_samples_are_found(bad_rows):
    search, _ = bisection(bad_rows)

    assert search.find(64) == bad_rows


def test_one_culprit_takes_a_logarithm_of_runs():
    search, asked = bisection((20,))

    search.find(64)

    assert search.runs == len(asked) == 12, "two for each of six halvings"


def test_what_takes_several_together_has_no_culprit():
    search = bad_samples.BatchBisection(lambda rows: {3, 60} <= set(rows))

    assert search.find(64) == ()


def test_a_model_that_cannot_take_so_few_has_no_culprit():
    def fails(rows):
        if len(rows) == 1:
            raise ValueError("Expected more than 1 value per channel when training")
        return 5 in rows

    assert bad_samples.BatchBisection(fails).find(8) == ()


def test_the_search_gives_up_after_its_runs():
    search, asked = bisection(range(64))

    assert search.find(64) == ()
    assert len(asked) == bad_samples.MAX_RUNS


def test_rows_are_taken_from_every_tensor_of_a_batch():
    batch = (torch.arange(5), {"mask": torch.arange(10).reshape(5, 2)})

    first, second = bad_samples.take(batch, [4, 0])

    assert bad_samples.count(batch) == 5
    assert first.tolist() == [4, 0]
    assert second["mask"].tolist() == [[8, 9], [0, 1]]


def test_tensors_that_disagree_have_no_samples():
    assert bad_samples.count((torch.ones(5), torch.ones(4))) is None
    assert bad_samples.count((torch.ones(5), torch.tensor(1.0))) is None
    assert bad_samples.count(()) is None


def test_rows_that_are_not_finite_are_found():
    inputs = torch.zeros(4, 2, 2)
    inputs[1, 0, 1] = float("nan")
    inputs[3, 1, 1] = float("inf")

    assert bad_samples.not_finite((inputs, torch.arange(4))) == (1, 3)
    assert bad_samples.magnitudes((torch.tensor([[1.0, -3.0], [2.0, 0.0]]),)).tolist() == [3.0, 2.0]
