"""What answers at once must not wait for torch to be imported."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from gradwatch.cli import main
code = main(sys.argv[1:])
heavy = sorted({"torch", "torchvision", "tensorboard", "pandas", "pyarrow"} & set(sys.modules))
sys.stderr.write(f"\\ncode {code} heavy {heavy}")
"""


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["train", "{config}", "--set", "train.precision=fp8"], 2),
        (["train", "{config}", "--set", "model.name=resnt18"], 2),
        (["train", "{config}", "--set", "data.name=mnst", "--set", "optim.name=adm"], 2),
        (["train", "{config}", "--set", "detect.dead-lair={{}}", "--set", "data.augment=[Flip]"], 2),
        (["list", "models"], 0),
        (["list", "statistics"], 0),
        (["explain", "dead-layer"], 0),
        (["schema"], 0),
        (["diagnose", "{run}"], 0),
        (["runs", "{run}"], 0),
        (["compare", "{run}", "{run}"], 0),
        (["export", "--help"], 0),
        (["diagnose", "{run}", "--format", "json", "--redetect"], 0),
    ],
)
def test_a_command_that_does_not_train_does_not_import_torch(config, recorded, args, code):
    run = recorded()
    filled = [a.format(config=config, run=run) for a in args]

    done = subprocess.run([sys.executable, "-c", PROGRAM, *filled], capture_output=True, text=True, timeout=60)

    assert done.stderr.endswith(f"code {code} heavy []"), done.stderr
