"""The extension is used where it is there, and its absence is no harm."""

import pytest
import torch

from gradwatch.probe import kernel as kernels


def test_without_the_extension_torch_operations_do_the_work(monkeypatch):
    monkeypatch.setattr(kernels, "_NATIVE", None)

    assert kernels.choose() is None, "auto falls back"
    with pytest.raises(ImportError, match="kernel='torch'"):
        kernels.choose("native")


def test_a_torch_that_lends_no_tensors_is_left_to_torch_operations(monkeypatch):
    class Old:
        """A tensor class of before the exchange table."""

    monkeypatch.setattr(torch, "Tensor", Old)

    assert kernels._load() is None, "no table, no extension"


def test_an_extension_of_another_revision_is_named_and_left_alone(monkeypatch):
    native = pytest.importorskip("gradwatch.probe._native")
    monkeypatch.setattr(native, "REVISION", kernels.REVISION - 1)

    with pytest.warns(RuntimeWarning, match=f"got revision {kernels.REVISION - 1}, expected {kernels.REVISION}"):
        assert kernels._load() is None
