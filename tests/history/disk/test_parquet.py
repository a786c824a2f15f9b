"""A Parquet file holds exactly the kept values of a history, in documented columns."""

import json
import sys

import numpy as np
import pandas
import pyarrow
import pytest
from pyarrow import compute, parquet

from gradwatch import catalogue
from gradwatch.errors import GradwatchError
from gradwatch.history.disk.parquet import write_parquet
from gradwatch.history.synthetic.builder import Synthetic


@pytest.fixture
def history():
    """A run with values, missing values, NaN, infinities, hashes of 48 bits and sampled activations."""
    made = Synthetic(layers=3, activations=2, steps=40).no_gradient(1).non_finite(step=30, value=np.inf, lasting=True)
    history = made.history()
    history.append(
        41,  # step 40 is missing
        run={"loss": np.nan, "batch_hash": 2.0**48 - 1},
        param_SL=np.float32(np.pi) * np.ones((len(catalogue.PARAM_NAMES), 3), np.float32),
    )
    return history


@pytest.fixture
def path(history, tmp_path):
    write_parquet(history, tmp_path / "history.parquet")
    return tmp_path / "history.parquet"


def test_every_value_of_every_table_is_read_back_by_pandas(history, path):
    frame = pandas.read_parquet(path)

    rows = 0
    for table in (history.run, history.param, history.act):
        for statistic in table.statistics:
            steps_T, values_TL = table.series(statistic)
            part = frame[frame.statistic == statistic]
            layers = [None] if table is history.run else list(table.layers)
            np.testing.assert_array_equal(part.step, np.repeat(steps_T, len(layers)))
            np.testing.assert_array_equal(part.value, values_TL.astype(np.float64).ravel())
            assert part.layer.astype(object).where(part.layer.notna(), None).tolist() == layers * len(steps_T)
            rows += len(part)
    assert len(frame) == rows, "and there is no other row"


def test_a_filter_and_a_pivot_give_the_frame_of_the_statistic(history, path):
    frame = pandas.read_parquet(path, filters=[("statistic", "==", "grad.l2")])

    wide = frame.pivot(index="step", columns="layer", values="value")[list(history.param.layers)]

    np.testing.assert_array_equal(wide.to_numpy(), history.frame("grad.l2").to_numpy())
    np.testing.assert_array_equal(wide.index, history.steps("grad.l2"))


def test_the_columns_have_the_documented_types_and_only_layers_are_null(path):
    table = parquet.read_table(path)

    text = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
    types = {"step": pyarrow.int64(), "layer": text, "statistic": text, "value": pyarrow.float64()}
    assert dict(zip(table.schema.names, table.schema.types, strict=True)) == types
    assert {name for name in table.schema.names if table.schema.field(name).nullable} == {"layer"}
    assert [table[name].null_count for name in ("step", "statistic", "value")] == [0, 0, 0]
    of_run = compute.is_in(table["statistic"].cast("string"), pyarrow.array(catalogue.run_names(1)))
    assert table["layer"].null_count == compute.sum(of_run).as_py()


def test_missing_values_are_nan_and_infinities_are_infinite(history, path):
    frame = pandas.read_parquet(path).set_index(["statistic", "step"]).value

    assert np.isnan(frame["val_loss", 3])
    assert np.isnan(frame["loss", 41])
    assert np.isinf(frame["loss", 35])
    assert frame["batch_hash", 41] == 2**48 - 1


def test_the_metadata_describe_the_run_the_schema_and_the_units(history, path):
    metadata = {key.decode(): value.decode() for key, value in parquet.read_schema(path).metadata.items()}

    assert metadata["gradwatch.schema"] == "1"
    assert json.loads(metadata["gradwatch.run"]) == json.loads(json.dumps(history.info.to_json()))
    assert json.loads(metadata["gradwatch.units"])["step_ms"] == "ms"


def test_a_row_group_has_one_statistic_and_a_bounded_number_of_rows(history, tmp_path, monkeypatch):
    monkeypatch.setattr("gradwatch.history.disk.parquet.MAX_GROUP_ROWS", 50)
    path = tmp_path / "small.parquet"
    write_parquet(history, path)
    file = parquet.ParquetFile(path)

    groups = [file.read_row_group(i).to_pandas() for i in range(file.num_row_groups)]

    assert max(map(len, groups)) <= 50
    assert {group.statistic.nunique() for group in groups} == {1}
    whole = tmp_path / "whole.parquet"
    monkeypatch.undo()
    write_parquet(history, whole)
    assert parquet.read_table(path).to_pandas().equals(parquet.read_table(whole).to_pandas())


def test_a_run_without_steps_and_activations_is_a_file_without_rows(tmp_path):
    write_parquet(Synthetic(layers=2, steps=0).history(), tmp_path / "empty.parquet")

    assert parquet.read_table(tmp_path / "empty.parquet").num_rows == 0


def test_an_export_that_fails_leaves_the_old_file(history, path, monkeypatch):
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parquet.ParquetWriter, "write_table", full)
    with pytest.raises(GradwatchError, match=r"history\.parquet: no space left on device"):
        write_parquet(history, path)

    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["history.parquet"]


def test_without_pyarrow_the_error_says_how_to_install_it(history, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(GradwatchError, match=r"needs pyarrow, .*: pip install 'gradwatch\[parquet\]'"):
        write_parquet(history, tmp_path / "history.parquet")

    assert not [*tmp_path.iterdir()]
