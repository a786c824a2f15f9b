"""What the native step does not take is stepped by torch itself, with one warning and the same statistics."""

import warnings

import pytest
import torch

from gradwatch import optim
from gradwatch.probe.device import backend as kernels
from gradwatch.probe.gradients.statistics import GradientProbe


def step_both(params_of, gradients_of, name="AdamW", steps=3):
    """Step torch's default optimizer and ours; return the parameters, our row and what the probe says of it."""
    sides = []
    for package in (torch.optim, optim):
        torch.manual_seed(0)
        params = params_of()
        sides.append((params, getattr(package, name)(params, lr=0.1)))
    (theirs, _torchs), (ours, own) = sides
    row_SL = torch.full((8, len(ours)), -7.0)
    own.watch({p: i for i, p in enumerate(ours)})
    own.gradients_SL, own.changes_2L = row_SL[:6], row_SL[6:]
    for _ in range(steps):
        for params, optimizer in sides:
            torch.manual_seed(1)
            for param in params:
                param.grad = gradients_of(param)
            if optimizer is own:
                expected_SL = GradientProbe(ours).read()
            optimizer.step()
    return theirs, ours, row_SL, expected_SL


CASES = {
    "float64": (lambda: [torch.nn.Parameter(torch.randn(3).double())], torch.randn_like, "is float64"),
    "bfloat16": (lambda: [torch.nn.Parameter(torch.randn(3).bfloat16())], torch.randn_like, "is bfloat16"),
    "complex": (lambda: [torch.nn.Parameter(torch.randn(3, dtype=torch.complex64))], torch.randn_like, "complex64"),
    "one among others": (
        lambda: [torch.nn.Parameter(torch.randn(3)), torch.nn.Parameter(torch.randn(3).double())],
        torch.randn_like,
        "parameter 1 is float64",
    ),
    "a parameter with gaps": (
        lambda: [torch.nn.Parameter(torch.randn(4, 6)[:, ::2])],
        torch.randn_like,
        r"float32 \(4, 3\) on cpu, strides \(6, 2\)",
    ),
    "a gradient in another order": (
        lambda: [torch.nn.Parameter(torch.randn(4, 3))],
        lambda p: torch.randn(3, 4).t(),
        r"strides \(3, 1\), with a gradient of torch.float32, strides \(1, 4\)",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_torch_steps_and_one_warning_says_why(case, name):
    params_of, gradients_of, reason = CASES[case]

    with pytest.warns(RuntimeWarning, match=f"{name} steps by torch.optim.{name}, .*{reason}") as told:
        theirs, ours, row_SL, expected_SL = step_both(params_of, gradients_of, name)

    assert len(told) == 1, "said once, not at every step"
    assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)), "that is torch's own step"
    torch.testing.assert_close(row_SL[:6], expected_SL)
    assert (row_SL[6:] > 0).all(), "weights and updates are told as well"


@pytest.mark.skipif(kernels.select_backend() is None, reason="the extension is not built")
def test_channels_last_and_odd_sizes_need_no_help():
    def params_of():
        return [torch.nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)), *map(one, (0, 1, 7))]

    def one(length):
        return torch.nn.Parameter(torch.randn(length))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        theirs, ours, _, _ = step_both(params_of, torch.randn_like)

    for a, b in zip(theirs, ours, strict=True):
        torch.testing.assert_close(a, b)


def test_sparse_gradients_are_refused_or_taken_as_torch_does():
    def params_of():
        return [torch.nn.Parameter(torch.randn(4, 3))]

    def gradients_of(param):
        return torch.eye(4, 3).to_sparse()

    params = params_of()
    params[0].grad = gradients_of(params[0])
    optimizer = optim.Adam(params)
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="Adam does not support sparse gradients"):
        optimizer.step()
    with pytest.warns(RuntimeWarning, match="sparse"):
        theirs, ours, row_SL, expected_SL = step_both(params_of, gradients_of, "SGD")
    assert torch.equal(theirs[0], ours[0])
    torch.testing.assert_close(row_SL[:6], expected_SL)


@pytest.mark.filterwarnings("ignore:the C extension")
def test_without_the_extension_torch_steps(monkeypatch):
    monkeypatch.setattr(kernels, "_NATIVE", None)

    with pytest.warns(RuntimeWarning, match="the C extension is not there"):
        theirs, ours, row_SL, expected_SL = step_both(lambda: [torch.nn.Parameter(torch.randn(5))], torch.randn_like)

    assert torch.equal(theirs[0], ours[0])
    torch.testing.assert_close(row_SL[:6], expected_SL)


def test_hooks_are_called_once_though_torch_steps():
    optimizer = optim.AdamW([torch.nn.Parameter(torch.randn(3).double())])
    torch.optim.AdamW([torch.nn.Parameter(torch.randn(3))])  # has torch wrap the step of its class
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3).double()
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))

    with pytest.warns(RuntimeWarning):
        optimizer.step()

    assert calls == ["before", "after"]
