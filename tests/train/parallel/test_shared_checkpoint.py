"""Checkpoints of several ranks: exact on the same number, equal to rounding on another, and never half of one."""

import checkpoint_worker
import numpy as np
import pytest
import torch
from processes import run_ranks

from gradwatch import load_run
from gradwatch.errors import RunError
from gradwatch.replay.rerun import rerun
from gradwatch.state import checkpoint_folder
from gradwatch.train import checkpoint

STEPS, HALF = 12, 6


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function from the name of a case in `checkpoint_worker` to its run directory."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "lines.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(100)))
    run_ranks(checkpoint_worker.train_all, folder, ranks=4)
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


def test_a_step_of_several_ranks_is_not_replayed_and_the_error_says_why(trained):
    with pytest.raises(RunError, match="several ranks trained it, and a step of several ranks cannot be run again yet"):
        rerun(trained("ddp"), step=3)
