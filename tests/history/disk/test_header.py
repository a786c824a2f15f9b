"""run.json: what is there instead of a run is said in words."""

import json
import re

import pytest

from gradwatch.errors import RunError
from gradwatch.history.disk.header import FORMAT, NAME, Header
from gradwatch.history.store import History


@pytest.fixture
def header(run_info):
    return Header.of(History(run_info(), groups=2), "running")


def edit(directory, change):
    data = json.loads((directory / NAME).read_text())
    change(data)
    (directory / NAME).write_text(json.dumps(data))


def test_header_comes_back_equal(tmp_path, header):
    header.write(tmp_path)
    assert Header.read(tmp_path) == header


def test_a_missing_directory_suggests_a_near_one(tmp_path):
    (tmp_path / "digits-1").mkdir()
    with pytest.raises(RunError, match=r"there is no such run directory; did you mean 'digits-1'\?"):
        Header.read(tmp_path / "digit-1")


def test_a_directory_of_runs_names_its_last_run(tmp_path, header):
    for name in ("run-1", "run-2"):
        (tmp_path / name).mkdir()
        header.write(tmp_path / name)
    with pytest.raises(RunError, match=r"not a run directory: it has no run\.json; it contains runs.*run-2"):
        Header.read(tmp_path)


def test_a_file_is_not_a_run_directory(tmp_path):
    (tmp_path / "x").write_text("")
    with pytest.raises(RunError, match="x is not a run directory"):
        Header.read(tmp_path / "x")


def test_a_newer_format_asks_for_a_newer_gradwatch(tmp_path, header):
    header.write(tmp_path)
    edit(tmp_path, lambda data: data.update(format=FORMAT + 1))
    with pytest.raises(RunError, match=rf"format {FORMAT + 1} is newer than this gradwatch reads \({FORMAT}\): update"):
        Header.read(tmp_path)


def damaged_layers(data):
    data["records"]["steps"]["fields"]["param"]["layers"] = 7


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data.pop("info"), "'info' is missing"),
        (lambda data: data.pop("format"), "'format' is missing"),
        (lambda data: data.update(status="asleep"), "status is 'asleep', expected one of running, finished"),
        (damaged_layers, "records of 'param' have 7 layers, the run has 3"),
        (lambda data: data["records"]["samples"].update(segment_length=0), "segment_length is 0"),
        (lambda data: data["records"]["samples"]["fields"]["act"].update(dtype="float17"), "float17"),
        (lambda data: data["records"].update(steps=[]), ""),
        (lambda data: data["info"].update(colour="red"), "colour"),
    ],
)
def test_a_damaged_header_says_what_is_wrong(tmp_path, header, change, reason):
    header.write(tmp_path)
    edit(tmp_path, change)
    with pytest.raises(RunError, match=r"run\.json is damaged, so the run cannot be read: .*" + re.escape(reason)):
        Header.read(tmp_path)


@pytest.mark.parametrize("text", ["", '{"format": 1', "[]", "\x00\x00", "3"])
def test_a_header_that_is_no_json_object_is_damaged(tmp_path, text):
    (tmp_path / NAME).write_text(text)
    with pytest.raises(RunError, match="is damaged"):
        Header.read(tmp_path)
