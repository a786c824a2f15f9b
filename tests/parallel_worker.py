"""One of four processes that train from configs on two and on four ranks."""

import faulthandler
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

BASE = {
    "model": {"name": "mlp", "depth": 4, "width": 16},
    # 1,438 samples: the last batch of an epoch has 1,438 - 15 * 95 = 13 samples
    "data": {"name": "digits", "batch_size": 95},
    "optim": {"name": "adamw", "lr": 3e-3},
    "train": {"epochs": 2, "threads": 1, "clip": {"norm": 0.5}, "accumulate": 3},
    "watch": {"updates_every": 4, "activations_every": 4},
    "sinks": {"terminal": {"enabled": False}, "tensorboard": {"enabled": False}, "html": {"enabled": False}},
}
ON_TWO = {
    "ddp": {"train": {"parallel": "ddp"}},
    "fsdp2": {"train": {"parallel": "fsdp2"}},
}
ON_FOUR = {
    "hsdp": {"train": {"parallel": "hsdp", "shard_ranks": 2}},
}


def merged(base, change):
    return {
        key: merged(base[key], change[key])
        if isinstance(base.get(key), dict) and isinstance(change.get(key), dict)
        else change.get(key, base.get(key))
        for key in base | change
    }


def config_of(case, out):
    from gradwatch.config.sections.root import Config

    return Config.model_validate(merged(merged(BASE, case), {"run": {"out": str(out)}}))


def main(rank, folder, names):
    from gradwatch.train.loop import train

    faulthandler.enable()
    torch.set_num_threads(1)
    for world_size, cases in ((2, ON_TWO), (4, ON_FOUR)):
        chosen = {name: case for name, case in cases.items() if not names or name in names}
        if chosen and rank < world_size:
            meeting = f"file://{folder}/meeting-{world_size}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world_size)
            for name, case in chosen.items():
                train(config_of(case, folder / name), log_format="plain")
            dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
    os._exit(0)  # see ranks_worker
