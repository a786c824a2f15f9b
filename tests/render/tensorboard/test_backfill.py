"""The charts of a run that has ended, as the readers of TensorBoard show them, and what they take."""

import time

import numpy as np
import pytest
from tensorboard.backend.event_processing import plugin_event_accumulator
from tensorboard.compat.proto import event_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from gradwatch.render.tensorboard.backfill import MAX_POINTS, MIN_POINTS, backfill, points_per_chart
from gradwatch.render.tensorboard.charts import Block
from gradwatch.render.tensorboard.event_file import EventFile, our_files, read_events
from gradwatch.render.tensorboard.protobuf import Summaries


@pytest.fixture
def live(tmp_path):
    """Write a text and two points of a chart, as a live run does. Return the directory."""
    file, summaries = EventFile(tmp_path), Summaries()
    for step in (0, 50):
        file.write(summaries.scalars(step, {"loss": 1.0}, descriptions={}, at=1000.0 + step))
    text = summaries.text(50, "diagnosis", "healthy")
    text.wall_time = 1050.0
    file.write(text)
    file.close()
    return tmp_path


def _block(steps):
    return Block(np.array(steps), {"loss": np.linspace(1.0, 2.0, len(steps))})


def _steps(reader, tag="loss"):
    return [event.step for event in reader.Tensors(tag)]


def test_a_reader_that_has_read_the_thin_charts_shows_the_full_ones_in_order(live):
    reader = plugin_event_accumulator.EventAccumulator(str(live), tensor_size_guidance={"": 0})
    assert _steps(reader.Reload()) == [0, 50]

    backfill(live, [_block(range(60))], descriptions={"loss": "Training loss."})

    assert _steps(reader.Reload()) == list(range(60))
    assert _steps(reader, "diagnosis") == [50]
    fresh = plugin_event_accumulator.EventAccumulator(str(live), tensor_size_guidance={"": 0}).Reload()
    assert _steps(fresh) == list(range(60))
    assert fresh.SummaryMetadata("loss").summary_description == "Training loss."


def test_points_have_the_times_at_which_their_steps_were_made(live):
    backfill(live, [_block([0, 25, 50])], descriptions={})

    reader = plugin_event_accumulator.EventAccumulator(str(live)).Reload()

    assert [event.wall_time for event in reader.Tensors("loss")] == [1000.0, 1025.0, 1050.0]


def test_files_of_other_writers_are_left_alone(live):
    other = EventFileWriter(str(live))
    other.add_event(event_pb2.Event(step=7))
    other.close()
    (theirs,) = set(live.iterdir()) - set(our_files(live))
    content = theirs.read_bytes()

    backfill(live, [_block(range(9))], descriptions={})

    assert theirs.read_bytes() == content


def test_a_second_backfill_leaves_one_empty_file(live):
    for _ in range(3):
        backfill(live, [_block(range(9))], descriptions={})

    assert [path.stat().st_size > 0 for path in our_files(live)] == [False, True]


def test_an_event_that_a_killed_run_left_incomplete_is_dropped(live):
    (path,) = our_files(live)
    whole = len(list(read_events(path)))
    path.write_bytes(path.read_bytes()[:-3])

    assert len(list(read_events(path))) == whole - 1


def test_charts_that_cannot_be_written_leave_the_live_file(live):
    (path,) = our_files(live)
    content = path.read_bytes()

    def failing():
        yield _block(range(9))
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        backfill(live, failing(), descriptions={})

    assert [file.read_bytes() for file in live.iterdir()] == [content]


def test_layers_of_a_large_model_share_their_points():
    assert points_per_chart(10) == MAX_POINTS
    assert points_per_chart(1000) == 200
    assert points_per_chart(10**6) == MIN_POINTS


def test_a_large_run_takes_little_time(live):
    tags = [f"per_layer_grad_norm/encoder.blocks.{i}.attention.weight" for i in range(200)]
    points = points_per_chart(200)
    block = Block(np.arange(points) * 100, dict.fromkeys(tags, np.ones(points)))

    began = time.perf_counter()
    backfill(live, [block], descriptions={})

    assert time.perf_counter() - began < 5, "about 0.3 s"
