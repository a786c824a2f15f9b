"""Every kind of ending has a status and a sentence, and is read back, also from older runs."""

from typing import get_args

import pytest

from gradwatch.history.ending import Ending, Kind


@pytest.mark.parametrize(
    ("ending", "steps", "sentence"),
    [
        (Ending(kind="finished"), 1, "finished after 1 step"),
        (Ending(kind="finished"), 1920, "finished after 1,920 steps"),
        (Ending(kind="early-stop", reason="it is flat"), 96, "stopped early at step 96: it is flat"),
        (Ending(kind="failed", reason="KeyError: 'k'"), 0, "failed before the first step: KeyError: 'k'"),
        (Ending(kind="interrupted"), 7, "interrupted at step 7"),
        (Ending(kind="killed"), 0, "killed before the first step"),
    ],
)
def test_an_ending_is_a_sentence(ending, steps, sentence):
    assert ending.sentence(steps) == sentence


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_kind_is_read_back_with_its_status(kind):
    ending = Ending(kind=kind, reason="so")

    assert Ending.from_json(ending.to_json(), status=ending.status) == ending


def test_a_run_without_an_ending_or_with_one_of_another_version_has_the_one_of_its_status():
    assert Ending.from_json(None, status="interrupted") == Ending(kind="interrupted")
    assert Ending.from_json({"kind": "preempted", "reason": "x"}, status="failed") == Ending(kind="failed")
    # an older version has gone on with the run, and has kept no ending
    assert Ending.from_json(Ending(kind="early-stop").to_json(), status="failed") == Ending(kind="failed")
