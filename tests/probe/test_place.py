"""A line of the user's code is found on the stack, and shown."""

import sys
import weakref

import torch

from gradwatch.probe.place import NOWHERE, Place, calling_place, variables_of


def test_the_calling_place_is_the_innermost_line_of_the_users():
    place = calling_place()  # this one

    assert place.with_text == f"tests/probe/test_place.py:{place.line}: `place = calling_place()  # this one`"


def test_no_place_is_found_outside_of_the_frame_to_stop_at():
    def step():
        return calling_place(step.__code__)

    assert step() == NOWHERE
    assert not NOWHERE
    assert (str(NOWHERE), NOWHERE.to_json()) == ("", {"file": None, "line": None})


def test_a_long_line_is_cut_to_60_characters(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(f"loss = {'1 + ' * 20}1\n")

    _, _, text = Place(str(file), 1).with_text.partition(":1: ")

    assert text.startswith("`loss = 1 + 1 + ")
    assert text.endswith(" ...`")
    assert len(text.strip("`")) == 60


def test_the_variables_of_a_function_are_read_and_not_kept_alive():
    tensor = torch.zeros(3)
    gone = weakref.ref(tensor)

    assert variables_of(sys._getframe())["tensor"] is tensor

    del tensor
    assert gone() is None


def test_a_script_keeps_what_it_got_of_its_variables():
    rate = 0.1
    settings = locals()

    assert variables_of(sys._getframe())["rate"] == rate
    assert settings["rate"] == rate
