"""Measure the time to a verdict for a small incident: the first bad operation, the proof of its cause, and the cure."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from gradwatch.config.load import load_config
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.disk.writer import read
from gradwatch.replay.cure import find_cure
from gradwatch.replay.locate_in_run import locate_in_run
from gradwatch.replay.trials.runner import TrialRunner
from gradwatch.replay.verify.verify import verify
from gradwatch.train.loop import train

QUIET = ["sinks.terminal.enabled=false", "sinks.tensorboard.enabled=false"]


def main() -> None:
    """Train what is ill, then time what is done about it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=Path("configs/clinic/non-finite.yaml"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        settings = [*QUIET, f"run.out={folder}", f"train.threads={options.threads}"]
        run = train(load_config(options.config, settings), log_format="plain").directory
        rounds = [_timed(run) for _ in range(options.rounds)]
    for name in rounds[0]:
        seconds = [r[name] for r in rounds]
        print(f"{name:<28} {statistics.median(seconds):6.2f} s   [{min(seconds):.2f}-{max(seconds):.2f}]")


def _timed(run: Path) -> dict[str, float]:
    history = read(run)
    diagnoses = diagnose(history)
    step = diagnoses[0].findings[0].step
    began = time.perf_counter()
    searched = locate_in_run(run, step)
    located = time.perf_counter()
    runner = TrialRunner(run, history, deadline=located + 600)
    verifications = verify(runner, diagnoses)
    proved = time.perf_counter()
    cure = find_cure(runner, verifications)
    cured = time.perf_counter()
    assert verifications, "something was found"
    assert searched.located is None or cure, "what is not finite in the clinic has a cure"
    return {
        f"first bad operation, step {step}": located - began,
        "proof of all causes": proved - located,
        "cure": cured - proved,
    }


if __name__ == "__main__":
    main()
