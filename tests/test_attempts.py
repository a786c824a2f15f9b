"""An exception costs a part of the monitor one attempt, and several in a row end the part."""

import warnings

import pytest

from gradwatch.attempts import MAX_FAILURES, Attempts
from gradwatch.errors import GradwatchError
from gradwatch.events import LEFT_OUT


def fail(error=None):
    raise error or IndexError("list index out of range")


@pytest.fixture
def reported():
    return []


@pytest.fixture
def attempts(reported):
    return Attempts(reported.append)


@pytest.fixture
def caught():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def test_an_action_that_raises_returns_none_and_is_attempted_again(attempts, reported, caught):
    assert attempts.run("the heads", fail) is None
    assert attempts.run("the heads", lambda x: x + 1, 1) == 2
    assert not reported
    assert not caught


def test_several_failures_in_a_row_leave_a_part_out(attempts, reported, caught):
    for _ in range(MAX_FAILURES):
        attempts.run("the heads", fail)

    assert attempts.run("the heads", lambda: 1) is None, "it is not attempted again"
    assert attempts.run("the cuts", lambda: 1) == 1, "other parts go on"
    ((kind, layer, text, values),) = reported
    assert (kind, layer, values) == (LEFT_OUT.name, None, {"detector": 0.0})
    assert text == "the heads (IndexError: list index out of range)"
    assert len(caught) == 1


def test_failures_with_successes_between_them_leave_nothing_out(attempts, reported):
    for _ in range(2 * MAX_FAILURES):
        attempts.run("the heads", fail)
        attempts.run("the heads", lambda: 1)

    assert not reported


def test_an_input_that_raises_costs_only_its_own_result(attempts):
    assert attempts.each("the rules", lambda x: 6 // x, [1, 0, 2, 0, 3]) == [6, 3, 2]
    assert not attempts.left_out


def test_a_rule_that_raises_on_an_input_of_each_attempt_is_left_out(attempts):
    for _ in range(MAX_FAILURES):
        assert attempts.each("the rules", lambda x: 6 // x, [1, 0, 2]) == [6, 3]

    assert attempts.left_out == {"the rules"}


def test_a_place_that_works_does_not_hide_one_that_fails(attempts):
    for _ in range(MAX_FAILURES):
        attempts.conclude("the updates", ValueError("no"), place="after")
        attempts.conclude("the updates", None, place="before")

    assert attempts.left_out == {"the updates"}


def test_a_part_whose_last_attempt_failed_is_left_out_at_the_end(attempts, reported):
    attempts.run("the heads", fail)
    attempts.run("the cuts", fail)
    attempts.run("the cuts", lambda: 1)

    attempts.end()
    attempts.end()

    assert [observation.text.partition(" (")[0] for observation in reported] == ["the heads"]


def test_one_warning_announces_all_parts_and_another_each_output(attempts, reported, caught):
    for part in ("the heads", "the cuts", "sink TensorBoard", "sink Html"):
        attempts.conclude(part, ValueError("no"), is_last=True)

    subjects = [str(warning.message).partition(" failed")[0] for warning in caught]
    assert subjects == ["gradwatch: the heads", "gradwatch: sink TensorBoard", "gradwatch: sink Html"]
    assert len(reported) == 4


def test_what_the_user_can_mend_is_raised(attempts):
    with pytest.raises(GradwatchError, match="disk"):
        attempts.run("the rows", fail, GradwatchError("the disk is full"))


def test_internals_of_long_messages_are_not_shown(attempts, reported, caught):
    listing = "Could not run 'aten::as_strided' with arguments from the 'SparseCPU' backend. " + "CPU, CUDA, HIP, " * 40
    for error in (NotImplementedError(listing), RuntimeError("one line\nand another"), KeyError()):
        attempts.conclude(f"the part of {type(error).__name__}", error, is_last=True)

    names = ("NotImplementedError", "RuntimeError", "KeyError")
    assert [observation.text for observation in reported] == [f"the part of {name} ({name})" for name in names]
    assert "aten" not in str(caught[0].message)
