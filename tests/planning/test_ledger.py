"""Check the bytes that live storages are counted with."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradwatch.planning.ledger import Ledger


@pytest.mark.parametrize(
    ("device", "numbers", "expected"), [("cpu", 100, 400), ("cuda", 100, 512), ("cuda", 128, 512), ("cuda", 129, 1024)]
)
def test_a_storage_on_cuda_takes_whole_blocks_of_512_bytes(device, numbers, expected):
    ledger = Ledger(device=device)

    with FakeTensorMode():
        tensor = torch.empty(numbers, device=device)
        ledger.add(tensor)
        assert ledger.peak == sum(ledger.live.values()) == expected
        del tensor

    assert sum(ledger.live.values()) == 0
