"""The config that mistakes are made in, and how a command is given."""

import os
import subprocess
from pathlib import Path

import warm_python

from gradwatch.errors import PACKAGE

HERE = Path(__file__).parent
CONFIG = """\
run: {out: runs}
model: {name: mlp, depth: 2, width: 8}
data: {name: digits}
optim: {name: adamw, lr: 1e-3}
train: {steps: 4, threads: 1}
sinks: {tensorboard: {enabled: false}}
"""
USERS_CODE = (HERE / "users_code.py").read_text()
FILLING = (HERE / "filling.py").read_text()


def settings(*overrides):
    return [part for override in overrides for part in ("--set", override)]


def line_of(text):
    """Return the number of the line of the user's code with a text in it."""
    return 1 + next(i for i, line in enumerate(USERS_CODE.splitlines()) if text in line)


def in_process(folder, *args, **options):
    return subprocess.Popen(
        [*warm_python.command(), "-m", "gradwatch", "train", *args],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        text=options.pop("text", True),
        **options,
    )
