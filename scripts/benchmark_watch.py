"""What watching costs in a loop of one's own, beside what others charge for less.

    python scripts/benchmark_watch.py [--rounds 25] [--only tiny,mlp] [--arms bare,stock] [--steps 20] [--clock wall]

The bare loop is written by hand, with torch's fused AdamW. `stock` is the same loop under `gradwatch.watch` with
everything on at its defaults: all statistics at every step, detectors, history on disk, TensorBoard. `watched` is that
with `gradwatch.optim.AdamW`, which measures in its step. The others are what their documentation has one write, at
every step unless said; those of packages that are not installed (wandb, lightning, composer, cockpit) are left out,
and so is one that does not take a model, with its reason.

Each round runs a stretch of steps of every arm, in an order that changes from round to round, so that what else the
machine does hits all arms alike; a stretch under gradwatch ends when its thread has taken everything in. Shown is the
median over rounds of the ratio to the bare loop in the same round, with the quartiles. `--clock cpu` counts the
processor time of all threads, as if none of them ran beside another: an upper bound, which a machine that is busy with
something else still tells.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import gradwatch
from gradwatch import optim
from gradwatch.models import _torchvision, gpt, mlp
from gradwatch.records import DataSpec

WARM_UP_S = 3.0
NUM_BATCHES = 64

Batches = list[tuple[Tensor, Tensor]]
Arm = Callable[[], None]
"""Trains one stretch of steps."""


@dataclass(frozen=True)
class Workload:
    """A model, its batches, and how many steps one stretch takes."""

    title: str
    stretch: int
    model: Callable[[], nn.Module]
    batches: Callable[[], Batches]


def blocks(num: int, width: int) -> nn.Module:
    """Return a residual stack with four small tensors per block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = x + 0.1 * self.linear(self.norm(x)).relu()
            return out

    return nn.Sequential(*(Block() for _ in range(num)), nn.Linear(width, 10))


def labelled(shape: tuple[int, ...], classes: int = 10) -> Batches:
    """Return batches of noise with labels."""
    return [(torch.randn(shape), torch.randint(classes, shape[:1])) for _ in range(NUM_BATCHES)]


def texts(batch: int, length: int, vocabulary: int) -> Batches:
    """Return batches of random tokens, each to be predicted from those before it."""
    tokens = [torch.randint(vocabulary, (batch, length + 1)) for _ in range(NUM_BATCHES)]
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


def classes(*shape: int) -> DataSpec:
    """Return what a model must know of inputs of a shape in ten classes."""
    return DataSpec(input_shape=shape, outputs=10, kind="classes")


WORKLOADS = {
    "tiny": Workload(
        "784-128-10, batch 32",
        400,
        lambda: nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)),
        lambda: labelled((32, 784)),
    ),
    "mlp": Workload(
        "MLP 30 x 256, batch 128",
        20,
        lambda: mlp.build(classes(256), depth=30, width=256, residual=True),
        lambda: labelled((128, 256)),
    ),
    "resnet18": Workload(
        "ResNet-18, 32 x 32, batch 64",
        4,
        lambda: _torchvision.build(classes(3, 32, 32), name="resnet18"),
        lambda: labelled((64, 3, 32, 32)),
    ),
    "gpt": Workload(
        "GPT 6 x 256, sequence 128, batch 8",
        4,
        lambda: gpt.build(DataSpec(input_shape=(128,), outputs=96, kind="tokens"), layers=6, heads=8, width=256),
        lambda: texts(8, 128, 96),
    ),
    "many": Workload("1,030 small tensors", 5, lambda: blocks(257, 48), lambda: labelled((64, 48))),
}


@dataclass(frozen=True)
class Loop:
    """A hand-written loop, and the places where a tool may take hold."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterator[tuple[Tensor, Tensor]]
    steps: int

    def run(self, before_update: Callable[[], None] | None = None, after: Callable[..., None] | None = None) -> None:
        """Train one stretch."""
        for x, y in itertools.islice(self.batches, self.steps):
            loss = nn.functional.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
            self.optimizer.zero_grad()
            loss.backward()
            if before_update:
                before_update()
            self.optimizer.step()
            if after:
                after(loss, batch=x)


def loop(workload: Workload, optimizer: Callable[..., torch.optim.Optimizer] | None = None) -> Loop:
    """Return a loop over a new model of a workload; with torch's fused AdamW unless told otherwise."""
    torch.manual_seed(0)
    model = workload.model().train()
    made = (optimizer or fused)(model.parameters(), lr=1e-4)
    return Loop(model, made, itertools.cycle(workload.batches()), workload.stretch)


def fused(params: Any, lr: float) -> torch.optim.Optimizer:
    """Return torch's fastest AdamW."""
    return torch.optim.AdamW(params, lr=lr, fused=True)


def bare(workload: Workload, stack: contextlib.ExitStack) -> Arm:
    """Nothing is watched."""
    return loop(workload).run


def unfused(workload: Workload, stack: contextlib.ExitStack) -> Arm:
    """Nothing is watched; the optimizer is as torch makes it where nobody asks for more."""
    return loop(workload, torch.optim.AdamW).run


def stock(workload: Workload, stack: contextlib.ExitStack) -> Arm:
    """Watched by gradwatch, optimizer by torch."""
    return under_watch(loop(workload), stack)


def watched(workload: Workload, stack: contextlib.ExitStack) -> Arm:
    """Watched by gradwatch, optimizer too."""
    return under_watch(loop(workload, optim.AdamW), stack)


def under_watch(of: Loop, stack: contextlib.ExitStack) -> Arm:
    """Return a loop with everything on."""
    run = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
    monitor = stack.enter_context(gradwatch.watch(of.model, of.optimizer, run=run))

    def stretch() -> None:
        of.run(after=monitor.step)
        monitor.findings()  # waits until all rows are taken in, which would else fall into the stretch of another arm

    return stretch


def naive(workload: Workload, stack: contextlib.ExitStack) -> Arm:
    """One norm per parameter, `.item()` each."""
    of = loop(workload)
    params = list(of.model.parameters())

    def read() -> None:
        for p in params:
            assert p.grad is not None, "every parameter of these models has one"
            p.grad.norm().item()

    return lambda: of.run(read)


def eight(workload: Workload, stack: contextlib.ExitStack) -> Arm:
    """Eight statistics per parameter by torch operations, `.item()` each."""
    of = loop(workload)
    params = list(of.model.parameters())

    def read() -> None:
        for p in params:
            g = p.grad
            assert g is not None, "every parameter of these models has one"
            finite = torch.isfinite(g)
            [v.item() for v in (g.norm(), g.abs().max(), g.mean(), g.std(), (g == 0).float().mean())]
            [v.item() for v in (finite.numel() - finite.sum(), p.detach().norm(), g.norm() / p.detach().norm())]

    return lambda: of.run(read)


def tensorboard(workload: Workload, stack: contextlib.ExitStack) -> Arm:
    """TensorBoard, one histogram per gradient."""
    from torch.utils.tensorboard import SummaryWriter

    of = loop(workload)
    writer = SummaryWriter(stack.enter_context(tempfile.TemporaryDirectory()))
    steps = itertools.count()

    def read() -> None:
        step = next(steps)
        for name, p in of.model.named_parameters():
            writer.add_histogram(name, p.grad, step)

    return lambda: of.run(read)


def wandb_every(log_freq: int) -> Callable[[Workload, contextlib.ExitStack], Arm]:
    """Return the arm of wandb.watch at a frequency."""

    def arm(workload: Workload, stack: contextlib.ExitStack) -> Arm:
        import wandb

        of = loop(workload)
        os.environ["WANDB_SILENT"] = "true"
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        run = wandb.init(mode="offline", dir=folder, reinit="return_previous")
        stack.callback(run.finish)
        run.watch(of.model, log="gradients", log_freq=log_freq, idx=log_freq)
        return lambda: of.run(after=lambda loss, batch: run.log({"loss": loss.item()}))

    return arm


def lightning(workload: Workload, stack: contextlib.ExitStack) -> Arm:
    """Lightning with its grad_norm logged at every step, as its documentation has it."""
    import lightning as L
    from lightning.pytorch.loggers import CSVLogger
    from lightning.pytorch.utilities import grad_norm

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    of = loop(workload)

    class Module(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = of.model

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            x, y = batch
            return nn.functional.cross_entropy(self.model(x).flatten(0, -2), y.flatten())

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.log_dict(grad_norm(self, norm_type=2))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return of.optimizer

    class Stopwatch(L.Callback):  # type: ignore[misc]
        began = ended = 0.0

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, i: int) -> None:
            self.began = self.began or clock()

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int) -> None:
            self.ended = clock()

    def stretch() -> float:
        stopwatch = Stopwatch()
        trainer = L.Trainer(
            max_steps=of.steps,
            log_every_n_steps=1,
            logger=CSVLogger(folder),
            callbacks=[stopwatch],
            accelerator="cpu",
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        loader: DataLoader[Any] = DataLoader([*itertools.islice(of.batches, of.steps)], batch_size=None)  # type: ignore[arg-type]
        trainer.fit(Module(), loader)
        return stopwatch.ended - stopwatch.began

    return stretch  # type: ignore[return-value]


def composer(workload: Workload, stack: contextlib.ExitStack) -> Arm:
    """Composer with its OptimizerMonitor at every step."""
    from composer import Callback, ComposerModel, Trainer
    from composer.callbacks import OptimizerMonitor
    from composer.loggers import InMemoryLogger

    of = loop(workload)

    class Model(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = of.model

        def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            out: Tensor = self.model(batch[0])
            return out

        def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())

    class Clock(Callback):  # type: ignore[misc]
        began = ended = 0.0

        def batch_start(self, state: Any, logger: Any) -> None:
            self.began = self.began or clock()

        def batch_end(self, state: Any, logger: Any) -> None:
            self.ended = clock()

    def stretch() -> float:
        clock = Clock()
        batches = [*itertools.islice(of.batches, of.steps)]
        trainer = Trainer(
            model=Model(),
            train_dataloader=DataLoader(batches, batch_size=None),  # type: ignore[arg-type]
            device_train_microbatch_size=len(batches[0][0]),
            max_duration=f"{of.steps}ba",
            optimizers=of.optimizer,
            callbacks=[OptimizerMonitor(batch_log_interval=1), clock],
            loggers=InMemoryLogger(),
            progress_bar=False,
            device="cpu",
        )
        trainer.fit()
        trainer.close()
        return clock.ended - clock.began

    return stretch  # type: ignore[return-value]


def cockpit_of(configuration: str) -> Callable[[Workload, contextlib.ExitStack], Arm]:
    """Return the arm of Cockpit with one of its sets of quantities."""

    def arm(workload: Workload, stack: contextlib.ExitStack) -> Arm:
        from backpack import extend
        from cockpit import Cockpit
        from cockpit.utils.configuration import configuration as quantities

        of = loop(workload)
        model, function = extend(of.model), extend(nn.CrossEntropyLoss())
        pit = Cockpit(model.parameters(), quantities=quantities(configuration))
        steps = itertools.count()

        def stretch() -> None:
            for x, y in itertools.islice(of.batches, of.steps):
                step = next(steps)
                outputs = model(x)
                loss = function(outputs, y)
                of.optimizer.zero_grad()
                told = {
                    "batch_size": len(x),
                    "individual_losses": nn.functional.cross_entropy(outputs, y, reduction="none"),
                    "loss": loss,
                    "optimizer": of.optimizer,
                }
                with pit(step, info=told):
                    loss.backward(create_graph=pit.create_graph(step))
                of.optimizer.step()

        return stretch

    return arm


ARMS: dict[str, tuple[str, Callable[[Workload, contextlib.ExitStack], Arm]]] = {
    "bare": ("by hand, fused AdamW", bare),
    "unfused": ("by hand, AdamW as it comes", unfused),
    "stock": ("**gradwatch**, torch's optimizer", stock),
    "watched": ("**gradwatch**, its own AdamW", watched),
    "naive": ("`p.grad.norm().item()`", naive),
    "eight": ("eight statistics by torch operations", eight),
    "tensorboard": ("TensorBoard, a histogram per gradient", tensorboard),
    "wandb": ("wandb.watch as it comes (every 1,000)", wandb_every(1000)),
    "wandb1": ("wandb.watch at every step", wandb_every(1)),
    "lightning": ("Lightning, its grad_norm logged", lightning),
    "composer": ("Composer, OptimizerMonitor at every step", composer),
    "economy": ("Cockpit, its economy set", cockpit_of("economy")),
    "full": ("Cockpit, its full set", cockpit_of("full")),
}
NEEDS = {"wandb": "wandb", "wandb1": "wandb", "economy": "cockpit", "full": "cockpit"}
NEEDS |= {name: name for name in ("lightning", "composer")}


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
chosen = "wall"


def clock() -> float:
    """Return the seconds of the clock that was asked for."""
    return CLOCKS[chosen]()


def measure(workload: Workload, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each arm's stretches, round by round."""
    with contextlib.ExitStack() as stack:
        made = {name: ARMS[name][1](workload, stack) for name in names}
        arms = {name: arm for name, arm in made.items() if is_warm(name, arm)}
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        order = [*arms]
        for i in range(rounds):
            for name in order[i % len(order) :] + order[: i % len(order)]:
                seconds[name].append(timed(arms[name]))
    return seconds


def is_warm(name: str, arm: Arm) -> bool:
    """Run an arm for a while; say whether it takes the model at all."""
    began = time.perf_counter()
    try:
        while time.perf_counter() - began < WARM_UP_S:
            arm()
    except Exception as error:
        if name in NEEDS:
            print(f"{name} is left out: {type(error).__name__}: {error}"[:300], flush=True)
            return False
        raise
    return True


def timed(arm: Arm) -> float:
    """Return the seconds of a stretch: what the arm says, or how long the call takes."""
    began = clock()
    told: object = arm()  # type: ignore[func-returns-value]
    return told if isinstance(told, float) else clock() - began


def cell(seconds: list[float], of_bare: list[float]) -> str:
    """Return the median ratio with its quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(seconds, of_bare, strict=True)], n=4)
    return f"{middle:.3f} [{low:.3f}-{high:.3f}]" if middle < 2 else f"{middle:.1f} [{low:.1f}-{high:.1f}]"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", default=",".join(WORKLOADS), help="workloads, comma-separated")
    parser.add_argument("--arms", default=",".join(ARMS), help="arms, comma-separated")
    parser.add_argument("--steps", type=int, help="steps of a stretch; fewer for what is slow")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    global chosen
    chosen = options.clock
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    names = [n for n in options.arms.split(",") if importlib.util.find_spec(NEEDS.get(n, "torch"))]
    names = ["bare", *(n for n in names if n != "bare")]
    columns = {}
    for name in options.only.split(","):
        workload = replace(WORKLOADS[name], stretch=options.steps or WORKLOADS[name].stretch)
        seconds = measure(workload, names, options.rounds)
        bare_ms = 1e3 * statistics.median(seconds["bare"]) / workload.stretch
        columns[f"{workload.title}, {bare_ms:.3g} ms"] = [
            cell(seconds[n], seconds["bare"]) if n in seconds else "" for n in names
        ]
        print(f"{name}: done", flush=True)
    print("| | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for i, name in enumerate(names):
        print(f"| {ARMS[name][0]} | " + " | ".join(column[i] for column in columns.values()) + " |")


if __name__ == "__main__":
    main()
