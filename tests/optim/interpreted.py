"""Tests of the Triton step, which test_triton_step.py runs in Triton's interpreter, chosen before the import."""

import copy

import pytest
import torch

from gradwatch import optim
from gradwatch.optim import _triton_step
from gradwatch.probe.device import backend as kernels

SHAPES = [(3,), (4100,), (7, 5), (0,)]  # the second is more than a chunk
CASES = [
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True, "maximize": True}, 1024.0),
    ("AdamW", {"weight_decay": 0.0, "betas": (0.3, 0.9)}, None),
    ("Adam", {"weight_decay": 0.1}, None),
    ("SGD", {"weight_decay": 0.1}, None),
    ("SGD", {"momentum": 0.9, "dampening": 0.2}, 1024.0),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True}, None),
]
ROUNDINGS = 3 * 2.0**-22  # half of the last place of products up to 8, which the native step fuses with their sum


def side(name, options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for s in SHAPES]
    optimizer = getattr(optim, name)(params, lr=0.05, **options)
    row_SL = torch.full((8, len(params)), -7.0)
    optimizer.watch({p: i for i, p in enumerate(params)})
    optimizer.gradients_SL, optimizer.changes_2L = row_SL[:6], row_SL[6:]
    return params, optimizer, row_SL


@pytest.mark.parametrize(("name", "options", "factor"), CASES, ids=str)
def test_the_step_on_a_gpu_does_what_the_native_one_does(name, options, factor):
    scale = None if factor is None else torch.tensor(factor)
    native, gpu = side(name, options), side(name, options)

    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for pair in zip(native[0], gpu[0], strict=True):
            grad = torch.randn(pair[0].shape, generator=generator)
            for param in pair:
                param.grad = None if step == 1 and grad.numel() == 3 else grad * (1 if scale is None else scale)
        if scale is not None:
            native[1].grad_scale = scale
        native[1].step()
        params, optimizer, row_SL = gpu
        moved = optimizer._step_on_gpu(scale, None).moved
        assert {*moved} == {p for p in params if p.grad is not None and p.numel()}

        for expected, got in zip(native[0], params, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
            torch.testing.assert_close(got.grad, expected.grad)
        torch.testing.assert_close(row_SL, native[2], rtol=1e-5, atol=1e-6, equal_nan=True)
    atol = ROUNDINGS if "momentum" in options else 1e-7
    for expected, got in zip(native[1].state.values(), gpu[1].state.values(), strict=True):
        torch.testing.assert_close(dict(got), dict(expected), rtol=1e-5, atol=atol)


def test_what_is_not_plain_is_told_and_nothing_is_done():
    params, optimizer, _ = side("AdamW", {})
    params[2].grad = torch.randn(5, 7).t()

    told = optimizer._step_on_gpu(None, None).obstacle

    assert told.startswith("parameter 2, its gradient or its state is not dense float32")
    assert not optimizer.state


def test_where_a_kernel_fails_nothing_has_happened_and_torch_may_step(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("no such target")

    monkeypatch.setattr(_triton_step, "_Launch", fail)
    monkeypatch.setattr(kernels, "_FAILED", set())
    params, optimizer, _ = side("AdamW", {})
    params[0].grad = torch.ones(3)

    with pytest.warns(RuntimeWarning, match="no such target"):
        assert optimizer._step_on_gpu(None, None).obstacle == "a kernel failed"

    assert not optimizer.state
    assert optimizer._step_on_gpu(None, None).obstacle == "Triton is not there", "it is not tried again"


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_step_that_the_device_skips_tells_its_gradients_and_moves_nothing(name):
    params, optimizer, row_SL = side(name, {"momentum": 0.9} if name == "SGD" else {"amsgrad": True})
    params[0].grad = torch.ones(3)
    optimizer._step_on_gpu(None, torch.tensor([0.0]))
    before = params[0].detach().clone(), copy.deepcopy(optimizer.state_dict())

    params[0].grad = torch.tensor([3.0, 4.0, float("inf")])
    optimizer._step_on_gpu(torch.tensor(2.0), torch.tensor([1.0]))

    assert torch.equal(params[0], before[0])
    assert params[0].grad.tolist() == [3.0, 4.0, float("inf")], "as torch leaves them: scaled"
    torch.testing.assert_close(optimizer.state_dict(), before[1], rtol=0, atol=0)
    assert row_SL[5, 0] == 1
    assert row_SL[6:, 0].isnan().all(), "nothing has changed"


@pytest.mark.parametrize(("name", "options", "factor"), CASES, ids=str)
def test_steps_after_one_that_was_skipped_are_those_without_it(name, options, factor):
    if "dampening" in options:
        options = options | {"dampening": 0.0}
    skipping, plain = side(name, options), side(name, options)

    for step, found in enumerate([1.0, 0.0, 1.0, 0.0]):
        for params, optimizer, _ in (skipping, plain):
            generator = torch.Generator().manual_seed(step)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator)
            if optimizer is skipping[1]:
                optimizer._step_on_gpu(None, torch.tensor([found]))
            elif not found:
                optimizer._step_on_gpu(None, None)

    torch.testing.assert_close(skipping[0], plain[0], rtol=0, atol=0)
    torch.testing.assert_close(skipping[1].state_dict(), plain[1].state_dict(), rtol=0, atol=0)


def test_a_first_gradient_that_is_dampened_is_left_to_torch_where_it_may_be_skipped():
    params, optimizer, _ = side("SGD", {"momentum": 0.9, "dampening": 0.5})
    params[0].grad = torch.ones(3)

    assert "dampened" in optimizer._step_on_gpu(None, torch.tensor([0.0])).obstacle

    assert not optimizer.state
