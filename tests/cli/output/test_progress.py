"""The line that shows what a long command is doing."""

import io

import pytest
from rich.console import Console

from gradwatch.cli.output import progress as progress_file
from gradwatch.cli.output.progress import progress_line

WIDTH = 40


@pytest.fixture
def shown(monkeypatch):
    """Return a function that shows texts on a terminal or elsewhere, and returns what was written."""

    def show(*texts, terminal=True, hidden=False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=WIDTH, legacy_windows=False)
        monkeypatch.setattr(progress_file, "output", lambda: console)
        with progress_line(hidden=hidden) as progress:
            for text in texts:
                progress(text)
                console.print("")  # redraws the line
        return console.file.getvalue()

    return show


def test_a_terminal_shows_each_text_as_it_is(shown, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    written = shown("trying 1 of 2: [bold] is a key", "trying 2 of 2: ReLU")

    assert written.index("trying 1 of 2: [bold] is a key") < written.index("trying 2 of 2: ReLU")
    assert written.endswith("\x1b[1A\x1b[2K"), "the line is erased at the end"


def test_a_long_text_stays_one_line(shown, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    written = shown("trying 1 of 2: " + "x" * WIDTH)

    assert "x" * (WIDTH // 3) in written
    assert "x" * (WIDTH - len("trying 1 of 2: ")) not in written


@pytest.mark.parametrize("how", [{"terminal": False}, {"hidden": True}], ids=["a pipe", "json"])
def test_elsewhere_nothing_is_shown(shown, how, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")

    assert "trying" not in shown("trying 1 of 2", **how)


def test_a_dumb_terminal_shows_nothing(shown, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")

    assert "trying" not in shown("trying 1 of 2")
