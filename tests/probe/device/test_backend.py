"""The extension is used where it is there, and its absence is no harm."""

import sys
import warnings
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder

import pytest
import torch

import gradwatch
from gradwatch.probe.device import backend as kernels


def test_without_the_extension_torch_operations_do_the_work_and_it_is_said_once(monkeypatch):
    monkeypatch.setattr(kernels, "_NATIVE", None)
    monkeypatch.setattr(kernels, "_REASON", "is not built")
    monkeypatch.setattr(kernels, "_FAILED", set())

    with pytest.warns(RuntimeWarning, match="the C extension of gradwatch is not built; torch operations replace it"):
        assert kernels.select_backend() is None, "auto falls back"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kernels.select_backend() is None, "said once"
        assert kernels.select_backend("torch") is None, "asked for"
    with pytest.raises(ImportError, match="kernel='torch'"):
        kernels.select_backend("native")


def test_a_torch_that_lends_no_tensors_is_left_to_torch_operations(monkeypatch):
    pytest.importorskip("gradwatch._native")

    class Old:
        """A tensor class of before the exchange table."""

    monkeypatch.setattr(torch, "Tensor", Old)

    native, reason = kernels._load()

    assert native is None, "no table, no extension"
    assert torch.__version__ in reason


def test_an_extension_that_is_missing_or_broken_is_told_apart(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "gradwatch._native", raising=False)
    monkeypatch.setattr(gradwatch, "__path__", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [PathFinder])  # an editable install has a finder of its own
    assert kernels._load() == (None, "is not built")

    (tmp_path / f"_native{EXTENSION_SUFFIXES[0]}").write_bytes(b"no library")
    native, reason = kernels._load()

    assert native is None
    assert reason.startswith("cannot be loaded: ")


def test_an_extension_of_another_revision_is_named_and_left_alone(monkeypatch):
    native = pytest.importorskip("gradwatch._native")
    monkeypatch.setattr(native, "REVISION", kernels.REVISION - 1)

    taken, reason = kernels._load()

    assert taken is None
    assert f"got revision {kernels.REVISION - 1}, expected {kernels.REVISION}" in reason
