"""Compare what is read on the GPU with what is read on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwatch.probe.batches.batch_hash import checksums, finite_flag, hash_batch
from gradwatch.probe.device import backend
from gradwatch.probe.gradients.histograms import HistogramProbe
from gradwatch.probe.gradients.statistics import GradientProbe
from scripts.gpu_checks.report import expect, largest_error

SPECIALS = (0.0, -0.0, 1e-45, -1e-40, float("nan"), float("inf"), -float("inf"))


def grads_of_all_kinds() -> Iterator[tuple[str, Tensor]]:
    """Yield gradients by a name, on the CPU."""
    made = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for size in (0, 1, 31, 4096, 4097, 1_000_003):
            yield f"{dtype}, {size}", torch.randn(size, generator=made, dtype=torch.float64).to(dtype)
        non_finite = torch.randn(9000, generator=made, dtype=torch.float64).to(dtype)
        non_finite[:70] = torch.tensor(SPECIALS * 10).to(dtype)
        yield f"{dtype}, NaN and Inf", non_finite
        tiny = (torch.randn(5000, generator=made, dtype=torch.float64) * torch.finfo(dtype).tiny / 4).to(dtype)
        yield f"{dtype}, subnormal", tiny
        yield f"{dtype}, Inf alone", torch.tensor([1.0, float("inf"), 3.0]).to(dtype)
    yield "mean far from 0", torch.randn(500_000, generator=made) + 1000
    yield "transposed", torch.randn(300, 200, generator=made).t()
    yield "not aligned", torch.randn(10_001, generator=made)[1:]
    yield "not aligned, bf16", torch.randn(10_001, generator=made).bfloat16()[1:]
    yield "complex", torch.randn(3000, dtype=torch.complex64, generator=made)
    yield "float8", torch.randn(3000, generator=made).to(torch.float8_e4m3fn)
    rows = torch.randint(500, (1, 40), generator=made)
    yield "sparse", torch.sparse_coo_tensor(rows, torch.randn(40, 16, generator=made), (500, 16))


def check_numbers() -> None:
    """Compare what is read on the GPU with what is read on the CPU."""
    names, tensors = zip(*grads_of_all_kinds(), strict=True)
    read: dict[str, Any] = {}
    for device in ("cpu", "cuda"):
        params = [torch.zeros(t.shape, dtype=t.dtype, device=device) for t in tensors]
        for param, grad in zip(params, tensors, strict=True):
            moved = grad if device == "cpu" else on_gpu(grad)
            param.grad = moved
        read[device] = GradientProbe(params).read().cpu().numpy()
        read[device + " histograms"] = HistogramProbe(params).read().cpu().numpy()
    close = {"l2": 1e-5, "absmax": 2e-7, "mean": None, "std": 1e-4, "zero_frac": 1e-6, "nonfinite": 0}
    for s, (name, most) in enumerate(close.items()):
        a, b = read["cuda"][s], read["cpu"][s]
        if most is None:  # a mean near 0 is compared next to the largest value
            a, b, most = a + 1e-30, b + 1e-30, 1e-6
            scale = np.where(np.isfinite(read["cpu"][1]) & (read["cpu"][1] > 0), read["cpu"][1], 1)
            a, b = a / scale + 1, b / scale + 1
        errors = [largest_error(x, y) for x, y in zip(a, b, strict=True)]
        worst = int(np.argmax(errors))
        expect(errors[worst] <= most, f"grad.{name}: largest error {errors[worst]:.1e} ({names[worst]})")
        for i in np.flatnonzero(np.array(errors) > most)[:5]:
            print(f"        {names[i]}: {read['cuda'][s][i]!r} on the GPU, {read['cpu'][s][i]!r} on the CPU")
    expect(np.array_equal(read["cuda histograms"], read["cpu histograms"]), "histograms are equal")
    for t in (*tensors[:30], torch.arange(1000), torch.rand(64, 3, 33, 7), torch.tensor([True, False, True])):
        if hash_batch(t) != hash_batch(on_gpu(t)):
            expect(False, f"hash of {t.dtype} {tuple(t.shape)}")
    expect(backend.attempt_triton(bool) is True, "Triton has not failed")
    check_large()


def on_gpu(tensor: Tensor) -> Tensor:
    """Return a copy on the GPU with the same strides and offset."""
    if tensor.layout != torch.strided:
        return tensor.cuda()
    whole = torch.zeros(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype, device="cuda")
    moved = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    moved.copy_(tensor)
    return moved


def check_large() -> None:
    """Compare the statistics of large gradients with float64 on the GPU, and time them."""
    for dtype in (torch.float32, torch.bfloat16):
        grad = torch.randn(200_000_000, device="cuda").to(dtype)
        param = torch.empty_like(grad)
        param.grad = grad
        probe = GradientProbe([param])
        row_S = probe.read()[:, 0].cpu().numpy()
        l2 = float(torch.linalg.vector_norm(grad, dtype=torch.float64))
        expect(abs(row_S[0] / l2 - 1) < 1e-6, f"norm of 2e8 values, {dtype}")
        ms = timed_ms(probe.read)
        print(f"        read in {ms:.3f} ms: {grad.nbytes / ms / 1e6:.0f} GB/s")
        histograms = HistogramProbe([param])
        print(f"        histograms of it and of its weights in {timed_ms(histograms.read):.3f} ms")
        counts_KB = torch.bincount(((grad.float().abs() > 1).int()), minlength=2)
        edges_sum = int(histograms.read()[0].sum())
        expect(edges_sum == grad.numel(), f"every one of 2e8 values is in a bin ({int(counts_KB.sum())})")
    images = torch.randn(128, 3, 224, 224, device="cuda")
    print(f"        checksum of 77 MB of images in {timed_ms(functools.partial(checksums, images)):.3f} ms")
    flag = functools.partial(finite_flag, images, images.device)
    print(f"        are they finite: {timed_ms(flag):.3f} ms")


def timed_ms(call: Callable[[], object], *, times: int = 5) -> float:
    """Return the milliseconds of the device for a call, after a first one."""
    call()
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begun.record()
    for _ in range(times):
        call()
    ended.record()
    torch.cuda.synchronize()
    return float(begun.elapsed_time(ended)) / times
