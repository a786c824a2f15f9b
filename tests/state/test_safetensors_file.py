"""The tensor files are safetensors: what is written here, the library reads, and damage is an error with a reason."""

import pytest
import safetensors.torch
import torch

from gradwatch.state import safetensors_file


def tensors():
    torch.manual_seed(0)
    kinds = {
        f"a/{str(d).removeprefix('torch.')}": torch.randint(0, 2, (3, 2)).to(d) for d in safetensors_file.DTYPE_NAMES
    }
    odd = {"zero.dim": torch.tensor(1.5), "empty": torch.empty(0, 3), "transposed": torch.randn(4, 3).t()}
    return kinds | odd | {"strided": torch.randn(10)[::3], "expanded": torch.randn(1, 3).expand(2, 3)}


def written(values):
    return b"".join(safetensors_file.chunks(values))


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
        assert found[name].is_contiguous(), name


def test_the_library_reads_what_we_write():
    assert_equal(safetensors.torch.load(written(tensors())), tensors())


def test_we_read_what_the_library_writes(tmp_path):
    expected = {name: tensor.contiguous() for name, tensor in tensors().items()}
    safetensors.torch.save_file(expected, tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert_equal(safetensors_file.read(tmp_path / "x.safetensors"), expected)


def test_what_is_read_can_be_written_to_and_is_no_map_of_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(written({"a": torch.ones(3)}))
    read = safetensors_file.read(path)
    path.write_bytes(written({"a": torch.zeros(3)}))
    assert torch.equal(read["a"], torch.ones(3))
    path.write_bytes(written({"a": torch.ones(3)}))
    read["a"].add_(1)
    assert torch.equal(safetensors_file.read(path)["a"], torch.ones(3))


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\xff" * 100, (2).to_bytes(8, "little") + b"{"])
def test_a_file_of_another_kind_is_refused(tmp_path, data):
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(ValueError, match=r"not a safetensors file: .*header"):
        safetensors_file.read(tmp_path / "x")


def test_a_file_that_was_cut_short_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(written({"weight": torch.ones(9)})[:-1])
    with pytest.raises(ValueError, match=r"not a safetensors file: .*not fully covered"):
        safetensors_file.read(tmp_path / "x")
