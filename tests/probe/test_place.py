"""A line of the user's code is found on the stack, and shown."""

from gradwatch.probe.place import NOWHERE, Place, calling_place


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
