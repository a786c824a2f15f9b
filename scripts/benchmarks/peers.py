"""What other tools have one write to see gradients, each as its documentation has it, around the loop of a workload."""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from harness import clock
from torch import Tensor, nn
from torch.utils.data import DataLoader
from workloads import Workload, loop

Arm = Callable[[], float | None]
"""Trains one stretch of steps; says how long it took, where not all of the call counts."""

MakeArm = Callable[[Workload, contextlib.ExitStack], Arm]


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


def wandb_every(log_freq: int) -> MakeArm:
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

    class Module(L.LightningModule):
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

    class Stopwatch(L.Callback):
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

    return stretch


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

    return stretch


def cockpit_of(configuration: str) -> MakeArm:
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


PEERS: dict[str, tuple[str, MakeArm]] = {
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
