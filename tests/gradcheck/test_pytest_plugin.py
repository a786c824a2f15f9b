"""The fixture `gradient_check` fails a test with the report, and costs nothing where it is not used."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from torch import nn

from gradwatch.gradcheck import pytest_plugin

gradient_check = pytest_plugin.gradient_check  # where gradwatch is installed, pytest finds it by the entry point
PLUGIN = "gradwatch.gradcheck.pytest_plugin"


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 6


def test_a_wrong_gradient_fails_the_test_with_the_report(gradient_check):
    layer = nn.Linear(4, 3)

    with pytest.raises(pytest.fail.Exception) as failed:
        gradient_check(lambda x: Doubled.apply(layer(x)).sin().sum(), torch.randn(5, 4), model=layer)

    assert str(failed.value).startswith("the gradient is wrong\n  the gradient of `x` in Doubled.backward")
    assert not failed.value.pytrace


def test_a_right_one_passes_with_the_result(gradient_check):
    layer = nn.Linear(4, 3)

    found = gradient_check(lambda x: layer(x).sin().sum(), torch.randn(5, 4), model=layer, layer="bias")

    assert [(t.name, t.verdict) for t in found.tensors] == [("bias", "right")]


def test_pytest_finds_the_plugin_which_imports_no_torch():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]

    assert project["entry-points"]["pytest11"] == {"gradwatch": PLUGIN}
    code = f"import sys, {PLUGIN}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
