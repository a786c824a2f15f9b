"""Check the workspace of convolutions against what torch allocates."""

import itertools

import pytest
import torch

from gradwatch.planning.workspace import workspace_bytes

SETTINGS = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def convolution(samples):
    torch.manual_seed(0)
    inputs = torch.randn(samples, 8, 8, 8)
    weight = torch.randn(16, 8, 3, 3)
    return torch.ops.aten.convolution.default, (inputs, weight, torch.randn(16), *SETTINGS)


def backward(samples):
    _, (inputs, weight, *_) = convolution(samples)
    args = (torch.randn(samples, 16, 8, 8), inputs, weight, [16], *SETTINGS, [True, True, True])
    return torch.ops.aten.convolution_backward.default, args


def allocated(func, args):
    """Return the peak beside the outputs by the profiler that users have."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = func(*args)
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    outputs = out if isinstance(out, tuple) else (out,)
    return max(itertools.accumulate(sizes)) - sum(tensor.nbytes for tensor in outputs)


@pytest.mark.parametrize("samples", [4, 32, 100])
@pytest.mark.parametrize("pass_", [convolution, backward])
def test_the_workspace_is_what_the_kernel_allocates_beside_its_outputs(pass_, samples):
    func, args = pass_(samples)

    assert workspace_bytes(func, args, device="cpu", flops=1) == allocated(func, args)


def test_a_convolution_that_would_take_long_is_not_tried():
    func, args = convolution(100)

    assert workspace_bytes(func, args, device="cpu", flops=10**13) is None


def test_other_operations_have_none():
    assert workspace_bytes(torch.ops.aten.mm.default, (torch.ones(2, 2), torch.ones(2, 2)), device="cpu", flops=16) == 0
