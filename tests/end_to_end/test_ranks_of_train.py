"""`gradwatch train` on 2 and 4 ranks gives the numbers of one process, and says what cannot work."""

import numpy as np
import pytest
from parallel_worker import EQUAL_ON_FOUR, EQUAL_ON_TWO, NAN_AT, check_configs, config_of, merged, train_all
from processes import run_ranks

import gradwatch
from gradwatch.cli import main
from gradwatch.train.loop import train

EQUAL = EQUAL_ON_TWO | EQUAL_ON_FOUR
RUN = ("loss", "grad_norm.before_clip", "grad_norm.after_clip", "val_loss", "val_accuracy", "lr.0", "skipped")
PARAM = ("grad.l2", "grad.absmax", "weight.l2")
TOLERANCE = 1e-5
"""Relative; ranks add up float32 numbers in another order."""
HALF_TOLERANCE = {"fsdp2-half": 0.05, "fsdp2-scaled": 0.05}
"""The same for gradients in bfloat16 and float16, of which a sum over 6 steps of an optimizer is compared."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(train_all, folder, ranks=4, prepare=check_configs)
    return folder


def directory_of(folder, name):
    (directory,) = (folder / name).iterdir()
    return directory


def values(history, name):
    table = history.param if name in PARAM else history.run
    return table.rows()[1][:, table.statistics.index(name)]


@pytest.mark.parametrize("name", EQUAL)
def test_ranks_give_the_numbers_of_one_process_at_the_same_global_batch(name, folder, tmp_path):
    of_ranks = gradwatch.load_run(directory_of(folder, name)).history

    alone = train(config_of(merged(EQUAL[name], {"train": {"parallel": "none", "compile": False}}), tmp_path)).history

    tolerance = HALF_TOLERANCE.get(name, TOLERANCE)
    for statistic in (*RUN, *(() if name in HALF_TOLERANCE else PARAM)):
        expected, found = values(alone, statistic), values(of_ranks, statistic)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, err_msg=statistic)
    assert (of_ranks.ending.kind, of_ranks.step) == (alone.ending.kind, alone.step)
    assert [str(finding) for finding in of_ranks.findings] == []


def test_every_rank_records_its_part_of_one_run(folder):
    whole, part = (gradwatch.load_run(directory_of(folder, "hsdp") / name) for name in (".", "ranks/3"))

    assert (whole.info.rank, part.info.rank, part.info.world_size) == (0, 3, 4)
    assert part["loss"].tolist() == whole["loss"].tolist()  # of all ranks
    assert part["batch_hash"].tolist() != whole["batch_hash"].tolist()


def test_a_nan_of_one_rank_is_skipped_by_all_and_traced_to_it(folder):
    run = gradwatch.load_run(directory_of(folder, "ddp-fragile"))

    finding = next(finding for finding in run.findings if finding.kind == "rank-non-finite")
    assert finding.since == NAN_AT
    assert {q.key: q.value for q in finding.evidence}["rank"] == 1
    assert np.flatnonzero(run["skipped"]).tolist() == [NAN_AT]


def test_batch_norm_of_a_sharded_model_keeps_the_statistics_of_rank_0(folder):
    run = gradwatch.load_run(directory_of(folder, "fsdp2-batch-norm"))

    assert [finding.kind for finding in run.findings] == []  # own statistics on each rank would be a `rank-setting`
    assert run["val_accuracy"][-1] > 0.3  # chance is 0.1


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {name: mlp}\ndata: {name: digits}\noptim: {name: sgd, lr: 0.1}\ntrain: {steps: 2}\n")
    return file


def test_nproc_without_parallel_is_refused(config, capsys):
    assert main(["train", "--nproc", "2", str(config)]) == 2
    assert "train.parallel: got 'none' for 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize(("rank", "messages"), [("0", 1), ("1", 0)])
def test_a_launcher_without_parallel_is_refused_by_one_message(config, rank, messages, monkeypatch, capsys):
    for name, value in {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)

    assert main(["train", str(config)]) == 2
    assert capsys.readouterr().err.count("train.parallel: got 'none' for 2 ranks") == messages


def test_one_process_trains_bit_for_bit_as_without_a_parallel_mode(config, tmp_path):
    for name in ("none", "fsdp2"):
        settings = [f"train.parallel={name}", f"run.out={tmp_path / name}"]
        assert main(["train", str(config), *(word for setting in settings for word in ("--set", setting))]) == 0

    losses = [gradwatch.load_run(directory_of(tmp_path, name))["loss"].tolist() for name in ("none", "fsdp2")]
    assert losses[0] == losses[1]
