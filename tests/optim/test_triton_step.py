"""The Triton step does what the native one does, and compiles, as far as can be told without a GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradwatch.probe.device import backend as kernels

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or kernels.select_backend() is None,
    reason="Triton or the extension is missing",
)


def test_it_passes_its_tests_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:randomly", "-p", "no:cacheprovider"]
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}

    done = subprocess.run(
        [*command, str(HERE / "interpreted.py")], cwd=HERE.parents[1], env=interpreted, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr


def compiled(function, arguments, constants):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = arguments | dict.fromkeys(constants, "constexpr")
    return compile(ASTSource(fn=function, signature=signature, constexprs=constants), target=GPUTarget("cuda", 90, 32))


@pytest.mark.parametrize("options", ["IS_ADAM IS_COUPLED IS_AMSGRAD", "HAS_MOMENTUM IS_NESTEROV IS_COUPLED"])
def test_it_compiles_for_a_gpu(options):
    from gradwatch.optim._triton_kernels import step_chunks

    tables = dict.fromkeys(["addresses_6P", "numels_P", "tensors_C", "offsets_C"], "*i64")
    tables |= {"num_params": "i32", "found_CF": "*fp64", "changed_2C": "*fp64", "num_chunks": "i32"}
    tables |= {"scale": "*fp32", "found_inf": "*fp32"}
    names = ["sign", "decay", "keep", "first", "second", "third", "eps", "rate", "log_first", "log_second"]
    numbers = dict.fromkeys(names, "fp32")
    names = ["IS_ADAM", "IS_COUPLED", "IS_AMSGRAD", "IS_NESTEROV", "HAS_MOMENTUM", "HAS_SCALE", "IS_FRESH"]
    constants = {name: name in options.split() for name in names}
    constants |= {
        "HAS_SCALE": True,
        "MAY_SKIP": True,
        "TELLS_GRADIENTS": True,
        "TELLS_CHANGES": True,
        "SIZE": 4096,
        "NUM_FIELDS": 7,
    }

    assert compiled(step_chunks, tables | numbers, constants).asm["ptx"]


def test_adding_up_changes_compiles_for_a_gpu():
    from gradwatch.optim._triton_kernels import add_changes

    arguments = {"changed_2C": "*fp64", "num_chunks": "i32", "begins_P": "*i64", "columns_P": "*i64", "out_2L": "*fp32"}
    arguments |= {"stride": "i32", "found_inf": "*fp32"}

    assert compiled(add_changes, arguments, {"MAY_SKIP": True, "AT_ONCE": 128}).asm["ptx"]
