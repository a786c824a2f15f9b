"""Write the first lines about a run: health, loss and validation, throughput and overhead of monitoring."""

from __future__ import annotations

import numpy as np
from rich.text import Text

from gradwatch.history.store import History
from gradwatch.render.common import format as units
from gradwatch.render.common.run_stats import RunStats, health, run_stats, watching, worst_severity
from gradwatch.render.common.series import broken
from gradwatch.render.common.sparkline import Glyphs, sparkline
from gradwatch.render.common.style import OK, SEVERITY, mark

TREND = 16  # columns of the loss trend


def headline(history: History, signs: Glyphs) -> list[Text]:
    """Return three lines: health with name and length, loss with validation, throughput with overhead.

    A run without a step gets only the first. A second line says how a run ended before its planned end.
    """
    ended = [Text(f"  {sentence}", "bold")] if (sentence := early_ending(history)) else []
    if history.step < 0:
        return [Text.assemble((health(history), "bold"), f"  {history.info.name}"), *ended]
    run = run_stats(history)
    return [_health(history, run, signs), *ended, _learning(history, run, signs), _cost(run)]


def early_ending(history: History) -> str:
    """Return how a run ended that did not reach its planned end; an empty string for other runs."""
    ending = history.ending
    return "" if ending is None or ending.kind in ("finished", "running") else ending.sentence(history.step + 1)


def _health(history: History, run: RunStats, signs: Glyphs) -> Text:
    found, total = worst_severity(history), history.info.total_steps
    style = OK if found is None else SEVERITY[found]
    text = Text.assemble(mark(found, signs), " ", (health(history), style))
    text.append(f"  {history.info.name}", "bold").append(f"  {units.plural(run.steps, 'step')}")
    text.append(f" of {total:,}" if total and total != run.steps else "")
    return text.append(f" in {units.duration(run.seconds)}" if np.isfinite(run.seconds) else "")


def _learning(history: History, run: RunStats, signs: Glyphs) -> Text:
    loss_T = history["loss"]
    text = Text(f"  loss {units.value(float(loss_T[0]))} to {units.value(run.loss)} ")
    text.append(sparkline(broken(loss_T), width=TREND, signs=signs))
    # a run without validation has nan here
    if np.isfinite(run.val_loss):
        text.append(f"  validation loss {units.number(run.val_loss)}")
    if np.isfinite(run.val_accuracy):
        text.append(f"  accuracy {units.percent(run.val_accuracy)}")
    return text


def _cost(run: RunStats) -> Text:
    costs = [f"{run.samples_per_s:,.0f} samples/s"] if np.isfinite(run.samples_per_s) else []
    if np.isfinite(run.watch_frac):
        costs.append(f"monitoring took {watching(run)}")
    return Text("  " + "  ".join(costs))
