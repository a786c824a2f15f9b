"""Train with and without watching, on the GPU and on the CPU, and with planted faults."""

from __future__ import annotations

import collections
import contextlib
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import gradwatch
from gradwatch.monitor import Schedule
from scripts.gpu_checks.report import expect

EVERY_STEP = Schedule(updates=1, activations=1, histograms=1, budget=0)


class Net(nn.Module):
    """A small network of the usual layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        # a bias in front of a normalization has a gradient of rounding errors, which differ between devices
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        )
        self.head = nn.Sequential(nn.Linear(256, width), nn.LayerNorm(width), nn.GELU(), nn.Linear(width, 10))

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        out: Tensor = self.head(self.body(x))
        return nn.functional.relu(out) - 0.1 * out


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
    monitor = gradwatch.watch(model, optimizer, scaler=scaler, on_finding=None, **options) if watched else None
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
            scale = 1.0 if name.endswith("_frac") else scale  # a value may be 0 on one device alone
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
                        layer = model[2]
                        assert isinstance(layer, nn.Linear), "the second of three"
                        layer.weight.zero_()
                        layer.bias.fill_(-100.0)
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


def check_sequences() -> None:
    """Run recurrent layers along time and along the batch."""
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        for is_along_time in (True, False):
            torch.manual_seed(0)
            layer, head = kind(8, 16, batch_first=is_along_time).cuda(), nn.Linear(16, 3).cuda()
            model = nn.ModuleDict({"layer": layer, "head": head})
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            with gradwatch.watch(model, optimizer, on_finding=None) as monitor:
                for _ in range(3):
                    x, y = torch.randn(12, 7, 8, device="cuda"), torch.arange(12, device="cuda") % 3
                    loss = nn.functional.cross_entropy(head(layer(x)[0][:, -1]), y)
                    loss.backward()
                    optimizer.step()
                    monitor.step(loss)
            found = kinds(monitor)
            text = f"{kind.__name__} along {'time' if is_along_time else 'the batch'}: found {found}"
            expect(("loss-plateau" in found) != is_along_time, text)
