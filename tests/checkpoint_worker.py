"""One of four processes that save and resume trainings on one, two and four ranks."""

import errno
import os
import shutil
import signal

import torch
import torch.distributed as dist
from torch.utils.data import Dataset

STEPS, HALF = 12, 6
EXACT = {
    "model": {"name": "mlp", "depth": 3, "width": 8, "dropout": 0.2, "normalization": "batch"},
    "data": {"target": "checkpoint_worker:Points", "batch_size": 16},
    "schedule": {"name": "StepLR", "step_size": 3},
    "train": {"parallel": "ddp", "precision": "fp16", "scaler": {"growth_interval": 2}},
}
SHARDED = {"train": {"parallel": "fsdp2"}}
BAD_STEP = 5
BAD_SAMPLE = 16 * BAD_STEP + 13
SPOILT = {
    "model": {"name": "mlp", "depth": 3, "width": 8, "dropout": 0.2},
    "data": {"target": "checkpoint_worker:Spoilt", "batch_size": 16, "shuffle": False},
    "train": {"parallel": "ddp", "checkpoint": {"every": 3, "keep": 9, "best": False}},
}
HYBRID = {"train": {"parallel": "hsdp", "shard_ranks": 2}}


class Points(Dataset):
    """Random points in three classes; when rank 1 has read `reads_left` samples, it gets a SIGTERM."""

    num_classes = 3
    reads_left = None

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if Points.reads_left is not None and dist.get_rank() == 1:
            Points.reads_left -= 1
            if Points.reads_left == 0:
                os.kill(os.getpid(), signal.SIGTERM)
        return torch.randn(5) + index % 3, index % 3


class Spoilt(Points):
    """Points of which one, in the part of rank 1, is beyond float32."""

    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs * (1e39 if index == BAD_SAMPLE else 1), label


def config_of(out, *, change, steps=STEPS):
    from gradwatch.config.sections.root import Config

    base = {
        "run": {"out": str(out)},
        # four ranks, and dimensions that they do not divide
        "model": {"name": "mlp", "depth": 3, "width": 6},
        "data": {"name": "digits", "batch_size": 90},
        "optim": {"name": "adamw", "lr": 1e-2},
        "train": {"steps": steps, "threads": 1, "checkpoint": {"keep": 9}},
        "sinks": {"terminal": {"enabled": False}, "tensorboard": {"enabled": False}, "html": {"enabled": False}},
    }
    for key, value in change.items():
        base[key] = base[key] | value if key == "train" else value
    return Config.model_validate(base)


def train(out, *, change, steps=STEPS, resume=False):
    from gradwatch.train.loop import train

    directory = next(out.glob("*/")) if resume else None
    return train(config_of(out, change=change, steps=steps), resume=directory, log_format="plain").ending


def interrupted(out, change):
    """Train until rank 1 gets a SIGTERM, and check the exit code of this rank."""
    from gradwatch.cli import main

    config = out.with_name(f"{out.name}-{dist.get_rank()}.yaml")
    config.write_text(config_of(out, change=change).to_yaml())
    Points.reads_left = 30
    assert main(["train", str(config), "--log-format", "plain"]) == 3
    Points.reads_left = None


def full_disk(out, rank):
    """Train until rank 1 cannot write its part of the second checkpoint, and write down what this rank raises."""
    from gradwatch.errors import GradwatchError
    from gradwatch.state import checkpoint_folder

    write, left = checkpoint_folder.write, [1]

    def without_space(*args, **options):
        if rank == 1 and not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left.clear()
        write(*args, **options)

    checkpoint_folder.write = without_space
    try:
        train(out, change=SHARDED | {"train": SHARDED["train"] | {"checkpoint": {"every": 4}}})
    except GradwatchError as error:
        (out / f"error-{rank}").write_text(f"{type(error).__name__}: {error}")
    checkpoint_folder.write = write


class Group:
    """Joins the first ranks of the four processes for a block of trainings."""

    def __init__(self, folder, rank, size, name):
        self.folder, self.rank, self.size, self.name = folder, rank, size, name

    def __enter__(self):
        if self.size > 1:
            meeting = f"file://{self.folder}/meeting-{self.name}"
            dist.init_process_group("gloo", init_method=meeting, rank=self.rank, world_size=self.size)

    def __exit__(self, *_):
        if self.size > 1:
            dist.destroy_process_group()


def check_configs():
    """Check a config with each part, which reads the sources of all classes that a config can name."""
    for change in (EXACT, SHARDED, HYBRID, SPOILT):
        config_of("", change=change)


def train_all(rank, folder):
    """Save and resume each training that this rank has a part in."""
    stream = {
        "model": {"name": "gpt", "layers": 1, "width": 8, "heads": 1},
        "data": {"name": "text_stream", "files": str(folder / "lines.txt"), "context": 8, "batch_size": 6},
        "train": {"parallel": "ddp"},
    }
    if rank == 0:
        train(folder / "whole", change={})
        train(folder / "grown", change={}, steps=HALF)
    with Group(folder, rank, 4, "four"):
        train(folder / "shrunk", change=HYBRID, steps=HALF)
    if rank >= 2:
        return
    with Group(folder, rank, 2, "two"):
        train(folder / "shrunk", change=SHARDED, steps=HALF + 3, resume=True)
        train(folder / "grown", change=SHARDED, resume=True)
        for name, change in (("ddp", EXACT), ("fsdp2", SHARDED), ("stream", stream)):
            train(folder / f"{name}-whole", change=change)
            if name == "ddp":
                interrupted(folder / name, change)
            else:
                train(folder / name, change=change, steps=HALF)
            if name == "stream" and rank == 0:
                shutil.copytree(folder / name, folder / "stream-shrunk")
            train(folder / name, change=change, resume=True)
        full_disk(folder / "full", rank)
        train(folder / "spoilt", change=SPOILT, steps=BAD_STEP + 2)
    if rank == 0:
        train(folder / "shrunk", change={}, resume=True)
        train(folder / "stream-shrunk", change=stream, resume=True)
