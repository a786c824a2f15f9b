"""Put the worst samples of a training that has ended, with their maps, into its report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradwatch.attribution.package import require_captum
from gradwatch.cli.output.console import print_message
from gradwatch.cli.output.report import write_run_report
from gradwatch.errors import raised
from gradwatch.history.store import History
from gradwatch.records import Diagnosis
from gradwatch.render.report.map_cards import MapCards


def add_worst_samples(run: Path, history: History, diagnoses: Sequence[Diagnosis], *, count: int) -> None:
    """Map the samples with the largest loss under the newest checkpoint, and write the report again.

    The training is complete, so a failure of any kind becomes a line of the report, which says how to make the maps.

    Args:
        run: The run directory.
        history: The run.
        diagnoses: Diagnoses of its findings.
        count: Number of samples.
    """
    try:
        require_captum()
        from gradwatch.attribution.targets import attribute_samples

        attribute_samples(run, worst=count).write_page(run)
    except (Exception, KeyboardInterrupt) as error:
        reason = "interrupted" if isinstance(error, KeyboardInterrupt) else raised(error)
        command = f"gradwatch attribute {run} --worst {count} --format html"
        print_message("note", f"report.html has no maps of the worst samples: {reason}; make them with: {command}")
        MapCards(f"No maps of the worst samples: {reason}; make them with: {command}", ()).write(run)
    write_run_report(None, run, history, diagnoses)
