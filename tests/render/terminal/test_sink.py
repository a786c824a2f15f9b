"""The terminal sink: live view, plain lines, lines of JSON."""

import dataclasses
import json
import re

import pytest

from gradwatch.history.store import History
from gradwatch.records import RunInfo, Severity
from gradwatch.render import Sink
from gradwatch.render.terminal import sink as sink_file
from gradwatch.render.terminal.sink import Terminal


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""

    class Clock:
        now = 100.0

        def monotonic(self):
            return self.now

    standing = Clock()
    monkeypatch.setattr(sink_file, "time", standing)
    return standing


def test_it_is_a_sink(make_console):
    assert isinstance(Terminal(console=make_console()), Sink)


def test_the_format_follows_the_output(make_console):
    assert Terminal(console=make_console(terminal=True)).log_format == "rich"
    assert Terminal(console=make_console()).log_format == "plain"
    assert Terminal(console=make_console(), log_format="json").log_format == "json"


def test_plain_output_is_one_line_per_so_many_steps(make_console, written, healthy, grow):
    console = make_console()
    sink = Terminal(console=console, every=50)

    for history in grow(healthy.history):
        sink.write(history)

    lines = written(console).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 0/120", "step 50/120", "step 100/120"]
    number = r"[\d.,e-]+"
    pattern = rf"loss {number}  grad norm {number}  lr {number}  .*6,\d{{3}} samples/s  [\d.]+ s left"
    assert all(re.search(pattern, line) for line in lines), lines
    assert ["validation" in line for line in lines] == [False, True, True], "each validation is told once"
    assert "validation 0.800 83 %" in lines[2]


def test_after_a_rewind_what_is_found_again_is_news_again(make_console, written, vanishing, grow):
    console = make_console()
    sink = Terminal(console=console, every=50)
    finding = vanishing.history.findings[0]

    for _ in range(6):
        for history in grow(vanishing.history):
            if history.step in (60, 70):
                sink.write(history)
        sink.report(finding)

    told = [line for line in written(console).splitlines() if not line.startswith("step ")]
    assert len(told) == 6, "none says that the rest is in the summary"


def test_plain_output_holds_no_control_codes(make_console, written, vanishing):
    console = make_console()
    sink = Terminal(console=console)

    sink.write(vanishing.history)
    sink.report(vanishing.history.findings[0])
    sink.close(vanishing.history, vanishing.diagnoses)

    assert "\x1b" not in written(console)


def test_zero_switches_the_lines_off(make_console, written, healthy):
    console = make_console()

    Terminal(console=console, every=0).write(healthy.history)

    assert written(console) == ""


def test_steps_that_are_not_multiples_are_shown_as_well(make_console, written, healthy, grow):
    console = make_console()
    sink = Terminal(console=console, every=50)

    for history in grow(healthy.history):
        if history.step in (7, 49, 63, 64, 119):
            sink.write(history)

    assert re.findall(r"step (\d+)/", written(console)) == ["7", "63", "119"]


def test_findings_are_printed_as_they_come_each_on_one_line(make_console, written, vanishing):
    console = make_console(40)

    Terminal(console=console).report(vanishing.history.findings[0])

    assert written(console) == (
        "✖ step 44 critical GW101 vanishing-gradient layers.0.weight: This is what vanishing-gradient means.\n"
    )


def test_a_problem_of_many_layers_is_one_line(make_console, written, vanishing):
    console = make_console(120)
    sink = Terminal(console=console)

    for finding in vanishing.history.findings:
        sink.report(finding)

    kinds = [kind for line in written(console).splitlines() for kind in re.findall(r" GW\d+ (\S+)", line)]
    assert sorted(kinds) == sorted({finding.kind for finding in vanishing.history.findings})


def test_a_problem_that_becomes_more_severe_is_reported_once_more(make_console, written, make_finding):
    console = make_console(120)
    sink = Terminal(console=console)

    for severity in (Severity.INFO, Severity.CRITICAL, Severity.WARNING, Severity.CRITICAL):
        sink.report(make_finding("dead-relu", layer="first", step=70, severity=severity, code="GW201"))

    assert re.findall(r"info|warning|critical", written(console)) == ["info", "critical"]


def test_notes_stay_within_the_live_view(make_console, written, make_finding):
    console = make_console(120, terminal=True)
    sink = Terminal(console=console)

    for severity in (Severity.INFO, Severity.WARNING):
        sink.report(make_finding("dead-relu", layer="first", step=70, severity=severity, code="GW201"))

    assert re.findall(r"info|warning", written(console)) == ["warning"]


def test_a_problem_that_is_over_is_reported_once_and_is_news_if_it_returns(make_console, written, make_finding):
    console = make_console(200)
    sink = Terminal(console=console)
    first, second = (
        make_finding("dead-relu", layer=layer, step=70, severity=Severity.WARNING, code="GW201")
        for layer in ("first", "second")
    )

    def over(finding):
        sink.withdraw(dataclasses.replace(finding, withdrawn=90, ended=80, reason="it learns again"))

    for finding in (first, second):
        sink.report(finding)
    for finding in (first, second):
        over(finding)
    sink.report(second)

    assert ["withdrawn" in line for line in written(console).splitlines()] == [False, True, False]


def test_a_problem_that_comes_and_goes_does_not_fill_the_screen(make_console, written, make_finding):
    console = make_console(200)
    sink = Terminal(console=console)
    finding = make_finding("dead-relu", layer="first", step=70, severity=Severity.WARNING, code="GW201")

    for _ in range(10):
        sink.report(finding)
        sink.withdraw(dataclasses.replace(finding, withdrawn=90, ended=80, reason="it learns again"))

    lines = written(console).splitlines()
    assert sum("withdrawn" in line for line in lines) == sink_file.MAX_PER_KIND
    assert sum(f"more reports of {finding.kind}: see the summary" in line for line in lines) == 1


def test_json_output_is_one_strict_object_per_line(make_console, written, broken, grow):
    console = make_console()
    sink = Terminal(console=console, every=50, log_format="json")

    for history in grow(broken.history):
        sink.write(history)
    for finding in broken.history.findings:
        sink.report(finding)
    sink.close(broken.history, ())

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    events = [json.loads(line, parse_constant=refuse) for line in written(console).splitlines()]
    assert [e["event"] for e in events] == ["step"] * 3 + ["finding"] * 3 + ["end"]
    assert events[1]["step"] == 50
    assert events[1]["loss"] > 0
    assert events[2]["loss"] is None, "NaN from step 100 on"
    assert events[3]["kind"] == "non-finite"
    assert events[-1]["verdict"] == "critical"


def test_the_live_view_is_redrawn_at_most_four_times_a_second(make_console, written, healthy, grow, clock):
    console = make_console(terminal=True)
    sink = Terminal(console=console)
    redrawn = 0

    for history in grow(healthy.history):
        clock.now += 0.01
        before = len(written(console))
        sink.write(history)
        redrawn += len(written(console)) > before

    sink.close(healthy.history, ())
    assert redrawn == 5, "120 steps of 10 ms, one redraw at once and one each 250 ms"


def test_slow_redraws_are_spaced_to_one_percent_of_the_time(make_console, healthy, clock, monkeypatch):
    def slow(*args, **kwargs):
        clock.now += 0.02
        return "view"

    monkeypatch.setattr(sink_file, "panel", slow)
    sink = Terminal(console=make_console(terminal=True))
    times = []
    for _ in range(1000):
        before = clock.now
        sink.write(healthy.history)
        if clock.now > before:
            times.append(before)
        clock.now += 0.01

    sink.close(healthy.history, ())
    assert 20 / (times[-1] - times[0]) * (len(times) - 1) / 1e3 <= 0.0101, times


def test_the_live_view_follows_the_width_of_the_terminal(make_console, written, healthy, clock):
    console = make_console(200, terminal=True)
    sink = Terminal(console=console)
    sink.write(healthy.history)
    wide = max(map(len, re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", written(console)).splitlines()))

    console.file.truncate(0)
    console.width = 60
    clock.now += 60
    sink.write(healthy.history)

    narrow = max(map(len, re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\r|\x00", "", written(console)).splitlines()))
    sink.close(healthy.history, ())
    assert wide > 120
    assert narrow <= 60


def test_the_end_of_a_run_gives_the_cursor_back_and_prints_the_summary(make_console, written, healthy):
    console = make_console(terminal=True)
    sink = Terminal(console=console)
    sink.write(healthy.history)
    assert written(console).count("\x1b[?25l") == 1, "hidden while the view is live"

    sink.close(healthy.history, ())

    text = written(console)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "healthy" in text[text.rindex("\x1b[?25h") :]


def test_a_view_that_cannot_be_drawn_leaves_the_terminal_as_it_was(make_console, written, healthy, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no view")

    monkeypatch.setattr(sink_file, "panel", fail)
    console = make_console(terminal=True)
    sink = Terminal(console=console)

    with pytest.raises(RuntimeError, match="no view"):
        sink.write(healthy.history)

    text = written(console)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_run_that_ends_before_its_first_step_leaves_the_word_to_its_error(make_console, written):
    console = make_console()

    Terminal(console=console).close(History(RunInfo(name="early", created="", layers=())), ())

    assert written(console) == ""


def test_a_finding_on_the_whole_run_says_so(make_console, written, make_finding):
    console = make_console(120)

    Terminal(console=console).report(
        make_finding("loss-plateau", layer=None, step=7, severity=Severity.INFO, code="GW507")
    )

    assert written(console).startswith("• step 7 info GW507 loss-plateau whole run: ")
