"""Labeled paragraphs at the width of a terminal."""

import pytest
from rich.text import Text

from gradwatch.render.terminal.paragraphs import command, print_rows


@pytest.fixture
def lines(make_console, written):
    def printed(*rows, width=40):
        console = make_console(width=width)
        print_rows(console, rows)
        return written(console).splitlines()

    return printed


@pytest.mark.parametrize("kept", ["96.1 %", "150 steps", "3.3 s", "step 60", "412 us"])
def test_a_number_keeps_its_unit_at_every_width(lines, kept):
    for width in range(24, 60):
        shown = lines(("found", Text(f"the accuracy of the validation was {kept} at the end")), width=width)
        assert sum(kept in line for line in shown) == 1


def test_a_line_breaks_between_words_and_never_within_one(lines):
    shown = lines(("found", Text("the kinds dead-relu and vanishing-gradient come together")), width=35)

    assert shown == ["     found the kinds dead-relu and", "           vanishing-gradient come", "           together"]


def test_a_command_is_never_broken_and_moves_left_if_it_is_long(lines):
    text = "gradwatch diagnose runs/20261125-225920-dead-relu --full"

    assert lines(("more", command(text))) == [f"      more {text}"]
    assert lines(("", command(text))) == [f"  {text}"]
    assert lines(("", command(text)), width=80) == [f"           {text}"]


def test_the_styles_of_a_text_stay_in_place_at_a_line_break(make_console, written):
    console = make_console(width=24, terminal=True)

    print_rows(console, [("fix", Text.assemble("in at most 5 steps ", ("stop", "bold"), " it"))])

    assert "\x1b[1mstop\x1b[0m" in written(console)
