"""`gradwatch export`: write the history of a run to a Parquet file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from gradwatch.cli.options import RunArgument, output_option, run_or_newest
from gradwatch.cli.output.console import write


def command(
    run: RunArgument = None,
    target: Annotated[Path | None, output_option("File to write; by default RUN/history.parquet.")] = None,
) -> None:
    """Write all recorded statistics of a run to a Parquet file: a row per step, layer and statistic.

    Needs pyarrow: `pip install 'gradwatch[parquet]'`.

    Exit codes: 0 written, 2 no such run, or the file cannot be written.
    """
    from gradwatch.errors import RunError
    from gradwatch.history.disk.parquet import NAME, write_parquet
    from gradwatch.history.disk.writer import read

    run = run_or_newest(run, command="export")
    path = target or run / NAME
    try:
        write_parquet(read(run), path)
    except RunError as error:
        raise RunError(f"{error}; write it elsewhere with --output FILE") from error
    write(f"{path}\n")
