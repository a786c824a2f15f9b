"""What answers at once must not wait for torch to be imported."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, sys
from gradwatch.cli import main
import gradwatch.config.load, gradwatch.diagnose.rank, gradwatch.render.terminal.diagnosis  # what most of them import

# each command has a fork of its own; had the imports above brought torch, all of them would have it
for args in json.load(sys.stdin):
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        code = main(args)
        heavy = sorted({"torch", "torchvision", "tensorboard", "pandas", "pyarrow"} & set(sys.modules))
        sys.stdout.write(f"\\nended {json.dumps([args, code, heavy])}\\n")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""
SETTINGS = ("train.precision=fp8", "model.name=resnt18", "data.name=mnst", "optim.name=adm", "detect.dead-lair={{}}")
MISTAKES = [word for setting in SETTINGS for word in ("--set", setting)]
COMMANDS = [
    (["--help"], 0),
    (["train", "--help"], 0),
    (["train", "{config}", *MISTAKES], 2),
    (["train", "{config}", "--set", "data.augment=[Flip]"], 2),
    (["list", "models"], 0),
    (["list", "statistics"], 0),
    (["explain", "dead-layer"], 0),
    (["schema"], 0),
    (["diagnose", "{run}"], 0),
    (["runs", "{run}"], 0),
    (["compare", "{run}", "{run}"], 0),
    (["export", "--help"], 0),
    (["diagnose", "{run}", "--format", "json", "--redetect"], 0),
]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_command_that_does_not_train_does_not_import_torch(config, recorded):
    run = recorded()
    expected = [[[arg.format(config=config, run=run) for arg in args], code, []] for args, code in COMMANDS]

    asked = json.dumps([args for args, _, _ in expected])
    done = subprocess.run([sys.executable, "-c", PROGRAM], input=asked, capture_output=True, text=True, timeout=100)

    ended = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("ended ")]
    assert ended == expected, done.stderr
    assert f"error: {len(SETTINGS)} problems in the config" in done.stderr, "each mistake was looked for"
