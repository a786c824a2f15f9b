"""The memory of this process grows with its tensors, and the limit of a container counts."""

import sys

import pytest
import torch

from gradwatch.probe.memory import in_use

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="read from /proc")


def test_a_large_tensor_is_memory_in_use():
    before = in_use.host_memory()
    tensor = torch.ones(64 << 20)  # 256 MiB: earlier tests may free some of their memory meanwhile

    assert in_use.host_memory() - before == pytest.approx(tensor.nbytes, rel=0.2)


def test_the_limit_of_a_container_counts_without_its_cache(monkeypatch, tmp_path):
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 1500000\ninactive_file 1000000\n")
    monkeypatch.setattr(in_use, "CGROUP", tmp_path)

    assert in_use.host_memory_left() == 1_500_000

    (tmp_path / "memory.max").write_text("max\n")
    assert in_use.host_memory_left() > 3_000_000


def test_a_system_without_proc_says_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(in_use, "STATM", tmp_path / "none")
    monkeypatch.setattr(in_use, "MEMINFO", tmp_path / "none")

    assert in_use.host_memory() is None
    assert in_use.host_memory_left() == float("inf")
