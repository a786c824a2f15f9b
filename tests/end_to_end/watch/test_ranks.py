"""A model that several processes train, sharded or replicated: each watches it, and none stops or ends another."""

import numpy as np
import pytest
import ranks_worker
import torch
from processes import run_ranks

import gradwatch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


needs_sharding_on_a_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason=f"torch {torch.__version__} shards no model on a CPU"
)


def train(folder, kind):
    """Train in two processes, and return what each saw and has written."""
    ended = run_ranks(ranks_worker.train_one, folder, kind, ranks=2)
    return [each.said for each in ended], [each.output for each in ended]


@needs_sharding_on_a_cpu
def test_a_sharded_training_in_memory_is_watched_by_every_process_in_its_shards(tmp_path):
    said, _ = train(tmp_path, "fsdp-loss")

    for rank in range(2):
        assert not said[rank]["findings"]
        assert not {event for event in said[rank]["events"] if event.startswith(("graph-", "parameters-"))}
        assert said[rank]["events"].count("shards-local") == 1
        # the one row of the last weight and the last bias are on rank 0
        ratio_TL = np.array(said[rank]["ratio_TL"])[:, : 6 if rank == 0 else 4]
        assert np.isfinite(ratio_TL).all(), "sampled at the same steps, whatever a process takes for it"


def test_of_two_processes_one_writes_the_run_directory(tmp_path):
    said, errors = train(tmp_path, "ddp-run")

    assert [each["run_dir"] for each in said] == [str(tmp_path / "run"), str(tmp_path / "run/ranks/1")]
    assert [path.name for path in tmp_path.glob("run*")] == ["run"]
    assert [error.count("problems found in 100 steps") for error in errors] == [1, 0], errors
    assert "Traceback" not in "".join(errors)
    assert gradwatch.load_run(tmp_path / "run")["loss"].tolist() == pytest.approx(said[0]["losses"])
    assert [len(each["losses"]) for each in said] == [each["steps"] for each in said] == [ranks_worker.STEPS] * 2
    np.testing.assert_allclose(said[0]["grad_L"], said[1]["grad_L"], rtol=1e-6)


@needs_sharding_on_a_cpu
def test_an_incident_of_a_sharded_model_is_not_recorded(tmp_path):
    said, errors = train(tmp_path, "fsdp-run")

    assert [each["run_dir"] for each in said] == [str(tmp_path / "run"), str(tmp_path / "run/ranks/1")]
    assert "no incident is recorded of a model whose parameters are spread over processes" in errors[0]
    parts = [gradwatch.load_run(each["run_dir"]) for each in said]
    assert said[1]["grad_L"] == parts[1]["grad.l2"][-1].tolist()
    assert (parts[0]["grad.l2"] > parts[1]["grad.l2"]).all(), "rank 0 has the norms of both shards"
