"""Check on a GPU what the tests check without one: equal numbers, equal trainings, findings, and no waiting.

    PYTHONPATH=. python scripts/tools/check_gpu.py [--only numbers,twins,...] [--seconds 60]

Each part prints one line for each thing that it compares, beginning with `ok` or `WRONG`, and a part that raises prints
its traceback. The exit code is 1 if anything is wrong, and 2 if torch sees no GPU. `--seconds` ends a part that takes
longer.

numbers   gradient statistics, histograms, checksums and update sizes, on the GPU and on the CPU, also of subnormal
          values, of views that are not contiguous or not aligned, and of two hundred million values
twins     a training with and without watching, bit by bit: fp32, bf16, GradScaler, clipping, accumulation
devices   one training on the GPU and on the CPU: the recorded rows agree
waits     the places in gradwatch that wait for the device in 150 watched steps, as torch reports them
faults    a NaN, a loss scale that collapses, and dead units are found on the GPU
graph     a watched step that is captured in a CUDA graph records what the eager step records
compiled  a watched step under torch.compile is recorded, and trains as without watching
config    `gradwatch train` on CUDA: an interrupted run that resumes, and `gradwatch replay`, bit by bit
plan      the planned peak of memory next to the peak of the allocator
ranks     DDP and FSDP2 by NCCL, as one process
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.config.load import load_config
from gradwatch.models import gpt
from gradwatch.monitor import Schedule
from gradwatch.planning.training import ConfigPlanner
from gradwatch.probe.batches.batch_hash import hash_batch
from gradwatch.probe.device import backend
from gradwatch.probe.gradients.histograms import HistogramProbe
from gradwatch.probe.gradients.statistics import GradientProbe
from gradwatch.records import DataSpec
from gradwatch.train.training_state import TrainingState

SPECIALS = (0.0, -0.0, 1e-45, -1e-40, float("nan"), float("inf"), -float("inf"))
EVERY_STEP = Schedule(updates=1, activations=1, histograms=1, budget=0)
failures = 0


def expect(is_right: bool, text: str) -> None:
    """Print whether something is as it should be."""
    global failures
    failures += not is_right
    print(f"{'ok   ' if is_right else 'WRONG'} {text}", flush=True)


def largest_error(a: Any, b: Any) -> float:
    """Return the largest relative error of numbers against others; inf if one is nan or infinite in only one of them."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if not np.array_equal(np.isnan(x), np.isnan(y)) or not np.array_equal(x[np.isinf(x)], y[np.isinf(y)]):
        return float("inf")
    are_finite = np.isfinite(y)
    scale = np.maximum(np.abs(y[are_finite]), 1e-30)
    return float(np.max(np.abs(x[are_finite] - y[are_finite]) / scale, initial=0.0))


def grads_of_all_kinds() -> Iterator[tuple[str, Tensor]]:
    """Yield gradients by a name, on the CPU."""
    made = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for size in (0, 1, 31, 4096, 4097, 1_000_003):
            yield f"{dtype}, {size}", torch.randn(size, generator=made, dtype=torch.float64).to(dtype)
        ill = torch.randn(9000, generator=made, dtype=torch.float64).to(dtype)
        ill[:70] = torch.tensor(SPECIALS * 10).to(dtype)
        yield f"{dtype}, NaN and Inf", ill
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
    close = {"l2": 1e-5, "absmax": 0, "mean": None, "std": 1e-4, "zero_frac": 1e-6, "nonfinite": 0}
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
    expect(backend.triton() is not None, "Triton has not failed")
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
    from gradwatch.probe.batches.batch_hash import checksums, finite_flag

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
    return begun.elapsed_time(ended) / times


class Net(nn.Module):
    """A small network of the usual layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Linear(256, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        out: Tensor = self.head(self.body(x))
        return nn.functional.relu(out) - out.mean()


def train(
    variant: str, *, watched: bool, steps: int = 30, device: str = "cuda", **options: Any
) -> tuple[list[Tensor], gradwatch.Monitor | None]:
    """Train for some steps, and return losses and weights, and the monitor after it has closed."""
    torch.manual_seed(0)
    model = Net().to(device)
    batches = [(torch.randn(32, 3, 12, 12).to(device), torch.randint(10, (32,)).to(device)) for _ in range(8)]
    is_fused = device == "cuda" and variant != "foreach"
    kind = torch.optim.SGD if variant == "fp32" else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-3, fused=is_fused)
    scaler = torch.amp.GradScaler(device) if variant in ("fp16", "foreach") else None
    given = {"scaler": scaler} if scaler else {}
    monitor = gradwatch.watch(model, optimizer, on_finding=None, **given, **options) if watched else None
    format_ = {"bf16": torch.bfloat16, "fp16": torch.float16, "foreach": torch.float16}.get(variant)
    losses = []
    for step in range(steps):
        x, y = batches[step % len(batches)]
        with torch.autocast(device, format_) if format_ else contextlib.nullcontext():
            loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        (scaler.scale(loss) if scaler else loss).backward()
        if variant == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        if monitor:
            monitor.step(loss, batch=x)
        losses.append(loss.detach())
    if monitor:
        monitor.close()
    return [torch.stack(losses), *(p.detach() for p in model.parameters()), *model.buffers()], monitor


def check_twins() -> None:
    """Compare trainings with and without watching."""
    torch.backends.cudnn.deterministic = True
    for variant in ("fp32", "adamw", "bf16", "fp16", "foreach", "clip"):
        bare, _ = train(variant, watched=False)
        again, _ = train(variant, watched=False)
        if not all(torch.equal(a, b) for a, b in zip(bare, again, strict=True)):
            print(f"        {variant}: not reproducible without watching")
        watched, monitor = train(variant, watched=True, schedule=EVERY_STEP)
        assert monitor is not None, "watched"
        expect(all(torch.equal(a, b) for a, b in zip(bare, watched, strict=True)), f"{variant}: bit-identical")
        left_out = [*monitor.attempts.left_out]
        rows, loss = len(monitor.history.run.rows()[0]), torch.stack([*bare[0]]).cpu().numpy()
        recorded = gradwatch.Run(monitor.history)["loss"] if hasattr(gradwatch, "Run") else None
        expect(rows == 30 and not left_out, f"{variant}: {rows} rows, left out {left_out}")
        if recorded is not None:
            expect(bool(np.array_equal(np.float32(recorded), loss)), f"{variant}: the losses are those of the loop")


def check_devices() -> None:
    """Compare the rows of a training on the GPU with those of the same training on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    rows: dict[str, Any] = {}
    for device in ("cpu", "cuda"):
        _, monitor = train("fp32", watched=True, device=device, steps=12, schedule=EVERY_STEP)
        assert monitor is not None, "watched"
        rows[device] = monitor.history
    for table in ("param", "act", "run"):
        cpu, cuda = (getattr(rows[device], table) for device in ("cpu", "cuda"))
        (_, a_TSL), (_, b_TSL) = cuda.rows(), cpu.rows()
        if a_TSL.shape != b_TSL.shape:
            expect(False, f"{table}: shape {a_TSL.shape} on the GPU, {b_TSL.shape} on the CPU")
            continue
        for s, name in enumerate(cpu.statistics):
            if name.endswith(("_ms", "_bytes", "per_s")):
                continue
            scale = np.nanmax(np.abs(np.where(np.isfinite(b_TSL[:, s]), b_TSL[:, s], 0)), initial=1e-30)
            error = np.nanmax(np.abs(a_TSL[:, s] - b_TSL[:, s]), initial=0.0) / scale
            holes = int((np.isnan(a_TSL[:, s]) != np.isnan(b_TSL[:, s])).sum())
            expect(error < 2e-3 and not holes, f"{name}: error {error:.1e} of the largest value, {holes} holes")


def check_waits() -> None:
    """Print the places that wait for the device in watched steps."""
    seen: collections.Counter[str] = collections.Counter()

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" not in str(message):
            print(f"        warning: {str(message)[:150]}")
            return
        frames = [f for f in traceback.extract_stack() if "gradwatch" in f.filename and "check_gpu" not in f.filename]
        seen[" < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in frames[::-1][:5]) or "the loop"] += 1

    warnings.simplefilter("always")
    before, warnings.showwarning = warnings.showwarning, note
    try:
        for variant in ("adamw", "clip", "bf16", "fp16"):
            seen.clear()
            torch.cuda.set_sync_debug_mode("warn")
            train(variant, watched=True, steps=150)
            torch.cuda.set_sync_debug_mode("default")
            print(f"        {variant}: {sum(seen.values())} waits in 150 steps")
            for place, times in seen.most_common(12):
                print(f"          {times:4}  {place}")
    finally:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = before


def kinds(monitor: gradwatch.Monitor) -> dict[str, int]:
    """Return the findings of a run: kinds, and when each began."""
    return {finding.kind: finding.since for finding in monitor.findings()}


def check_faults() -> None:
    """Plant faults, and look for their findings."""
    for fault in ("healthy", "nan", "scale", "dead"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14) if fault == "scale" else None
        with gradwatch.watch(model, optimizer, scaler=scaler, on_finding=None) as monitor:
            for step in range(200):
                x = torch.randn(64, 32, device="cuda")
                y = x[:, :4].argmax(1)
                if fault == "nan" and step == 100:
                    x[3, 5] = float("nan")
                if fault == "dead" and step == 60:
                    with torch.no_grad():
                        next(model[2].parameters()).zero_()
                        model[2].bias.fill_(-100.0)
                with torch.autocast("cuda", torch.float16, enabled=scaler is not None):
                    loss = nn.functional.cross_entropy(model(x), y)
                    loss = loss * (1e30 if fault == "scale" and step > 60 else 1)
                optimizer.zero_grad()
                (scaler.scale(loss) if scaler else loss).backward()
                scaler.step(optimizer) if scaler else optimizer.step()
                if scaler:
                    scaler.update()
                monitor.step(loss, batch=x)
        found = kinds(monitor)
        wanted = {"healthy": set(), "nan": {"non-finite"}, "scale": {"loss-scale-collapse"}, "dead": {"dead-relu"}}[
            fault
        ]
        is_right = not found if fault == "healthy" else bool(wanted & set(found))
        expect(is_right, f"{fault}: found {found}, left out {[*monitor.attempts.left_out]}")


def check_graph() -> None:
    """Compare a captured watched step with the eager one."""
    norms = {}
    for is_captured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True, fused=True)
        x, y = torch.randn(40, 64, 64, device="cuda"), torch.randint(8, (40, 64), device="cuda")
        here, there = x[0].clone(), y[0].clone()
        monitor = gradwatch.watch(model, optimizer, on_finding=None)

        def step(
            model: nn.Module = model, optimizer: Any = optimizer, here: Tensor = here, there: Any = there
        ) -> Tensor:
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(model(here), there)
            loss.backward()
            optimizer.step()
            return loss

        side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                monitor.step(step(), batch=here)
        torch.cuda.current_stream().wait_stream(side)
        if is_captured:
            with torch.cuda.graph(graph):
                loss = step()
        for i in range(5, 40):
            here.copy_(x[i])
            there.copy_(y[i])
            if is_captured:
                graph.replay()
            else:
                loss = step()
            monitor.step(loss, batch=here)
        monitor.close()
        steps_T, run_TS1 = monitor.history.run.rows()
        column = monitor.history.run.statistics.index("grad_norm.before_clip")
        norms[is_captured] = run_TS1[:, column, 0]
        print(f"        {len(steps_T)} rows, left out {[*monitor.attempts.left_out]}, {kinds(monitor)}")
    expect(largest_error(norms[True], norms[False]) < 1e-5, "norms of captured steps are those of eager steps")


def check_compiled() -> None:
    """Train under torch.compile with and without watching."""
    ended = {}
    for watched in (False, True):
        torch.manual_seed(0)
        torch.compiler.reset()
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        monitor = gradwatch.watch(model, optimizer, on_finding=None) if watched else None
        forward = torch.compile(model)
        for _ in range(25):
            x, y = torch.randn(32, 3, 12, 12, device="cuda"), torch.randint(10, (32,), device="cuda")
            loss = nn.functional.cross_entropy(forward(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if monitor:
                monitor.step(loss, batch=x)
        ended[watched] = [p.detach().clone() for p in model.parameters()]
        if monitor:
            monitor.close()
            acts = monitor.history.act.rows()[1]
            print(f"        activations {acts.shape}, {np.isfinite(acts[:, 2]).mean():.0%} of the means are numbers")
            expect(not monitor.attempts.left_out, f"left out {[*monitor.attempts.left_out]}")
    is_same = all(torch.equal(a, b) for a, b in zip(ended[True], ended[False], strict=True))
    error = max(float((a - b).abs().max()) for a, b in zip(ended[True], ended[False], strict=True))
    expect(is_same, f"compiled: bit-identical with and without watching (largest difference {error:.1e})")


def environment() -> dict[str, str]:
    """Return the environment of a process that imports this checkout."""
    return {**os.environ, "PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}", "COLUMNS": "160"}


def command(*words: str, folder: Path) -> tuple[int, str]:
    """Run gradwatch, and return its exit code and output."""
    done = subprocess.run(
        [sys.executable, "-m", "gradwatch", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def check_config() -> None:
    """Train a shipped config on CUDA, resume it, and replay a step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = str(Path.cwd() / "configs/quickstart.yaml")
        on_cuda = ["--set", "train.device=cuda", "--set", "run.deterministic=true", "--set", "train.epochs=4"]
        code, out = command("train", config, *on_cuda, "--set", "run.name=whole", folder=folder)
        expect(code == 0, f"gradwatch train: exit code {code}, {out.strip().splitlines()[-3:]}")
        (whole,) = (folder / "runs").glob("whole*")
        for step in ("3", "60"):
            code, out = command("replay", str(whole), "--step", step, folder=folder)
            expect(code == 0, f"gradwatch replay --step {step}: exit code {code}, {out.strip().splitlines()[:4]}")
        words = [sys.executable, "-m", "gradwatch", "train", config, *on_cuda, "--set", "run.name=cut"]
        child = subprocess.Popen(words, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 40
        while not [*(folder / "runs").glob("cut*/checkpoints/*")] and time.monotonic() < deadline:
            time.sleep(0.02)
        child.send_signal(signal.SIGINT)
        child.communicate()
        (cut,) = (folder / "runs").glob("cut*")
        code, out = command("train", "--resume", str(cut), folder=folder)
        expect(child.returncode == 3 and code == 0, f"interrupted with {child.returncode}, resumed: exit code {code}")
        histories = [gradwatch.load_run(run).history for run in (whole, cut)]
        for table in ("param", "act"):
            tables = [getattr(history, table).rows() for history in histories]
            is_same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*tables, strict=True))
            expect(is_same, f"resumed: the table {table} of {tables[0][1].shape} is that of the whole run")


def check_plan() -> None:
    """Compare the planned peak with that of the allocator."""
    for path in ("quickstart", "text-gpt", "text-gpt-fp16", "cifar10-resnet18"):
        with contextlib.suppress(gradwatch.GradwatchError):
            compare_plan(path)
    torch.cuda.empty_cache()
    with torch.device("cuda"):
        model = gpt.build(
            DataSpec(input_shape=(1024,), outputs=50257, kind="tokens"), layers=12, heads=12, width=768
        ).train()
        x, y = torch.randint(50257, (8, 1024)), torch.randint(50257, (8, 1024))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            scores = model(x)
        return nn.functional.cross_entropy(scores.float().flatten(0, -2), y.flatten())

    began = time.perf_counter()
    planned = gradwatch.plan(model, step, x, y, optimizer=optimizer)
    seconds = time.perf_counter() - began
    compare("GPT-2 small, batch 8", planned, functools.partial(one_step, model, step, optimizer, x, y), seconds)


def one_step(model: nn.Module, step: Any, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """Make one step."""
    optimizer.zero_grad(set_to_none=True)
    step(x, y).backward()
    optimizer.step()


def compare_plan(name: str) -> None:
    """Compare the plan of a shipped config."""

    def load(changes: Any) -> Any:
        settings = {"train.device": "cuda", "data.workers": 0, **changes}
        if name.startswith("cifar"):  # of the same form as the digits' config, with data that needs no download
            settings |= {"data": {"name": "digits", "batch_size": 64}}
        return load_config(Path("configs") / f"{name}.yaml", [f"{k}={json.dumps(v)}" for k, v in settings.items()])

    config = load({})
    began = time.perf_counter()
    planned = ConfigPlanner(load).plan()
    seconds = time.perf_counter() - began
    training = TrainingState.build(config)
    batches = iter(training.batches.epoch(0))
    window = [next(batches) for _ in range(config.train.accumulate)]
    stepper = training.stepper(lambda: 1.0)
    compare(name, planned, lambda: stepper.run(window), seconds)


def compare(name: str, planned: Any, step: Callable[[], object], seconds: float) -> None:
    """Run three steps, and compare the peak of the allocator with the plan."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        step()
    peak = torch.cuda.max_memory_allocated()
    error = planned.peak_bytes / peak - 1
    text = f"{name}: planned {planned.peak_bytes / 1e6:.2f} MB in {seconds:.1f} s, allocated {peak / 1e6:.2f} MB"
    expect(abs(error) < 0.02, f"{text}, {100 * error:+.1f} %; parts {planned.to_json()['parts']}")


def check_ranks() -> None:
    """Watch DDP and FSDP2 by NCCL."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    torch.distributed.init_process_group("nccl", device_id=torch.device("cuda", 0))
    for kind in ("ddp", "fsdp"):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)).cuda()
        if kind == "fsdp":
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        forward = DistributedDataParallel(model) if kind == "ddp" else model
        with (
            tempfile.TemporaryDirectory() as folder,
            gradwatch.watch(model, optimizer, run=f"{folder}/run", on_finding=None) as monitor,
        ):
            for _ in range(40):
                x = torch.randn(64, 64, device="cuda")
                loss = nn.functional.cross_entropy(forward(x), x[:, :8].argmax(1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                monitor.step(loss, batch=x)
            monitor.close()
            norms = monitor.history.run.rows()[1][:, monitor.history.run.statistics.index("grad_norm.before_clip"), 0]
            left_out = [*monitor.attempts.left_out]
            is_right = len(norms) == 40 and bool(np.isfinite(norms).all()) and not left_out
            expect(is_right, f"{kind}: {len(norms)} rows, left out {left_out}, {kinds(monitor)}")
    torch.distributed.destroy_process_group()


PARTS: dict[str, Callable[[], None]] = {
    "numbers": check_numbers,
    "twins": check_twins,
    "devices": check_devices,
    "waits": check_waits,
    "faults": check_faults,
    "graph": check_graph,
    "compiled": check_compiled,
    "config": check_config,
    "plan": check_plan,
    "ranks": check_ranks,
}


def main() -> int:
    """Run the parts."""
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--only", default=",".join(PARTS))
    asked.add_argument("--seconds", type=int, default=60)
    options = asked.parse_args()
    if not torch.cuda.is_available():
        print("error: scripts/tools/check_gpu.py: torch sees no GPU, expected one with CUDA", file=sys.stderr)
        return 2

    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {options.seconds} s")

    signal.signal(signal.SIGALRM, stop)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for part in options.only.split(","):
        began = time.perf_counter()
        print(f"== {part}", flush=True)
        signal.alarm(options.seconds)
        try:
            PARTS[part]()
        except Exception:  # of any kind: the other parts go on
            expect(False, "\n".join(traceback.format_exc().splitlines()[-12:]))
        signal.alarm(0)
        print(f"   {part}: {time.perf_counter() - began:.1f} s", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
