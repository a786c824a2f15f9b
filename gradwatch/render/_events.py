"""TensorBoard's event files: records of protocol buffers, each with its checksum, appended by one writer.

The package `tensorboard` writes them too, but with a checksum in pure Python (80 ns a byte: 1.6 ms for the 13 kB of
100 layers) in a thread that then holds the interpreter while the training wants it. This one takes a twentieth.
"""

# N = bytes, B = blocks

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import final

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto import event_pb2

POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), reflected: RFC 3720, appendix B.4
MASK_DELTA = 0xA282EAD8  # TFRecord: the checksum is rotated by 15 bits and offset
BLOCK = 1024
FILE_VERSION = "brain.Event:2"


@final
class EventFile:
    """Appends events to a new file in a directory. What `write` returned from is with the operating system.

    Args:
        directory: Made where it is missing.
        purge_step: First step of a resumed run: TensorBoard forgets what earlier files hold from there on.

    Raises:
        OSError: Where the directory or the file cannot be written, here and in every method.
    """

    def __init__(self, directory: Path, *, purge_step: int | None = None) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        now = time.time_ns()
        # readers take the files of a directory in the order of their names; the time must come first, in full
        name = f"events.out.tfevents.{now // 10**9:010d}.{now % 10**9:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (directory / name).open("wb")
        self.write(event_pb2.Event(wall_time=time.time(), file_version=FILE_VERSION))
        self.purge(purge_step or 0)  # of a new run too: what TensorBoard serves counts only the second as a restart

    def purge(self, step: int) -> None:
        """Have TensorBoard forget what was written of a step and all later ones, as at a restart there."""
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self.write(event_pb2.Event(wall_time=time.time(), step=step, session_log=start))

    def write(self, event: event_pb2.Event) -> None:
        """Append one event."""
        with self._named():
            self._file.write(record(event.SerializeToString()))
            self._file.flush()

    def close(self) -> None:
        """Let go of the file."""
        with self._named():
            self._file.close()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Put the name of the file into an error of the disk, which has none."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from error


def record(data: bytes) -> bytes:
    """Return data as a TFRecord: length, its checksum, the data, its checksum, all little-endian."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", _masked(length)), data, struct.pack("<I", _masked(data))))


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of at least four bytes.

    A checksum is linear: that of a block is the exclusive or of what each byte contributes at its place, looked up in
    one table for all bytes at once.
    """
    assert len(data) >= 4, "a record is longer: every event has its wall time"
    bytes_N = np.frombuffer(data, np.uint8).copy()
    bytes_N[:4] ^= 0xFF  # the register starts with all ones
    table, carry = _tables()
    head = len(bytes_N) % BLOCK
    places = np.arange(BLOCK - 1, -1, -1, dtype=np.int32) * 256
    state = int(np.bitwise_xor.reduce(table[places[BLOCK - head :] + bytes_N[:head]])) if head else 0
    blocks_BN = bytes_N[head:].reshape(-1, BLOCK)
    for block in np.bitwise_xor.reduce(table[places + blocks_BN], axis=1).tolist():
        shifted = carry[0][state & 255] ^ carry[1][state >> 8 & 255]
        state = shifted ^ carry[2][state >> 16 & 255] ^ carry[3][state >> 24] ^ block
    return state ^ 0xFFFFFFFF


def _masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF


@cache
def _tables() -> tuple[NDArray[np.uint32], tuple[list[int], ...]]:
    """Return what a byte contributes with so many bytes behind it, flat, and the same for a register over a block."""
    byte_256 = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        byte_256 = np.where(byte_256 & 1, byte_256 >> 1 ^ POLYNOMIAL, byte_256 >> 1).astype(np.uint32)
    rows = [byte_256]
    for _ in range(BLOCK - 1):
        rows.append(rows[-1] >> 8 ^ byte_256[rows[-1] & 255])
    carry = tuple(rows[BLOCK - 1 - i].tolist() for i in range(4))
    return np.concatenate(rows), carry
