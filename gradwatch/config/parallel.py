"""Find settings that cannot work on several ranks."""

from __future__ import annotations

from gradwatch.config.sections.root import Config
from gradwatch.errors import Problem

ON_RANKS = ("auto", "cpu", "cuda")
"""Devices that each rank can have for itself."""


def parallel_problems(config: Config) -> list[Problem]:
    """Return a problem for each setting that contradicts `train.parallel`."""
    train, found = config.train, []
    parallel = train.parallel
    if parallel == "none":
        return []
    if train.device not in ON_RANKS:
        text = (
            f"got '{train.device}', expected auto, cpu or cuda: with train.parallel: {parallel}, each rank has a device"
        )
        found.append(Problem(("train", "device"), text))
    if train.sync_batchnorm and train.device == "cpu":
        found.append(Problem(("train", "sync_batchnorm"), "needs GPUs, and train.device is cpu", help="leave it out"))
    if train.on_critical in ("skip", "rewind"):
        text = f"got '{train.on_critical}', expected continue or stop: the others need train.parallel: none"
        found.append(Problem(("train", "on_critical"), text))
    if parallel in ("fsdp2", "hsdp") and config.optim.name == "LBFGS":
        text = f"got 'LBFGS', which needs whole parameters, and train.parallel: {parallel} shards them"
        found.append(Problem(("optim", "name"), text, help="use another optimizer, or train.parallel: ddp"))
    if parallel in ("fsdp2", "hsdp") and config.optim.name == "adamw8bit":
        text = f"got 'adamw8bit', whose state is saved whole, and train.parallel: {parallel} shards it"
        found.append(Problem(("optim", "name"), text, help="use adamw, or train.parallel: ddp"))
    if parallel in ("fsdp2", "hsdp") and train.activation_offloading:
        text = f"got true, and train.parallel: {parallel} would have the gathered weights moved to the host as well"
        found.append(Problem(("train", "activation_offloading"), text, help="remove it, or use train.parallel: ddp"))
    choice = train.activation_checkpointing
    if choice != "none" and choice != "sqrt" and choice.budget:
        text = f"is planned for one process, and train.parallel is {parallel}"
        help = "name the modules: {modules: ['blocks.*']}"
        found.append(Problem(("train", "activation_checkpointing", "budget"), text, help=help, is_about_key=True))
    return found
