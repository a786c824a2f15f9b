"""One of four processes that train from configs on two and on four ranks."""

import math

import torch.distributed as dist
from torch.nn.functional import cross_entropy

BASE = {
    "model": {"name": "mlp", "depth": 4, "width": 16, "normalization": "layer"},
    # 1,438 samples: the last batch of an epoch has 17, which 2 or 4 ranks share unevenly, and ends a shorter step
    "data": {"name": "digits", "batch_size": 203},
    "optim": {"name": "adamw", "lr": 3e-3},
    "train": {
        "epochs": 2,
        "threads": 1,
        "clip": {"norm": 0.5},
        "accumulate": 3,
        "checkpoint": {"every": 1000, "best": False},
    },
    "watch": {"updates_every": 4, "activations_every": 4, "budget": 0},
    "sinks": {"terminal": {"enabled": False}, "tensorboard": {"enabled": False}, "html": {"enabled": False}},
}
DDP, FSDP2 = {"train": {"parallel": "ddp"}}, {"train": {"parallel": "fsdp2"}}
# 3 batches of 479 leave one sample, and so does a validation batch of 358
ONE_SAMPLE_LAST = {
    "data": {"batch_size": 479, "eval_batch_size": 358},
    "train": {"clip": {"value": 1e-3, "norm": None}},
}
SUM = {"loss": {"name": "CrossEntropyLoss", "reduction": "sum"}, "optim": {"name": "sgd", "lr": 1e-4}}
WEIGHTED = {"loss": {"name": "CrossEntropyLoss", "weight": [0.1, 3, 1, 1, 1, 1, 1, 1, 0, 0]}}
STOPPED = {
    "schedule": {"name": "ReduceLROnPlateau", "patience": 0},
    "train": {"early_stop": {"patience": 2, "min_delta": 10.0}, "epochs": 5},
}
# the first step overflows, and the next ones have torch's default scale
SCALED = {"train": {"precision": "fp16", "scaler": {"init_scale": 2.0**40, "backoff_factor": 2.0**-24}}}
HALF = {"train": {"precision": "bf16", "activation_checkpointing": "sqrt"}}
COMPILED = {"model": {"depth": 2}, "train": {"epochs": None, "steps": 2, "compile": {"backend": "eager"}}}
BATCH_NORM = {"model": {"normalization": "batch"}, "optim": {"lr": 1e-2}, "train": {"precision": "bf16"}}
FRAGILE = {"loss": {"target": "parallel_worker:Fragile", "name": None}}

NAN_AT = 1


class Fragile:
    """A loss that is NaN on rank 1 at one step."""

    def __init__(self):
        self.calls = 0

    def __call__(self, outputs, targets):
        self.calls += 1
        is_bad = dist.get_rank() == 1 and self.calls == 3 * NAN_AT + 1
        return cross_entropy(outputs, targets) * (math.nan if is_bad else 1.0)


def merged(base, *changes):
    for change in changes:
        base = {
            key: merged(base[key], change[key])
            if isinstance(base.get(key), dict) and isinstance(change.get(key), dict)
            else change.get(key, base.get(key))
            for key in base | change
        }
    return base


EQUAL_ON_TWO = {
    "ddp": merged(DDP, STOPPED),
    "fsdp2-weighted": merged(FSDP2, WEIGHTED),
    "ddp-one-sample-last": merged(DDP, ONE_SAMPLE_LAST),
    "fsdp2-sum-one-sample-last": merged(FSDP2, ONE_SAMPLE_LAST, SUM),
    "fsdp2-scaled": merged(FSDP2, SCALED),
    "fsdp2-half": merged(FSDP2, HALF),
    "fsdp2-compiled": merged(FSDP2, COMPILED),
}
OTHERS_ON_TWO = {
    "fsdp2-batch-norm": merged(FSDP2, BATCH_NORM),
    "ddp-fragile": merged(DDP, FRAGILE),
}
EQUAL_ON_FOUR = {"hsdp": {"train": {"parallel": "hsdp", "shard_ranks": 2}}}


def config_of(case, out):
    from gradwatch.config.sections.root import Config

    return Config.model_validate(merged(BASE, case, {"run": {"out": str(out)}}))


def check_configs():
    """Check each config, which reads the sources of all classes that a config can name."""
    for name, case in (EQUAL_ON_TWO | OTHERS_ON_TWO | EQUAL_ON_FOUR).items():
        config_of(case, name)


def train_all(rank, folder):
    """Train each case that this rank has a part in."""
    from gradwatch.train.loop import train

    for world_size, cases in ((2, EQUAL_ON_TWO | OTHERS_ON_TWO), (4, EQUAL_ON_FOUR)):
        if rank < world_size:
            meeting = f"file://{folder}/meeting-{world_size}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
            for name, case in cases.items():
                train(config_of(case, folder / name), log_format="plain")
            dist.destroy_process_group()
