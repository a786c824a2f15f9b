"""Runs of the ill configs of the clinic for the tests that look at them, trained once for all test processes."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from gradwatch.config.load import load_config
from gradwatch.incident import recorder
from gradwatch.train.loop import train

ROOT = Path(__file__).parents[1]
SETTINGS = ("train.threads=1", "sinks.tensorboard.enabled=false", "watch.record.every=20")


def copied(made, name, folder):
    """Copy the run of an ill config into a folder.

    Args:
        made: Folder of all runs.
        name: Name of the config.
        folder: Where the copy goes.

    Returns:
        The run directory, and what the findings said while it was trained.
    """
    made.mkdir(exist_ok=True)
    with FileLock(made / f"{name}.lock"):
        if not (made / name).exists():
            (made / f"{name}.json").write_text(json.dumps(_train(name, made / f"{name}.part")))
            (made / f"{name}.part").rename(made / name)
    (run,) = (made / name).iterdir()
    return Path(shutil.copytree(run, folder / run.name)), json.loads((made / f"{name}.json").read_text())


def _train(name, out):
    """Train an ill config, with snapshots of every 20th step, and return the messages of its findings."""
    shutil.rmtree(out, ignore_errors=True)  # of a training that failed
    with contextlib.chdir(ROOT), pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder, "REST_S", 0.0)
        config = load_config(ROOT / "configs" / "clinic" / f"{name}.yaml", [f"run.out={out}", *SETTINGS])
        return [finding.message for finding in train(config, log_format="plain").history.findings]
