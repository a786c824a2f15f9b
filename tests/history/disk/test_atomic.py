"""Files are written whole or not at all, and a full disk says what to do."""

import errno
import os

import pytest

from gradwatch.errors import RunError
from gradwatch.history.disk import atomic


def test_replace_leaves_the_old_file_when_the_new_one_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "x.bin"
    atomic.replace(path, b"old")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_bytes", full)
    with pytest.raises(RunError, match=r"x\.bin: no space left on device\. 3 more bytes were needed\. .*make room"):
        atomic.replace(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.bin"], "a leftover"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_append_leaves_no_part_of_a_record_when_the_disk_is_full(tmp_path, monkeypatch, code):
    path = tmp_path / "x.bin"
    file = atomic.open_at_end(path)
    atomic.append(file, b"first", path=path, size=0)
    real = os.write

    def nearly_full(descriptor, data):
        if len(data) < len(b"second"):
            raise OSError(code, os.strerror(code))
        return real(descriptor, data[:2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", nearly_full)
        with pytest.raises(RunError, match="6 more bytes were needed"):
            atomic.append(file, b"second", path=path, size=5)
    assert path.read_bytes() == b"first"
    atomic.append(file, b"third", path=path, size=5)
    os.close(file)
    assert path.read_bytes() == b"firstthird"


def test_other_failures_say_the_reason_without_talking_of_space(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written: not a directory") as caught:
        atomic.make_folder(tmp_path / "file" / "folder")
    assert "make room" not in str(caught.value)
