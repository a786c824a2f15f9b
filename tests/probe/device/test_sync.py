"""Values reach the host in one place, without a copy where they are there already."""

import numpy as np
import pytest
import torch

from gradwatch.probe.device import sync


def test_values_on_the_cpu_are_shared():
    tensor = torch.zeros(3)

    array = sync.to_host(tensor)
    tensor[1] = 5.0

    assert array.tolist() == [0, 5, 0], "the same memory"


def test_any_real_tensor_becomes_an_array():
    graph = torch.ones(2, requires_grad=True) * 2

    np.testing.assert_array_equal(sync.to_host(graph), [2, 2], "detached from its graph")
    half = torch.tensor([1.5], dtype=torch.bfloat16)
    np.testing.assert_array_equal(sync.to_host(half), [1.5], "bfloat16 widened")


def test_single_values_become_numbers():
    assert sync.to_float(torch.tensor([2.5], dtype=torch.float16)) == pytest.approx(2.5)
    assert sync.to_ints(torch.tensor([-1, 2**62])) == [-1, 2**62], "all 64 bits"
