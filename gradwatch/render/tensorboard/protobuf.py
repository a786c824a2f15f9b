"""Build TensorBoard's protocol buffers: scalars, histograms, images, text, dashboard, hyperparameters."""

# K = buckets of a histogram

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as layout_metadata
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2, summary_v2
from tensorboard.plugins.hparams import metadata as hparams_metadata
from tensorboard.plugins.image import metadata as image_metadata
from tensorboard.plugins.scalar import metadata as scalar_metadata
from tensorboard.plugins.text import metadata as text_metadata
from tensorboard.util.tensor_util import make_tensor_proto


class Margin(NamedTuple):
    """A chart of one tag, with a shaded band between two other tags."""

    value: str
    lower: str
    upper: str


Layout = Mapping[str, Mapping[str, Sequence[str] | Margin]]
"""Charts of the custom-scalars dashboard, by category and title. Each has the patterns of its tags, or a margin."""

SUCCESS, FAILURE = api_pb2.STATUS_SUCCESS, api_pb2.STATUS_FAILURE


@final
class Summaries:
    """Builds events, and adds the description of a tag to its first value only, as TensorBoard expects."""

    def __init__(self) -> None:
        self._described: set[str] = set()

    def scalars(
        self, step: int, points: Mapping[str, float], *, descriptions: Mapping[str, str], at: float | None = None
    ) -> event_pb2.Event:
        """Return one event with many scalars.

        Args:
            step: Step of the scalars.
            points: Values by tag.
            descriptions: Descriptions of the charts, by tag or by the part of the tag before the slash.
            at: Time of the step in seconds since 1970, or None for now.
        """
        event = event_pb2.Event(wall_time=time.time() if at is None else at, step=step)
        for tag, value in points.items():
            added = event.summary.value.add(tag=tag, simple_value=value)
            if self._is_new(tag):
                text = descriptions.get(tag) or descriptions.get(tag.split("/")[0], "")
                added.metadata.CopyFrom(_of_scalar(text))
        return event

    def histogram(self, event: event_pb2.Event, tag: str, buckets_K3: NDArray[np.float64], description: str) -> None:
        """Add a histogram to an event.

        Args:
            event: Event to change.
            tag: Group and name in TensorBoard.
            buckets_K3: Left edge, right edge and count of each bucket.
            description: Description of the chart.
        """
        added = event.summary.value.add(tag=tag, tensor=make_tensor_proto(buckets_K3, dtype=np.float64))
        if self._is_new(tag):
            added.metadata.CopyFrom(_of_histogram(description))

    def picture(self, step: int, tag: str, png: bytes, size: tuple[int, int], description: str) -> event_pb2.Event:
        """Return an event with one picture.

        Args:
            step: Step of the picture.
            tag: Group and name in TensorBoard.
            png: Bytes of the PNG.
            size: Width and height in pixels.
            description: Description of the picture.
        """
        # the format of the image plugin: width, height and the PNG, all as strings
        strings = [str(size[0]).encode(), str(size[1]).encode(), png]
        metadata = image_metadata.create_summary_metadata("", description) if self._is_new(tag) else None
        return _event(step, tag, make_tensor_proto(strings, dtype=np.object_), metadata)

    def text(self, step: int, tag: str, markdown: str) -> event_pb2.Event:
        """Return an event with a Markdown text."""
        metadata = text_metadata.create_summary_metadata("", "") if self._is_new(tag) else None
        # np.object_ makes a tensor of strings
        return _event(step, tag, make_tensor_proto(markdown, dtype=np.object_), metadata)

    def _is_new(self, tag: str) -> bool:
        if tag in self._described:
            return False
        self._described.add(tag)
        return True


def dashboard(layout: Layout, *, step: int) -> event_pb2.Event:
    """Return an event that lays out the custom-scalars dashboard."""
    proto = layout_pb2.Layout()
    for title, charts in layout.items():
        category = proto.category.add(title=title)
        for name, tags in charts.items():
            if isinstance(tags, Margin):
                band = layout_pb2.MarginChartContent.Series(value=tags.value, lower=tags.lower, upper=tags.upper)
                category.chart.add(title=name, margin=layout_pb2.MarginChartContent(series=[band]))
            else:
                category.chart.add(title=name, multiline=layout_pb2.MultilineChartContent(tag=tags))
    tensor = make_tensor_proto(proto.SerializeToString(), dtype=np.object_)
    return _event(step, layout_metadata.CONFIG_SUMMARY_TAG, tensor, layout_metadata.create_summary_metadata())


def hparams_start(hparams: Mapping[str, Any], metrics: Mapping[str, str], *, step: int) -> list[event_pb2.Event]:
    """Return the events that show a run in TensorBoard's HPARAMS tab: the columns, and the values of this run.

    Args:
        hparams: Values by dotted key. A value other than a number, bool or text becomes text.
        metrics: Tags of scalars and the names of their columns. A column shows the last value of its scalar.
        step: Step of the events.
    """
    # the protocol buffer holds only numbers, bools and strings
    plain = {key: value if isinstance(value, int | float | str) else str(value) for key, value in hparams.items()}
    columns = [summary_v2.HParam(key) for key in plain]
    shown = [summary_v2.Metric(tag, display_name=name) for tag, name in metrics.items()]
    # the default id is a hash of the settings, so that runs with equal settings would share a row
    summaries = (summary_v2.hparams_config_pb(columns, shown), summary_v2.hparams_pb(plain, trial_id=""))
    return [event_pb2.Event(wall_time=time.time(), step=step, summary=summary) for summary in summaries]


def hparams_end(*, step: int, status: int) -> event_pb2.Event:
    """Return the event with the final status of a run."""
    end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=time.time())
    metadata = hparams_metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=end))
    return _event(step, hparams_metadata.SESSION_END_INFO_TAG, hparams_metadata.NULL_TENSOR, metadata)


def _event(
    step: int, tag: str, tensor: tensor_pb2.TensorProto, metadata: summary_pb2.SummaryMetadata | None
) -> event_pb2.Event:
    event = event_pb2.Event(wall_time=time.time(), step=step)
    event.summary.value.add(tag=tag, tensor=tensor, metadata=metadata)
    return event


def _of_scalar(description: str) -> summary_pb2.SummaryMetadata:
    metadata = scalar_metadata.create_summary_metadata("", description)
    # TensorBoard keeps a value with a data class as it is, and migrates all others
    metadata.data_class = summary_pb2.DATA_CLASS_SCALAR
    return metadata


def _of_histogram(description: str) -> summary_pb2.SummaryMetadata:
    metadata = histogram_metadata.create_summary_metadata("", description)
    metadata.data_class = summary_pb2.DATA_CLASS_TENSOR
    return metadata
