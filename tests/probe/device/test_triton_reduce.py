"""The Triton kernels compute the obvious statistics, and compile, as far as can be told without a GPU."""

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gradwatch.probe.device
from gradwatch.probe.device import backend as kernels
from gradwatch.probe.device import torch_reduce

HERE = Path(__file__).parent


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_they_pass_their_tests_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:randomly", "-p", "no:cacheprovider"]
    interpreted = {**os.environ, "TRITON_INTERPRET": "1"}

    done = subprocess.run(
        [*command, str(HERE / "interpreted.py")], cwd=HERE.parents[2], env=interpreted, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stdout + done.stderr


def compiled(function, arguments, constants):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    if "constexprs" in inspect.signature(ASTSource).parameters:
        source = ASTSource(function, arguments | dict.fromkeys(constants, "constexpr"), constexprs=constants)
    else:  # Triton 3.2, of torch 2.6
        source = ASTSource(function, arguments, constants=constants)
    return compile(source, target=GPUTarget("cuda", 90, 32))


@needs_triton
@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_reading_compiles_for_a_gpu(dtype, is_aligned):
    from gradwatch.probe.device import triton_kernels, triton_reduce

    arguments = dict.fromkeys(["addresses_L", "numels_L", "tensors_C", "offsets_C"], "*i64") | {"found_CF": "*fp64"}
    constants = {"ELEMENT": triton_reduce.ELEMENTS[dtype], "SIZE": triton_kernels.CHUNK, "NUM_FIELDS": 7}
    constants |= {"IS_DOUBLE": dtype == torch.float64, "IS_BRAIN": dtype == torch.bfloat16}
    constants |= {"IS_ALIGNED": is_aligned}

    assert compiled(triton_kernels.read_chunks, arguments, constants).asm["ptx"]


@needs_triton
def test_adding_up_compiles_for_a_gpu():
    from gradwatch.probe.device import triton_kernels

    arguments = {"found_CF": "*fp64", "begins_L": "*i64", "numels_L": "*i64", "columns_L": "*i64", "out_SL": "*fp32"}
    arguments |= {"stride": "i32", "factor": "fp32"}
    constants = {"SIZE": triton_kernels.CHUNK, "NUM_FIELDS": 7, "AT_ONCE": triton_kernels.ABREAST}

    assert compiled(triton_kernels.add_chunks, arguments, constants).asm["ptx"]


@needs_triton
@pytest.mark.parametrize("is_brain", [True, False])
def test_counting_compiles_for_a_gpu(is_brain):
    from gradwatch.probe.device import triton_kernels

    arguments = {"data": "*i16" if is_brain else "*fp32", "numel": "i32", "out_B": "*i64"}
    constants = {"IS_BRAIN": is_brain, "SHIFT": 21, "LOWEST": 348, "SIDE": 225, "TABLE": 512, "NUM_BINS": 451}

    assert compiled(triton_kernels.count_bins, arguments, constants | {"SIZE": 4096}).asm["ptx"]


@needs_triton
def test_checksums_and_checks_for_finite_values_compile_for_a_gpu():
    from gradwatch.probe.device import triton_kernels

    words = {"words": "*i64", "number": "i32", "out_C": "*i64"}
    bits = {"data": "*i16", "numel": "i32", "out_C": "*i32"}

    assert compiled(triton_kernels.sum_words, words, {"GOLDEN": -7046029254386353131, "SIZE": 4096}).asm["ptx"]
    assert compiled(triton_kernels.find_non_finite, bits, {"EXPONENT": 0x7C00, "SIZE": 4096}).asm["ptx"]


class Broken:
    """Kernels that fail, as on a GPU that Triton does not know."""

    def __init__(self):
        self.calls = 0

    def statistics(self, values):
        self.calls += 1
        raise RuntimeError("no such target")


def test_where_the_kernels_fail_torch_goes_on_and_one_warning_says_so(monkeypatch):
    broken = Broken()
    monkeypatch.setattr(kernels, "_FAILED", set())
    monkeypatch.setattr(gradwatch.probe.device, "triton_reduce", broken, raising=False)
    values = [torch.arange(4.0)]

    with pytest.warns(RuntimeWarning, match="failed; falling back to torch operations: RuntimeError: no such target"):
        first_SL = torch_reduce._statistics_on_gpu(values)
    second_SL = torch_reduce._statistics_on_gpu(values)

    assert broken.calls == 1
    assert torch.equal(first_SL, second_SL)
    assert first_SL[0, 0] == pytest.approx(14**0.5)


def test_without_triton_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr(kernels, "_FAILED", set())
    monkeypatch.setitem(sys.modules, "gradwatch.probe.device.triton_reduce", None)
    monkeypatch.delattr(gradwatch.probe.device, "triton_reduce", raising=False)

    assert kernels.attempt_triton(lambda triton: triton) is None
