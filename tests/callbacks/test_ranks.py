"""Two processes train with each library: the norms are those of a plain DDP loop with equal data, after the average."""

import socket
from pathlib import Path

import callbacks_worker
import numpy as np
import pytest
import torch
from callbacks_worker import LIMIT, STEPS
from processes import run_ranks

import gradwatch

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder, and what each rank has recorded with each library."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    ended = run_ranks(callbacks_worker.train_all, folder, port, ranks=2, prepare=callbacks_worker.import_libraries)
    return folder, [each.said for each in ended]


def test_lightning_with_sharded_parameters_records_the_norms_of_a_plain_loop(trained):
    folder, ranks = trained
    if "lightning_sharded" not in ranks[0]:
        pytest.skip("lightning is not installed, or this torch shards no model on a CPU")

    plain, own = ranks[0]["plain"], ranks[0]["lightning_sharded"]
    np.testing.assert_allclose(own["before_T"], plain["before_T"], rtol=1e-5)
    np.testing.assert_allclose(own["after_T"], np.minimum(plain["before_T"], LIMIT), rtol=1e-4)
    np.testing.assert_allclose(own["norm_TL"], plain["norm_TL"], rtol=1e-5)
    np.testing.assert_allclose(own["loss_T"], plain["loss_T"], rtol=1e-5)
    assert own["findings"] == []
    assert list(gradwatch.load_run(folder / "lightning_sharded").ranks) == [0, 1]


@pytest.mark.parametrize("library", ["accelerate", "transformers", "lightning"])
def test_a_library_records_on_each_rank_what_a_plain_loop_records(library, trained):
    folder, ranks = trained
    if library not in ranks[0]:
        pytest.skip(f"{library} is not installed")

    for rank, said in enumerate(ranks):
        plain, own = said["plain"], said[library]
        np.testing.assert_allclose(own["before_T"], plain["before_T"], rtol=1e-5)
        np.testing.assert_allclose(own["after_T"], np.minimum(plain["before_T"], LIMIT), rtol=1e-4)
        np.testing.assert_allclose(own["norm_TL"], plain["norm_TL"], rtol=1e-5)
        np.testing.assert_allclose(own["loss_T"], plain["loss_T"], rtol=1e-5)
        assert len(own["loss_T"]) == STEPS
        assert own["findings"] == []
        assert Path(own["run_dir"]) == folder / library / ("" if rank == 0 else "ranks/1")
    assert ranks[0][library]["norm_TL"] == ranks[1][library]["norm_TL"], "averaged over the ranks"
    assert ranks[0][library]["loss_T"] != ranks[1][library]["loss_T"], "each rank has a loss of its own"
    assert list(gradwatch.load_run(folder / library).ranks) == [0, 1]
