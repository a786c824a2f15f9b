"""Sharded models on four ranks: rank 0 records the statistics of whole parameters, and waits for no other rank."""

import numpy as np
import pytest
import shards_worker
import torch
from processes import run_ranks
from shards_worker import END_S, LOST, STEPS

import gradwatch
from gradwatch import catalogue

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not hasattr(torch.cpu.Stream, "record_event"),
    reason=f"torch {torch.__version__} shards no model on a CPU",
)
KINDS = ("fsdp", "hsdp", "fsdp-tp", "tp")
RUN_NORMS = ("grad_norm.before_clip", "grad_norm.after_clip")
LAYER_NORM = (4, 5)
"""The parameters of which each rank has a term of the gradient, in tensor parallelism over the samples."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Train on four ranks, and return the folder of the runs and what each rank said."""
    folder = tmp_path_factory.mktemp("shards")
    ended = run_ranks(shards_worker.train_and_lose, folder, ranks=4, killed=(1,))
    return folder, {rank: ended[rank].said for rank in (0, 2, 3)}


@pytest.fixture(scope="module")
def whole():
    """Return the histories of one process with the global batch, by kind."""
    return {kind: shards_worker.train(shards_worker.make_model(), kind).history for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_rank_0_records_the_statistics_of_one_process_with_the_global_batch(kind, ranks, whole):
    run = gradwatch.load_run(ranks[0] / kind)
    compared = [i for i in range(len(run.info.layers)) if kind != "tp" or i not in LAYER_NORM]

    assert run.step == STEPS - 1
    for name in catalogue.PARAM_NAMES:
        np.testing.assert_allclose(
            run[name][:, compared], whole[kind][name][:, compared], rtol=1e-4, atol=1e-7, err_msg=f"{kind} {name}"
        )
    for name in RUN_NORMS:
        rtol = 0.1 if kind == "tp" else 1e-5  # the norm of a sum of terms, in tensor parallelism, is estimated
        np.testing.assert_allclose(run[name], whole[kind][name], rtol=rtol, err_msg=f"{kind} {name}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_sharded_training_has_neither_findings_nor_missing_shards(kind, ranks):
    run = gradwatch.load_run(ranks[0] / kind)

    # one pair of ranks trains a replica of the other pair, on equal batches
    assert [finding.kind for finding in run.findings] == (["rank-data"] if kind == "fsdp" else [])
    assert [e for e in run.history.events if e.kind.startswith(("shards-", "rank-gradients-d", "rank-weights-d"))] == []


@pytest.mark.parametrize("kind", KINDS)
def test_watching_adds_no_collective(kind, ranks):
    for said in ranks[1].values():
        counts = said["collectives"]
        assert counts[f"{kind} True"] == counts[f"{kind} False"]
        assert any(counts[f"{kind} True"])


@pytest.mark.parametrize("case", ["ended", "stalled", "killed"])
def test_a_rank_that_is_lost_leaves_the_others_watching(case, ranks):
    went = ranks[1][0]["lost"][case]
    # 4 ranks with 16 elements each, all equal to the rank + 1
    whole_norm, own_norm = np.sqrt(16 * (1 + 4 + 9 + 16)), 4.0

    assert went["norms"] == pytest.approx([whole_norm] * LOST + [own_norm] * LOST)
    assert [(e["kind"], e["step"], e["values"]["rank"]) for e in went["events"]] == [("shards-local", LOST, 1)]
    assert went["close_s"] < 3 * END_S + 5


def test_a_rank_that_watches_alone_sees_its_shards_before_the_end(ranks):
    assert ranks[1][0]["lost"]["alone"] == 1
