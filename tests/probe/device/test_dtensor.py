"""Tensors spread over processes: every process reads the statistics of the whole."""

import subprocess
import sys

import numpy as np
import pytest
import reference
import sharded_worker
import torch

from gradwatch.probe.device.dtensor import gathers, has_values, is_distributed, local_part
from gradwatch.probe.gradients.histograms import bin_edges


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_every_process_reads_the_statistics_of_whole_tensors(tmp_path):
    command = [sys.executable, sharded_worker.__file__]
    workers = [
        subprocess.Popen([*command, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    errors = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], errors

    wholes = sharded_worker.make_wholes()
    grads = [sharded_worker.grad_of(whole) for whole in wholes]
    expected_SL = np.stack([reference.gradient_statistics(grad) for grad in grads], axis=1)
    weights = [float(whole.norm()) for whole in wholes]
    ratios = [float((0.1 * grad).norm() / whole.norm()) for whole, grad in zip(wholes, grads, strict=True)]
    ratios[1] = ratios[2] = np.nan  # of an infinite weight, and of none at all
    counts_LB = np.stack([reference.histogram(grad, bin_edges()) for grad in grads])
    for rank in range(2):
        seen = np.load(tmp_path / f"{rank}.npz")
        np.testing.assert_allclose(seen["row_SL"], expected_SL, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(seen["change_2L"], [weights, ratios], rtol=1e-5)
        np.testing.assert_array_equal(seen["counts_LB"], counts_LB)


def test_a_plain_tensor_is_its_own_part():
    tensor = torch.ones(3)

    assert not is_distributed(tensor)
    assert local_part(tensor) is tensor


@pytest.mark.parametrize(
    ("tensor", "has"),
    [
        (torch.ones(3), True),
        (torch.ones(0), True),
        (torch.ones(3).to_sparse(), True),
        (torch.ones(3, device="meta"), False),
    ],
)
def test_a_tensor_whose_memory_is_there_has_values(tensor, has):
    assert has_values(tensor) is has


def test_a_parameter_that_was_freed_has_none():
    param = torch.nn.Parameter(torch.ones(3))
    param.untyped_storage().resize_(0)

    assert not has_values(param)


def test_fsdp_owns_no_plain_module():
    assert not gathers(torch.nn.Linear(2, 2))
