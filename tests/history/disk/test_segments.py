"""Segment files: bounded, healed, and read as far as they can be."""

import numpy as np
import pytest
from reference import newest_row

from gradwatch.history.disk import segments
from gradwatch.history.disk.header import shared_tables
from gradwatch.history.disk.segments import Layout, SegmentWriter
from gradwatch.history.store import History

pytestmark = pytest.mark.usefixtures("short_segments")


@pytest.fixture
def steps_tables(run_info):
    def make(history):
        return shared_tables(history)["steps"]

    return make


def write(folder, history, tables, append, steps, *, every=1):
    writer = SegmentWriter(folder, tables)
    for step in steps:
        append(history, step)
        if (step + 1) % every == 0:
            writer.append()
    writer.append()
    writer.close()


def read_steps(folder, tables):
    parts, problems = segments.read(folder, Layout.of(tables))
    return np.concatenate([p["step"] for p in parts] or [np.empty(0)]), problems


@pytest.mark.parametrize("steps", [1, 63, 64, 65, 1500])
def test_files_hold_what_the_history_keeps(tmp_path, run_info, append, steps_tables, steps):
    history = History(run_info())
    tables = steps_tables(history)
    write(tmp_path, history, tables, append, range(steps))

    # rows of the last rollover may still be there, as long as they are kept when read
    found_T, problems = read_steps(tmp_path, tables)
    assert problems == []
    assert np.isin(history.run.kept_steps(), found_T).all(), "rows are missing on disk"
    at_rollover = (steps - 1) // 64 * 64
    rollover_T = np.arange(at_rollover + 1)
    kept_T = rollover_T[history._is_kept(rollover_T)]
    assert np.array_equal(found_T[found_T < at_rollover], kept_T[kept_T < at_rollover])


def test_tables_of_different_width_are_thinned_together_on_disk(tmp_path, run_info, append, steps_tables):
    history = History(run_info(layers=300))  # wide rows slide, and so are thinned in memory, at other steps
    tables = steps_tables(history)
    write(tmp_path, history, tables, append, range(1500), every=50)

    parts, problems = segments.read(tmp_path, Layout.of(tables))
    rows = {int(record["step"]): record for part in parts for record in part}
    steps_T, values_TSL = tables["param"].rows()
    assert problems == []
    np.testing.assert_array_equal([rows[step]["param"] for step in steps_T.tolist()], values_TSL)
    np.testing.assert_array_equal([rows[step]["run"] for step in steps_T.tolist()], tables["run"].rows()[1])


def test_the_number_of_files_and_bytes_is_bounded(tmp_path, run_info, append, steps_tables):
    history = History(run_info())
    tables = steps_tables(history)
    write(tmp_path, history, tables, append, range(6000))
    record = Layout.of(tables).record.itemsize
    size = sum(p.stat().st_size for p in tmp_path.iterdir())

    assert size <= (len(history.run) + 64) * record
    assert size < 6000 * record / 5, "hardly anything was thinned"


def test_files_are_named_by_their_first_step(tmp_path, run_info, append, steps_tables):
    history = History(run_info())
    write(tmp_path, history, steps_tables(history), append, range(130))
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{step:012d}.bin" for step in (0, 64, 128)]


def test_a_record_is_the_step_then_the_values_of_each_table(tmp_path, run_info, append, steps_tables):
    history = History(run_info())
    write(tmp_path, history, steps_tables(history), append, [7])
    data = (tmp_path / f"{0:012d}.bin").read_bytes()
    run_bytes = len(history.run.statistics) * 8

    assert int.from_bytes(data[:8], "little") == 7
    assert np.array_equal(np.frombuffer(data[8 : 8 + run_bytes], "<f8"), newest_row(history.run)[:, 0], equal_nan=True)
    assert np.array_equal(np.frombuffer(data[8 + run_bytes :], "<f4"), newest_row(history.param).ravel())


@pytest.mark.parametrize("cut", [1, 8, 100])
def test_a_torn_last_record_is_left_out_without_a_word(tmp_path, run_info, append, steps_tables, cut):
    history = History(run_info())
    tables = steps_tables(history)
    write(tmp_path, history, tables, append, range(70))
    newest = tmp_path / f"{64:012d}.bin"
    newest.write_bytes(newest.read_bytes()[:-cut])

    found_T, problems = read_steps(tmp_path, tables)
    assert (found_T[-1], problems) == (68, [])


def test_an_older_file_that_is_cut_short_is_damage(tmp_path, run_info, append, steps_tables):
    history = History(run_info())
    tables = steps_tables(history)
    write(tmp_path, history, tables, append, range(70))
    older = tmp_path / f"{0:012d}.bin"
    older.write_bytes(older.read_bytes()[:-5])

    found_T, problems = read_steps(tmp_path, tables)
    assert len(found_T) == 69
    assert "000000000000.bin is cut short" in problems[0]


def test_damaged_records_are_counted_and_the_rest_is_read(tmp_path, run_info, append, steps_tables):
    history = History(run_info())
    tables = steps_tables(history)
    write(tmp_path, history, tables, append, range(40))
    path, record = tmp_path / f"{0:012d}.bin", Layout.of(tables).record.itemsize
    data = bytearray(path.read_bytes())
    data[10 * record : 12 * record] = bytes(2 * record)  # two records of zeros, as a power cut leaves them
    path.write_bytes(data)

    found_T, problems = read_steps(tmp_path, tables)
    assert found_T.tolist() == [*range(10), *range(12, 40)]
    assert "2 of 40 records are damaged" in problems[0]


def test_a_writer_makes_the_files_hold_what_the_history_keeps(tmp_path, run_info, append, steps_tables):
    history = History(run_info())
    tables = steps_tables(history)
    write(tmp_path, history, tables, append, range(300))
    expected = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    files = sorted(tmp_path.iterdir())
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-7])
    (tmp_path / f"{640:012d}.bin").write_bytes(b"rows of a life that was given up")
    (tmp_path / "000000000064.bin.tmp").write_bytes(b"left by a kill")

    SegmentWriter(tmp_path, tables).close()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == expected


def test_statistics_that_an_older_version_did_not_record_are_nan(tmp_path, run_info, append, steps_tables):
    history = History(run_info())
    tables = steps_tables(history)
    write(tmp_path, history, tables, append, range(5))
    layout = Layout.of(tables)
    old = layout.fields["param"]
    renamed = tuple("grad.l9" if name == "grad.mean" else name for name in old.statistics)
    older = Layout(
        segment_length=layout.segment_length,
        fields=layout.fields | {"param": segments.Field(statistics=renamed, layers=old.layers, dtype=old.dtype)},
    )
    parts, _ = segments.read(tmp_path, older)
    fresh = History(run_info())
    segments.fill(fresh.param, parts, name="param", layout=older)

    assert np.isnan(fresh.param.window("grad.mean")).all()
    assert np.array_equal(fresh.param.window("grad.std"), history.param.window("grad.std"))


def test_a_full_disk_loses_nothing_that_was_written(tmp_path, run_info, append, steps_tables, monkeypatch):
    history = History(run_info())
    tables = steps_tables(history)
    writer = SegmentWriter(tmp_path, tables)
    for step in range(10):
        append(history, step)
        writer.append()

    def full(*_):
        raise OSError(28, "No space left on device")

    append(history, 10)
    with monkeypatch.context() as patch:
        patch.setattr("os.write", full)
        with pytest.raises(ValueError, match="no space left on device"):
            writer.append()
    append(history, 11)
    writer.append()
    writer.close()
    assert read_steps(tmp_path, tables)[0].tolist() == [*range(12)], "what did not fit is written when there is room"
