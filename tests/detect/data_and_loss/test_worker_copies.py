"""A stream that the workers of a DataLoader do not split is found, and one that they split is not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import gradwatch


class Stream(IterableDataset):
    """Numbers that each worker goes through, or its own part of them."""

    def __init__(self, *, splits):
        self.splits = splits

    def __iter__(self):
        worker = get_worker_info()
        generator = torch.Generator().manual_seed(worker.id if self.splits else 0)
        return (torch.randn(8, generator=generator) for _ in range(80))


@pytest.mark.parametrize("splits", [False, True])
def test_a_stream_that_no_worker_splits_is_found(splits):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Stream(splits=splits), batch_size=8, num_workers=2)
    with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
        for x in loader:
            loss = F.mse_loss(model(x), x.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=x)

    assert [finding.kind for finding in monitor.findings()] == ([] if splits else ["constant-batch"])
