"""`gradwatch export`: a run as a Parquet file."""

import sys

import pandas


def test_the_file_lies_in_the_run_directory_and_its_path_is_printed(gradwatch, recorded):
    run = recorded()

    result = gradwatch("export", run)

    assert (result.code, result.out) == (0, f"{run}/history.parquet\n")
    losses = pandas.read_parquet(run / "history.parquet", filters=[("statistic", "==", "loss")])
    assert losses.value.tolist() == [1.0 - 0.1 * step for step in range(5)]


def test_another_file_can_be_named(gradwatch, recorded, tmp_path):
    run = recorded()

    result = gradwatch("export", run, "--output", tmp_path / "mine.parquet")

    assert result.code == 0
    assert (tmp_path / "mine.parquet").is_file()
    assert not (run / "history.parquet").exists()


def test_a_run_that_is_not_there_a_folder_that_is_not_there_and_a_missing_pyarrow_are_code_2(
    gradwatch, recorded, tmp_path, monkeypatch
):
    run = recorded()

    gone = gradwatch("export", tmp_path / "gone")
    nowhere = gradwatch("export", run, "--output", tmp_path / "nowhere" / "mine.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    missing = gradwatch("export", run)

    assert [result.code for result in (gone, nowhere, missing)] == [2, 2, 2]
    assert "there is no such run directory" in gone.err
    assert "no such file or directory" in nowhere.err
    assert missing.err.startswith("error: export: needs pyarrow, which is not installed here: pip install")
    assert missing.err.count("\n") == 1
