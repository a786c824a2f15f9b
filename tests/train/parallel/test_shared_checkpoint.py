"""Checkpoints of several ranks: exact on the same number, equal to rounding on another, and never half of one.

The steps that follow them are replayed in one process.
"""

import contextlib
import json

import checkpoint_worker
import numpy as np
import pytest
import torch
from checkpoint_worker import BAD_SAMPLE, BAD_STEP
from processes import run_ranks

from gradwatch import load_run
from gradwatch.cli import main
from gradwatch.errors import RunError
from gradwatch.replay.rerun import rerun
from gradwatch.replay.restore.restored_step import restore_step
from gradwatch.state import checkpoint_folder
from gradwatch.train import checkpoint

STEPS, HALF = 12, 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function from the name of a case in `checkpoint_worker` to its run directory."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "lines.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(100)))
    run_ranks(checkpoint_worker.train_all, folder, ranks=4, prepare=checkpoint_worker.check_configs)
    return lambda name: next((folder / name).glob("*/"))


def last_parts(run):
    """Return the parts of both ranks in the last checkpoint of a run, and its whole state."""
    folder = max((run / "checkpoints").glob("step-*"))
    return [checkpoint_folder.read_part(checkpoint_folder.part_of(folder, rank)) for rank in range(2)], folder


def leaves(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    nested = [leaf for key, item in items for leaf in leaves(item, (*path, key))]
    return nested or [(path, value)]


def equal(a, b):
    if isinstance(a, (torch.Tensor, np.ndarray, float)):
        return np.array_equal(a, b, equal_nan=True)
    return a == b


@pytest.mark.parametrize("case", ["ddp", "fsdp2", "stream"])
def test_a_resumed_training_ends_in_the_same_state_to_the_bit_on_every_rank(trained, case):
    (resumed, folder), (whole, whole_folder) = last_parts(trained(case)), last_parts(trained(f"{case}-whole"))

    assert folder.name == whole_folder.name == f"step-{STEPS:06d}"
    for rank in range(2):
        expected = {path: leaf for path, leaf in leaves(whole[rank]) if path[0] != "history"}
        found = dict(leaves(resumed[rank]))
        expected.pop(("progress", "elapsed_s"), None)
        assert [path for path, leaf in expected.items() if not equal(found[path], leaf)] == []
    assert not equal(resumed[0]["random"]["torch"], resumed[1]["random"]["torch"])


def test_weights_and_moments_of_a_sharded_model_are_equal_after_an_exact_resume(trained):
    resumed, whole = (checkpoint.load(trained(name) / "checkpoints")[1] for name in ("fsdp2", "fsdp2-whole"))

    for key in ("model", "optimizer"):
        assert all(equal(a, b) for (_, a), (_, b) in zip(leaves(resumed[key]), leaves(whole[key]), strict=True))


@pytest.mark.parametrize(("case", "ranks"), [("shrunk", 1), ("grown", 2)], ids=["from 4 to 2 to 1", "from 1 to 2"])
def test_a_training_goes_on_with_another_number_of_ranks(trained, case, ranks):
    run, whole = load_run(trained(case)), load_run(trained("whole"))

    np.testing.assert_allclose(run["loss"], whole["loss"], rtol=1e-5)
    np.testing.assert_allclose(run["grad.l2"], whole["grad.l2"], rtol=1e-3, atol=1e-6)
    assert run.info.world_size == ranks
    assert [str(finding) for finding in run.findings] == []


def test_a_rank_that_joins_later_is_watched_from_then_on(trained):
    assert load_run(trained("grown") / "ranks" / "1").steps("loss").tolist() == list(range(HALF, STEPS))


def test_a_stream_that_two_ranks_shared_goes_on_in_one_process(trained):
    state = checkpoint.load(trained("stream-shrunk") / "checkpoints")[1]
    begun = checkpoint.load(trained("stream-shrunk") / "checkpoints", step=HALF)[1]

    assert begun["data"]["shards"].keys() == state["data"]["shards"].keys() == {"0", "1"}
    for shard, position in state["data"]["shards"].items():
        # 3 samples a rank and step; then 6 samples a step, from both shards in turn
        assert begun["data"]["shards"][shard]["samples"] == 3 * HALF
        assert position["samples"] == 3 * HALF + 6 * (STEPS - HALF) // 2


def test_an_interrupt_of_rank_1_saves_all_ranks_at_one_step(trained):
    assert checkpoint.steps(trained("ddp") / "checkpoints") == [4, STEPS], "8 samples a step: read in step 3"


def test_a_checkpoint_holds_data_and_no_code(trained):
    files = [path for name in ("fsdp2", "ddp") for path in (trained(name) / "checkpoints").rglob("*") if path.is_file()]

    assert {path.suffix for path in files} == {".json", ".safetensors"}
    assert any("sharded" in path.parts for path in files)


@pytest.mark.parametrize("part", ["sharded/shard-00002-model-00001-of-00001.safetensors", "ranks/1/state.json"])
def test_a_damaged_part_of_a_rank_is_found_and_the_older_checkpoint_is_read(trained, part):
    root = trained("fsdp2") / "checkpoints"
    damaged = root / f"step-{STEPS:06d}" / part
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    text = rf"{damaged.name} does not match its checksum\. Going back to .*step-{HALF:06d}"
    with pytest.warns(RuntimeWarning, match=text):
        step, _ = checkpoint.load(root)
    damaged.write_bytes(content)

    assert step == HALF


def test_a_full_disk_on_one_rank_ends_all_ranks_and_leaves_the_older_checkpoint(trained):
    run = trained("full")
    errors = sorted((run.parent / f"error-{rank}").read_text() for rank in range(2))

    assert "rank 1: no space left on device; the older checkpoints are intact" in errors[0]
    assert [error.partition(":")[0] for error in errors] == ["CheckpointError", "RankError"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000004"]
    assert checkpoint.load(run / "checkpoints")[0] == 4


@pytest.mark.parametrize(
    ("case", "step", "until", "begins_at", "ranks"),
    [
        ("ddp", 5, 11, 4, 2),  # dropout, BatchNorm, fp16, random data
        ("fsdp2", 7, 11, HALF, 2),
        ("shrunk", 2, 5, 0, 4),
        ("shrunk", 7, 8, HALF, 2),
        ("shrunk", 10, 11, HALF + 3, 1),
        ("grown", 2, 5, 0, 1),
    ],
)
def test_steps_of_several_ranks_are_replayed_in_one_process(trained, case, step, until, begins_at, ranks):
    done = rerun(trained(case), step=step, until=until)

    assert done.is_same, (done.differences[:5], done.weights)
    assert (done.world_size, done.start_step, len(done.steps)) == (ranks, begins_at, until - step + 1)
    layers = len(load_run(trained(case)).info.layers)
    assert done.compared >= 5 * layers * (until + 1 - begins_at), "every layer is compared at every step"
    assert len(done.weights) == 1, "the next checkpoint"
    assert (done.tolerance == 0) == (ranks == 1)


def test_a_step_of_a_rank_is_traced_to_its_operation_and_sample(trained, capsys):
    run = trained("spoilt")
    assert "rank-non-finite" in [finding.kind for finding in load_run(run).findings]

    code = main(["replay", str(run), "--step", str(BAD_STEP), "--format", "json"])

    said = json.loads(capsys.readouterr().out)
    assert (code, said["is_same"], said["start_step"], said["world_size"]) == (0, True, 3, 2)
    assert said["located"]["rank"] == 1
    assert said["located"]["samples_in_data"] == [BAD_SAMPLE]
    assert said["located"]["operation"]["module"] == "blocks.0.linear"
    assert said["located"]["operation"]["file"].endswith("mlp.py")
    confirmed = next(d for d in load_run(run).diagnoses if "rank" in d.cause_id).confirm_code
    assert confirmed == f"gradwatch replay {run} --rank 1 --step {BAD_STEP}"


def test_another_rank_of_the_step_has_no_bad_operation(trained, capsys):
    assert main(["replay", str(trained("spoilt")), "--step", str(BAD_STEP), "--rank", "0"]) == 0

    shown = capsys.readouterr().out
    assert f"step {BAD_STEP} of" in shown
    assert "equal to rounding" in shown
    assert "every operation is finite" in shown
    assert main(["replay", str(trained("spoilt")), "--step", str(BAD_STEP), "--rank", "2"]) == 2
    assert "--rank: got 2, expected a number below 2" in capsys.readouterr().err


def test_a_part_that_is_read_otherwise_is_reported_as_changed_data(trained, monkeypatch):
    monkeypatch.setattr(checkpoint_worker, "BAD_SAMPLE", checkpoint_worker.BAD_SAMPLE + 1)

    done = rerun(trained("spoilt"), step=BAD_STEP)

    assert done.is_data_changed
    assert [d.layer for d in done.differences if d.statistic == "batch_hash"] == ["rank 1"]


@pytest.mark.parametrize(
    ("call", "case", "text"),
    [
        (lambda run: rerun(run, step=3), "stream", "2 ranks made step 3 of a stream"),
        (lambda run: stack_of(restore_step(run, 3)), "spoilt", "needs a step of one process; only `gradwatch replay`"),
    ],
)
def test_what_needs_one_process_says_so(trained, call, case, text):
    with pytest.raises(RunError, match=text):
        call(trained(case))


def stack_of(context):
    with contextlib.ExitStack() as stack:
        return stack.enter_context(context)
