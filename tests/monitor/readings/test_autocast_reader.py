"""The format of autocast is read once, and then no hook is left on any module."""

import pytest
import torch
from torch import nn

from gradwatch.monitor.readings.autocast_reader import AutocastReader


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, ["bf16"]), (None, [])])
def test_one_forward_reports_at_most_once_and_removes_all_hooks(dtype, expected):
    seen = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    AutocastReader(seen.append).attach({"": model})

    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        model(torch.ones(2, 4))

    assert seen == expected
    assert not any(module._forward_pre_hooks for module in model)
