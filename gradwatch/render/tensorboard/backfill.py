"""Replace the sparse charts of a live run with charts from its whole history, when the run ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tensorboard.compat.proto import event_pb2

from gradwatch.render.tensorboard.charts import Block, points_of
from gradwatch.render.tensorboard.event_file import our_files, read_events, replace_files
from gradwatch.render.tensorboard.protobuf import Summaries

MAX_POINTS, MIN_POINTS = 1000, 20
"""Points of a chart. TensorBoard itself shows 1,000 of each chart, chosen at random."""
MAX_LAYER_POINTS = 200_000
"""Points of all charts of layers together: 9 MB and 0.3 s."""


def points_per_chart(num_charts: int) -> int:
    """Return the number of points per chart of a layer, given the number of charts."""
    return max(MIN_POINTS, min(MAX_POINTS, MAX_LAYER_POINTS // max(num_charts, 1)))


def backfill(directory: Path, blocks: Iterable[Block], *, descriptions: Mapping[str, str]) -> None:
    """Replace all scalars of a run in its event files. Histograms, pictures and texts stay.

    Args:
        directory: Directory of the event files, none of which is open for writing.
        blocks: The charts. Each chart is in one block.
        descriptions: Descriptions of the charts, as for `Summaries.scalars`.

    Raises:
        OSError: The event files cannot be read or written. They are then left as they are.
    """
    old = our_files(directory)
    replace_files(directory, old, _events(old, blocks, descriptions))


def _events(old: Sequence[Path], blocks: Iterable[Block], descriptions: Mapping[str, str]) -> Iterator[event_pb2.Event]:
    written: dict[int, float] = {}
    for path in old:
        for event in read_events(path):
            if event.HasField("summary"):
                written[event.step] = event.wall_time
            # restarts stay: they withdraw the histograms of steps that the run repeated
            if not (event.file_version or _is_scalars(event)):
                yield event
    steps = sorted(written)
    # a finding is written at its onset, after later steps
    clock = np.minimum.accumulate([written[step] for step in reversed(steps)])[::-1]
    summaries = Summaries()
    for block in blocks:
        times = np.interp(block.steps_P, steps, clock).tolist()
        for (step, points), at in zip(points_of(block), times, strict=True):
            if points:
                yield summaries.scalars(step, points, descriptions=descriptions, at=at)


def _is_scalars(event: event_pb2.Event) -> bool:
    # an event of this package has scalars only, or none
    return bool(event.summary.value) and event.summary.value[0].HasField("simple_value")
