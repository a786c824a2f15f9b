"""The view that is redrawn in place, and text that is printed meanwhile."""

import io
import re
import sys
import warnings

import pytest
from rich.text import Text

from gradwatch.cli.output.console import show_warning
from gradwatch.render.terminal.display import PrintedLines, html
from gradwatch.render.terminal.sink import Terminal


class _Stream(io.StringIO):
    """A stream that is a terminal or not, and writes a journal."""

    def __init__(self, journal, name, *, is_terminal):
        super().__init__()
        self.journal, self.name, self.is_terminal = journal, name, is_terminal

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        self.journal.append((self.name, text))
        return super().write(text)


@pytest.fixture
def journal():
    return []


@pytest.fixture
def error(journal, monkeypatch):
    """Return a function that replaces standard error by a stream."""

    def make(*, is_terminal):
        stream = _Stream(journal, "error", is_terminal=is_terminal)
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return make


@pytest.fixture
def lines(make_console, journal):
    console = make_console(terminal=True)
    console.file = _Stream(journal, "output", is_terminal=True)
    return lambda: PrintedLines(console)


def test_a_line_for_standard_error_appears_above_the_view(error, lines, journal):
    error(is_terminal=True)
    shown = lines()
    shown.show(Text("one\ntwo"))
    journal.clear()

    sys.stderr.write("warning: mind the gap\n")

    text = "".join(text for _, text in journal)
    erased, _, drawn = text.partition("warning: mind the gap")
    assert erased.count("\x1b[2K") >= 2, "both lines of the view are erased"
    assert "one" in drawn, "and drawn again under it"
    shown.stop()


def test_python_warnings_appear_above_a_live_view(error, make_console, healthy, monkeypatch, written):
    error(is_terminal=True)
    monkeypatch.setattr(warnings, "showwarning", show_warning)
    console = make_console(terminal=True)
    sink = Terminal(console=console)
    sink.write(healthy.history)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("gradwatch: a disk is full", RuntimeWarning, stacklevel=1)
    sink.close(healthy.history, ())

    assert re.search(r"\x1b\[2K[^\n]*a disk is full", written(console))


def test_an_error_stream_that_is_no_terminal_is_left_alone(error, lines, journal):
    stream = error(is_terminal=False)
    shown = lines()
    shown.show(Text("view"))
    journal.clear()

    sys.stderr.write("half")

    assert journal == [("error", "half")]
    assert sys.stderr is stream
    shown.stop()


def test_half_a_line_waits_for_its_end(error, lines, journal):
    error(is_terminal=True)
    shown = lines()

    sys.stderr.write("one, ")
    assert "one, " not in "".join(text for _, text in journal)
    sys.stderr.write("two\nthree\n")

    assert "one, two\nthree\n" in "".join(text for _, text in journal)
    shown.stop()


def test_the_error_stream_is_given_back_at_the_end(error, lines):
    stream = error(is_terminal=True)
    shown = lines()
    assert sys.stderr is not stream

    shown.stop()

    assert sys.stderr is stream


def test_lines_that_a_narrower_terminal_has_wrapped_are_erased_as_well(make_console, written):
    console = make_console(100, terminal=True)
    shown = PrintedLines(console)
    shown.show(Text("a" * 90 + "\n" + "b" * 90))
    console.file.truncate(0)
    console.width = 40

    shown.show(Text("c\nd"))

    erased = written(console).split("c", maxsplit=1)[0]
    assert erased.count("\x1b[1A") == 1 + 4, "one line up for the view, two for each line that takes three now"
    shown.stop()


def test_in_a_notebook_the_view_is_html_that_is_replaced(monkeypatch, make_console, healthy):
    display = pytest.importorskip("IPython.display", reason="IPython is not installed")
    pages = []

    class Handle:
        def update(self, page):
            pages.append(page.data)

    def show(page, *, display_id=False):
        if display_id:  # what rich prints has none
            pages.append(page.data)
        return Handle()

    monkeypatch.setattr(display, "display", show)
    console = make_console()
    console.is_jupyter = True
    sink = Terminal(console=console)
    assert sink.log_format == "rich"

    sink.write(healthy.history)
    sink._due_s = 0.0
    sink.write(healthy.history)
    sink.close(healthy.history, ())

    assert len(pages) == 3
    assert all("<pre" in page and "quick" in page for page in pages[:2])
    assert pages[2] == "", "taken away before the summary"


def test_text_as_html_is_escaped_and_keeps_its_colours():
    page = html(Text.assemble(("<script>", "#d70000"), " & more"))

    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert re.search(r'style="color: #d70000', page)
