"""Two processes train a small model with a plain DDP loop, and again with the trainers of other libraries."""

import importlib
import importlib.util
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import gradwatch

STEPS, BATCH, LIMIT, LR = 6, 8, 0.5, 0.05


class Samples(Dataset):
    """The samples of one rank."""

    def __init__(self, rank):
        self.x = torch.randn(STEPS * BATCH, 6, generator=torch.Generator().manual_seed(rank))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "labels": self.x[index].sum(0, keepdim=True)}


class Regression(nn.Module):
    """Returns its loss, as models of transformers do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, labels):
        return {"loss": F.mse_loss(self.net(x), labels)}


def loader(rank):
    return DataLoader(Samples(rank), batch_size=BATCH)


def plain(rank, run):
    model = DistributedDataParallel(Regression())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with gradwatch.watch(model, optimizer, run=run, on_finding=None) as monitor:
        for batch in loader(rank):
            loss = model(**batch)["loss"]
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss, batch=batch)
    return monitor


def accelerate(rank, run):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Regression()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=LR))
    with gradwatch.watch(model, optimizer, run=run, on_finding=None) as monitor:
        for batch in loader(rank):
            loss = model(**batch)["loss"]
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss, batch=batch)
    return monitor


def transformers(rank, run):
    from transformers import Trainer, TrainingArguments

    from gradwatch.callbacks.transformers import Watch

    class OwnData(Trainer):
        def get_train_dataloader(self):
            return loader(rank)

    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    watch = Watch(run=run, on_finding=None)
    args = TrainingArguments(
        output_dir=str(run.parent / "out"),
        max_steps=STEPS,
        max_grad_norm=LIMIT,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo",
        disable_tqdm=True,
    )
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    OwnData(
        model=model, args=args, train_dataset=Samples(rank), callbacks=[watch], optimizers=(optimizer, schedule)
    ).train()
    return watch.monitor


def lightning(rank, run):
    from lightning.pytorch.strategies import DDPStrategy

    return fit(rank, run, strategy=DDPStrategy(process_group_backend="gloo"))


def lightning_sharded(rank, run):
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(module):
        mesh = module.device_mesh["data_parallel"]
        for layer in module.model.net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(module.model, mesh=mesh)

    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1}
    return fit(rank, run, strategy=ModelParallelStrategy(process_group_backend="gloo", **sizes), shard=shard)


def fit(rank, run, *, strategy, shard=None):
    from lightning.pytorch import LightningModule, Trainer

    from gradwatch.callbacks.lightning import Watch

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Regression()

        def configure_model(self):
            if shard:
                shard(self)

        def training_step(self, batch, index):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LR)

    watch = Watch(run=run, on_finding=None)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        gradient_clip_val=LIMIT,
        use_distributed_sampler=False,
        callbacks=[watch],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader(rank))
    return watch.monitor


TRAINS = {
    "plain": plain,
    "accelerate": accelerate,
    "transformers": transformers,
    "lightning": lightning,
    "lightning_sharded": lightning_sharded,
}


def installed():
    """Return the names of the trainings that can run here."""
    names = [name for name in TRAINS if name == "plain" or importlib.util.find_spec(name.partition("_")[0])]
    can_shard = hasattr(torch.cpu.Stream, "record_event")  # an older torch shards no model on a CPU
    return [name for name in names if can_shard or name != "lightning_sharded"]


def import_libraries():
    """Import the callbacks of the libraries that are installed."""
    for library in {name.partition("_")[0] for name in installed()} - {"plain"}:
        importlib.import_module(f"gradwatch.callbacks.{library}")


def train_all(rank, folder, port):
    """Train with a plain loop and with each library that is installed, and return what was recorded."""
    os.environ |= {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": port,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "none",  # as under torchrun
    }
    dist.init_process_group("gloo")
    said = {}
    for name in installed():
        monitor = TRAINS[name](rank, folder / name)
        history = monitor.history
        said[name] = {
            "before_T": history["grad_norm.before_clip"].tolist(),
            "after_T": history["grad_norm.after_clip"].tolist(),
            "loss_T": history["loss"].tolist(),
            "norm_TL": history["grad.l2"].tolist(),
            "findings": [str(finding) for finding in monitor.findings()],
            "run_dir": str(monitor.run_dir),
        }
    return said
