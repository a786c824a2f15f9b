"""Tensors spread over processes: each process knows its part, and the ranks that hold the others."""

import pytest
import torch
import torch.distributed as dist

from gradwatch.probe.device.dtensor import find_shards, gathers, has_values, is_distributed, local_part, shares_batches
from gradwatch.records import ShardInfo


@pytest.fixture
def mesh():
    """A mesh of 2 x 4 processes, seen by rank 5, of which no other exists."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("fake", store=fake.FakeStore(), rank=5, world_size=8)
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    dist.destroy_process_group()


def test_the_ranks_that_share_a_parameter_follow_from_its_placements(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def param(rows, on, *placements):
        return torch.nn.Parameter(DTensor.from_local(torch.ones(rows, 2), on, placements, run_check=False))

    params = [
        torch.nn.Parameter(torch.ones(3)),
        param(3, mesh, Replicate(), Shard(0)),
        param(1, mesh, Shard(0), Shard(1)),
        param(2, mesh["inner"], Replicate()),
        param(0, mesh["inner"], Shard(0)),
    ]

    assert find_shards(params) == (
        ShardInfo(ranks=(4, 5, 6, 7), layers=(1, 4), numels=(6, 0), is_split=True),
        ShardInfo(ranks=(0, 1, 2, 3, 4, 5, 6, 7), layers=(2,), numels=(2,), is_split=True),
        ShardInfo(ranks=(4, 5, 6, 7), layers=(3,), numels=(4,), is_split=False),
    )


def test_a_term_of_a_sum_is_a_part_without_the_other_terms(mesh):
    from torch.distributed.tensor import DTensor, Partial

    term = torch.ones(3)

    assert (
        local_part(DTensor.from_local(term, mesh["inner"], [Partial()], run_check=False)).data_ptr() == term.data_ptr()
    )


def test_ranks_share_batches_under_tensor_parallelism(mesh):
    from torch.distributed.tensor import DTensor, Shard

    linear = torch.nn.Linear(2, 2, bias=False)
    assert not shares_batches([linear])
    shard = DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Shard(1)], run_check=False)
    linear.weight = torch.nn.Parameter(shard)
    assert shares_batches([linear])


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
