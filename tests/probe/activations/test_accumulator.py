"""Outputs of any layout, class and number are accumulated alike by the C extension and torch, together and apart."""

import math

import numpy as np
import pytest
import reference
import torch
from torch import nn

from gradwatch.probe.activations import accumulator
from gradwatch.probe.activations.accumulator import EMPTY_RANGE
from gradwatch.probe.activations.bitmask import UnitMask, num_bytes
from gradwatch.probe.activations.probe import ActivationProbe
from gradwatch.probe.device import sync

DEAD, _, MEAN, _ = range(4)
RELU_DEAD = (-math.inf, 0.0)

LAYOUTS = {
    "features": lambda x: x.flatten(1),
    "tokens": lambda x: x.flatten(2).transpose(1, 2).contiguous(),
    "every second sample": lambda x: x.repeat_interleave(2, 0)[::2],
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "a cut of each map": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "transposed maps": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "one sample": lambda x: x[:1],
    "one channel": lambda x: x[:, :1].contiguous(),
    "half": lambda x: x.half(),
}
SPECIALS = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e-42, -1e-42, 3e38, 0.4871, 0.99, -0.99, 6.0)


@pytest.mark.parametrize("limit", [65536, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("module", [nn.ReLU(), nn.ReLU6(), nn.Tanh(), nn.Sigmoid(), nn.ELU(), nn.GELU()], ids=str)
@pytest.mark.parametrize("special", [False, True])
def test_the_native_code_agrees_with_torch_operations_on_every_layout(special, module, layout, limit):
    x = 3 * torch.randn(5, 7, 4, 6, generator=torch.Generator().manual_seed(1))
    x[:, 2] = -9.0
    if special:
        x.view(-1)[:: x.numel() // len(SPECIALS)][: len(SPECIALS)] = torch.tensor(SPECIALS)
    output = LAYOUTS[layout](module(x))

    seen = {}
    for kernel in ("native", "torch"):
        model = nn.Sequential(nn.Conv2d(1, 1, 1) if output.ndim == 4 else nn.Linear(1, 1), type(module)())
        with ActivationProbe(model, max_elements=limit, kernel=kernel) as probe:
            probe.arm()
            probe._accumulators[0].add(output)
            probe._accumulators[0].call = 0
            probe._accumulators[0].add(output / 2)
            seen[kernel] = sync.to_host(probe.read())

    np.testing.assert_allclose(seen["native"], seen["torch"], rtol=2e-5, atol=1e-6)


def test_the_default_dtype_of_a_script_moves_no_bound():
    """Solvers of differential equations make float64 the default."""
    model = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    x = 3 * torch.randn(32, 4, generator=torch.Generator().manual_seed(1))

    def read(default):
        accumulator._ranges.cache_clear()
        torch.set_default_dtype(default)
        try:
            with ActivationProbe(model, kernel="native") as probe:
                probe.arm()
                model(x).sum().backward()
                return sync.to_host(probe.read())
        finally:
            torch.set_default_dtype(torch.float32)
            accumulator._ranges.cache_clear()

    np.testing.assert_array_equal(read(torch.float64), read(torch.float32))


def every_second(number):
    """The bits of units, every second of which is set."""
    return torch.full((num_bytes(number),), 0b01010101, dtype=torch.uint8)


def calls_of(outputs, *, totals_A4):
    """What the native code is told of outputs, two to a row, units in the last dimension."""
    ranges_4, rows = torch.tensor([-math.inf, 0.0, -0.5, 0.5]), len(totals_A4)
    return tuple(
        (x, False, x.numel(), ranges_4, None if i % 3 == 2 else every_second(x.shape[-1]), i % 2 == 0, i // 2 % rows)
        for i, x in enumerate(outputs)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
def test_many_outputs_read_in_one_native_call_give_what_each_gives_by_itself(dtype):
    native = pytest.importorskip("gradwatch._native")
    x = 3 * torch.randn(5, 7, 4, 6, generator=torch.Generator().manual_seed(1))
    x[:, 2] = -9.0
    outputs = [layout(x.relu() if i % 2 else x.tanh()) for i, layout in enumerate(LAYOUTS.values())]
    outputs = [output.to(dtype).movedim(1, -1) if i % 4 else output.float() for i, output in enumerate(outputs)]
    together_A4, apart_A4 = torch.zeros(2, 3, 4, dtype=torch.float64)

    together, apart = calls_of(outputs, totals_A4=together_A4), calls_of(outputs, totals_A4=apart_A4)
    answers = native.activations(together, together_A4)

    assert answers == [native.activations((call,), apart_A4)[0] for call in apart]
    assert [answer is None for answer in answers].count(True) < len(answers), "some are plain"
    torch.testing.assert_close(together_A4, apart_A4, rtol=0, atol=0)
    for (x, _, _, _, seen, *_), (_, _, _, _, expected, *_), answer in zip(together, apart, answers, strict=True):
        assert seen is None or torch.equal(seen, expected)
        assert seen is None or answer in (None, UnitMask(sync.to_host(seen), x.shape[-1]).flags().sum())


SHAPES = ((3, 5), (4, 5, 3), (4, 7, 4, 6), (3, 4, 2, 3, 4), (6, 7, 1, 1), (2, 1, 4, 4))


@pytest.mark.parametrize("limit", [10_000, 50, 20])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_leading_samples_are_read_where_they_lie(shape, limit):
    native = pytest.importorskip("gradwatch._native")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)).relu()
    x[:, 1:2] = 0.0
    x[1, 0] = 3.0
    x.requires_grad_()
    ranges_4, totals_A4 = torch.tensor([*RELU_DEAD, *EMPTY_RANGE]), torch.zeros(1, 4, dtype=torch.float64)

    are_channels_first = len(shape) > 2
    call = (x, are_channels_first, limit, ranges_4, every_second(shape[1]), True, 0)
    (num_dead,) = native.activations((call,), totals_A4)

    sample = leading(x.detach().movedim(1, -1), most=limit)
    assert num_dead == (sample == 0).reshape(-1, sample.shape[-1]).all(0).sum()
    expected = [sample.numel(), sample.sum().item(), sample.square().sum().item(), 0]
    assert totals_A4[0].tolist() == pytest.approx(expected, rel=1e-5)


def leading(x, *, most):
    """As many samples as fit, or as much of the first one."""
    while x.ndim > 1 and x[0].numel() > most:
        x = x[0]
    return x[: max(1, most // x[0].numel())]


def test_units_are_told_to_the_native_code_with_room_for_all_of_them():
    native = pytest.importorskip("gradwatch._native")
    x, ranges_4, totals_A4 = torch.ones(2, 9), torch.zeros(4), torch.zeros(1, 4, dtype=torch.float64)

    for dead, row in ((every_second(8), 0), (None, 1), (None, -1)):
        with pytest.raises(ValueError, match="large enough"):
            native.activations(((x, False, 18, ranges_4, dead, True, row),), totals_A4)


def test_outputs_that_the_native_code_cannot_read_are_read_beside_those_that_it_can():
    x = torch.randn(4, 6, 5, 3, generator=torch.Generator().manual_seed(1)).relu()
    x[:, 1] = 0.0
    outputs = [x, x[:, :, ::2, ::2], 2 * x, x[::2, :, :, 1::2]]

    seen = {}
    for kernel in ("native", "torch"):
        with ActivationProbe(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()), kernel=kernel) as probe:
            probe.arm()
            (accumulator,) = probe._accumulators
            begun = [call for output in outputs if (call := accumulator.begin(output)) is not None]
            if begun:
                probe._sums.add(begun)
            seen[kernel] = sync.to_host(probe.read()), [*accumulator.dead_units()]

    np.testing.assert_allclose(seen["native"][0], seen["torch"][0], rtol=2e-5, atol=1e-6)
    assert seen["native"][1] == seen["torch"][1]


@pytest.mark.parametrize("kernel", ["native", "torch"])
@pytest.mark.parametrize("module", [nn.ReLU(), nn.Tanh(), nn.Softmax(0)], ids=str)
def test_a_single_number_is_one_unit(module, kernel):
    with ActivationProbe(nn.Sequential(module), kernel=kernel) as probe:
        probe.arm()
        output = module(torch.tensor(-0.3))
        row_S = sync.to_host(probe.read())[:, 0]

    assert row_S[MEAN] == pytest.approx(output.item())
    assert row_S[DEAD] == (1.0 if isinstance(module, nn.ReLU) else pytest.approx(math.nan, nan_ok=True))


def test_a_module_may_give_a_tensor_of_another_class_at_one_of_its_calls():
    class Named(torch.Tensor):
        pass

    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(5)).relu()
    with ActivationProbe(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU())) as probe:
        probe.arm()
        (accumulator,) = probe._accumulators
        accumulator.add(x.as_subclass(Named))
        accumulator.add(2 * x)
        row_S = sync.to_host(probe.read())[:, 0]

    np.testing.assert_allclose(row_S, reference.activation_statistics([x, 2 * x], 1, RELU_DEAD), rtol=1e-5)


@pytest.mark.parametrize("is_named_first", [False, True])
def test_a_micro_batch_may_give_a_tensor_of_another_class(is_named_first):
    class Named(torch.Tensor):
        pass

    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(1)).relu()
    with ActivationProbe(nn.Sequential(nn.Linear(1, 1), nn.ReLU())) as probe:
        probe.arm()
        (accumulator,) = probe._accumulators
        for i in range(2):
            batch = x[2 * i : 2 * i + 2]
            accumulator.add(batch.as_subclass(Named) if i != is_named_first else batch)
            accumulator.call = 0
        row_S = sync.to_host(probe.read())[:, 0]

    assert accumulator.packed_units().flags().tolist() == accumulator.dead_units().tolist() == (x == 0).all(0).tolist()
    assert row_S[DEAD] == pytest.approx((x == 0).all(0).float().mean())
    assert 0 < row_S[DEAD] < 1


@pytest.mark.parametrize("kernel", ["native", "torch"])
def test_micro_batches_of_other_lengths_count_from_the_one_where_the_length_changed(kernel):
    with ActivationProbe(nn.Sequential(nn.ReLU()), kernel=kernel) as probe:
        probe.arm()
        (accumulator,) = probe._accumulators
        for x in (torch.ones(2, 9), torch.tensor([[1.0, -1.0, -1.0]]), torch.tensor([[-1.0, -1.0, 1.0]])):
            accumulator.add(x.relu())
            accumulator.call = 0
        row_S = sync.to_host(probe.read())[:, 0]

    assert accumulator.packed_units().flags().tolist() == [False, True, False]
    assert row_S[DEAD] == pytest.approx(1 / 3)
