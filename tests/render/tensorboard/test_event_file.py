"""TensorBoard's event files, read back by TensorBoard's own reader."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto import event_pb2
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

from gradwatch.render.tensorboard.event_file import EventFile, record


def _read(directory):
    (path,) = directory.iterdir()
    return list(LegacyEventFileLoader(str(path)).Load())


@settings(max_examples=60)
@given(st.binary(max_size=4000))
def test_records_have_the_checksums_that_tensorboard_computes(data):
    written = record(data)

    assert written[:8] == len(data).to_bytes(8, "little")
    assert written[8:12] == masked_crc32c(written[:8]).to_bytes(4, "little")
    assert written[12:-4] == data
    assert written[-4:] == masked_crc32c(data).to_bytes(4, "little")


def test_events_are_with_the_operating_system_as_soon_as_they_are_written(tmp_path):
    file = EventFile(tmp_path / "run")
    file.write(event_pb2.Event(wall_time=1.0, step=7))

    events = _read(tmp_path / "run")  # not closed: a killed process leaves what it wrote

    file.close()
    assert [(event.file_version, event.step) for event in events] == [("brain.Event:2", 0), ("", 0), ("", 7)]


def test_a_resumed_run_tells_the_reader_what_to_forget(tmp_path):
    EventFile(tmp_path, purge_step=40).close()

    start = _read(tmp_path)[1]

    assert start.step == 40
    assert start.session_log.status == event_pb2.SessionLog.START


def test_later_files_sort_after_earlier_ones(tmp_path):
    for _ in range(5):
        EventFile(tmp_path).close()

    by_name = sorted(tmp_path.iterdir())
    by_time = sorted(by_name, key=lambda path: path.stat().st_mtime_ns)
    assert len(by_name) == 5
    assert by_name == by_time


def test_a_directory_that_cannot_be_made_is_an_os_error(tmp_path):
    (tmp_path / "file").write_text("in the way")

    with pytest.raises(OSError, match="file"):
        EventFile(tmp_path / "file" / "run")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
def test_a_full_disk_is_an_os_error():
    file = EventFile.__new__(EventFile)
    file._file = Path("/dev/full").open("wb")  # noqa: SIM115 - closed below

    with pytest.raises(OSError, match="No space left"):
        file.write(event_pb2.Event(wall_time=1.0, step=1))
    with pytest.raises(OSError, match="No space left"):
        file.close()
