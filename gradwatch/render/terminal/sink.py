"""Show a run in the terminal: a live view or lines while it trains, and a summary at the end."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Literal, final

from rich.console import Console

from gradwatch.history.store import History
from gradwatch.records import Diagnosis, Finding, Severity
from gradwatch.render import json_document
from gradwatch.render.common import format as units
from gradwatch.render.common.layers import Layer, matrices
from gradwatch.render.common.run_events import WITHDRAWN
from gradwatch.render.common.run_stats import newest, start_lines, throughput
from gradwatch.render.common.sparkline import glyphs
from gradwatch.render.common.style import sentence
from gradwatch.render.terminal.display import Notebook, PrintedLines
from gradwatch.render.terminal.live_view import panel
from gradwatch.render.terminal.summary import print_summary
from gradwatch.time_quota import TimeQuota

REDRAW_S = 0.25
"""Minimum seconds between two redraws."""
MAX_PER_KIND = 4
"""Maximum number of lines about a kind. A problem that comes and goes must not fill the screen."""
COST_FRAC = 0.01
"""Maximum share of the wall time for redraws. After a slow redraw, the next one waits longer."""


@final
class Terminal:
    """Shows a run in the terminal while it trains, and a summary at the end.

    Args:
        console: Console to write to, or None for standard output.
        every: Optimizer steps between two lines, if there is no live view; 0 for never.
        log_format: `rich` for the live view, `plain` for lines of text, `json` for lines of JSON. `auto` is the live
            view on a terminal and plain lines elsewhere.
        run_dir: Run directory to name in the summary, or None.
    """

    def __init__(
        self,
        *,
        console: Console | None = None,
        every: int = 50,
        log_format: Literal["auto", "rich", "plain", "json"] = "auto",
        run_dir: Path | None = None,
    ) -> None:
        self.console = console or Console()
        self.every = every
        self.run_dir = run_dir
        self.log_format = log_format
        if log_format == "auto":
            # a dumb terminal cannot move its cursor
            live = (self.console.is_terminal and not self.console.is_dumb_terminal) or self.console.is_jupyter
            self.log_format = "rich" if live else "plain"
        self._is_live = self.log_format == "rich"
        self._signs = glyphs(self.console)
        self._printed: dict[str, Finding] = {}  # by kind, the finding that its newest line is about
        self._over: set[str] = set()  # kinds whose newest line is a withdrawal
        self._lines: Counter[str] = Counter()
        self._layers: tuple[Layer, ...] = ()
        self._screen: PrintedLines | Notebook | None = None
        self._due_s = 0.0
        self._quota = TimeQuota(COST_FRAC)
        self._next_step: float = 0 if every else float("inf")  # with inf, no line is ever due
        self._val_step = self._newest = -1

    def open(self, history: History) -> None:
        """Print a description of the training; in JSON, the last line contains it."""
        if self.log_format != "json":
            for line in start_lines(history.info, self.run_dir):
                self._out(line)

    def write(self, history: History) -> None:
        """Redraw the view or print a line, if one is due."""
        step = history.run.last_step
        if step < self._newest:  # the run was rewound, and may find the same problems again
            self._printed.clear()
            self._over.clear()
            self._lines.clear()
            self._val_step = min(self._val_step, step - 1)
        self._newest = step
        if self._is_live:
            if time.monotonic() >= self._due_s:
                self._redraw(history)
        elif step >= self._next_step:
            self._print_step(history)
            self._next_step = history.step - history.step % self.every + self.every

    def report(self, finding: Finding) -> None:
        """Print a finding of a new kind, or one more severe than the last of its kind. JSON has all findings.

        If 30 layers have the same problem, one line is printed; the live view counts them, and the summary names them.
        """
        if self.log_format == "json":
            self._out(json_document.line("finding", finding.to_json()))
            return
        if self._is_silent(finding):
            return
        printed = self._printed.get(finding.kind)
        if printed and finding.severity <= printed.severity:
            return
        self._printed[finding.kind] = finding
        self._over.discard(finding.kind)
        self._lines[finding.kind] += 1
        if self._lines[finding.kind] > MAX_PER_KIND:
            return
        # above a live view, rich breaks long lines; otherwise the terminal does
        self.console.print(sentence(finding, self._signs), highlight=False, soft_wrap=self._screen is None)
        if self._lines[finding.kind] == MAX_PER_KIND:
            self.console.print(f"  more reports of {finding.kind}: see the summary", style="dim")

    def withdraw(self, finding: Finding) -> None:
        """Print that a problem is over, unless its newest line is about another layer or a withdrawal."""
        if self.log_format == "json":
            self._out(json_document.line("withdrawn", finding.to_json()))
            return
        printed = self._printed.get(finding.kind)  # None for a finding from before a resume
        if self._is_silent(finding) or finding.kind in self._over or (printed and printed.layer != finding.layer):
            return
        self._printed.pop(finding.kind, None)  # if the problem returns, it is printed again
        self._over.add(finding.kind)
        if self._lines[finding.kind] <= MAX_PER_KIND:
            self.console.print(f"  {WITHDRAWN} {finding.life}", style="dim", soft_wrap=self._screen is None)

    def close(self, history: History, diagnoses: tuple[Diagnosis, ...]) -> None:
        """Remove the live view and print the summary. In JSON, print the whole diagnosis in one line."""
        self._stop()
        if self.log_format == "json":
            self._out(json_document.line("end", json_document.document(history, diagnoses, run=self.run_dir)))
        elif history.step >= 0:  # without a step, an error follows and the run is deleted
            self.console.print()
            print_summary(self.console, history, diagnoses, run_dir=self.run_dir)

    def _is_silent(self, finding: Finding) -> bool:
        # a note is not a problem, and the live view counts and names it
        return self._is_live and finding.severity <= Severity.INFO

    def _redraw(self, history: History) -> None:
        began = time.monotonic()
        if self._screen is None:
            self._layers = matrices(history.info.layers)
            self._screen = Notebook() if self.console.is_jupyter else PrintedLines(self.console)
        try:
            self._screen.show(panel(history, self._layers, width=self.console.width, signs=self._signs))
        except BaseException:  # also a KeyboardInterrupt
            self._stop()  # restore the cursor before the error is shown
            raise
        now = time.monotonic()
        self._quota.charge(now - began)
        self._due_s = now + max(REDRAW_S, self._quota.pause_s)

    def _stop(self) -> None:
        if self._screen:
            self._screen.stop()
            self._screen = None

    def _print_step(self, history: History) -> None:
        if self.log_format == "json":
            values = {name: newest(history, name) for name in history.run.statistics}
            self._out(json_document.line("step", {"step": history.step, **values}))
        else:
            self._out(self._plain(history))

    def _plain(self, history: History) -> str:
        total = history.info.total_steps
        samples_per_s, steps_per_s = throughput(history)
        parts = [f"step {history.step:,}" + (f"/{total:,}" if total else "")]
        for label, statistic in (("loss", "loss"), ("grad norm", "grad_norm.before_clip"), ("lr", "lr.0")):
            if statistic in history.run.statistics:
                parts.append(f"{label} {units.value(newest(history, statistic))}")
        (loss_step, val_loss), (step, accuracy) = (
            history.latest_validation("val_loss"),
            history.latest_validation("val_accuracy"),
        )
        # each validation is printed once, with the first line after it
        if max(loss_step, step) > self._val_step:
            self._val_step = max(loss_step, step)
            # `-` stands for a missing accuracy
            parts.append(f"validation {units.number(val_loss)} {units.percent(accuracy)}".removesuffix(" -"))
        if samples_per_s == samples_per_s:
            parts.append(f"{samples_per_s:,.0f} samples/s")
        if total and steps_per_s > 0:
            parts.append(f"{units.duration(max(total - history.step - 1, 0) / steps_per_s)} left")
        return "  ".join(parts)

    def _out(self, line: str) -> None:
        # not through rich, which takes 10x as long
        self.console.file.write(line + "\n")
        self.console.file.flush()
