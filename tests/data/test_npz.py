"""Arrays from .npz files: shapes, kinds, parts, and what is refused."""

import numpy as np
import pytest
import torch

from gradwatch.data import check, npz
from gradwatch.errors import GradwatchError

RNG = np.random.default_rng(0)


@pytest.fixture
def save(tmp_path):
    def save(**arrays):
        np.savez(tmp_path / "arrays.npz", **arrays)
        return str(tmp_path / "arrays.npz")

    return save


def test_a_table_is_standardised_and_its_labels_counted(save):
    splits = npz.build(file=save(x=RNG.normal(5, 3, (100, 4)), y=np.repeat([3, 7, 9, 11], 25)))

    check(splits, "npz")
    assert (splits.spec.kind, splits.spec.outputs, splits.spec.input_shape) == ("classes", 4, (4,))
    assert splits.train.inputs.dtype == torch.float32
    assert splits.train.inputs.mean(0).numpy() == pytest.approx([0] * 4, abs=1e-6)
    assert splits.val.targets.bincount().tolist() == [5, 5, 5, 5], "labels 3, 7, 9, 11 become 0, 1, 2, 3"


def test_bytes_of_images_are_read_from_0_to_1(save):
    images = RNG.integers(0, 256, (20, 1, 5, 5), dtype=np.uint8)

    splits = npz.build(file=save(x=images, y=np.arange(20) % 2), val_fraction=0.0)

    assert splits.spec.input_shape == (1, 5, 5)
    assert splits.train[3][0].numpy() == pytest.approx(images[3] / 255, abs=1e-7)


def test_values_keep_their_width(save):
    splits = npz.build(file=save(x=RNG.normal(size=(30, 2)), y=RNG.normal(size=(30, 5))))

    assert (splits.spec.kind, splits.spec.outputs) == ("values", 5)
    assert splits.train.targets.shape == (24, 5)


def test_a_part_for_validation_is_taken_as_it_is(save):
    file = save(x_train=np.eye(4), y_train=["a", "b", "a", "c"], x_test=np.ones((2, 4)), y_test=["c", "a"])
    names = {"inputs": "x_train", "targets": "y_train", "val_inputs": "x_test", "val_targets": "y_test"}

    splits = npz.build(file=file, **names, kind="classes", standardize=False)

    assert splits.train.targets.tolist() == [0, 1, 0, 2]
    assert splits.val.targets.tolist() == [2, 0], "numbered as in the training part"
    assert splits.val.inputs.eq(1).all()


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ({"x": np.eye(2), "z": [0, 1]}, {}, r"data\.targets: there is no array 'y', expected one of x, z"),
        ({"x": np.eye(3), "y": [0, 1]}, {}, r"data\.targets: 2 targets for 3 inputs"),
        ({"x": np.zeros((0, 3)), "y": []}, {}, r"data\.inputs: the array 'x' is empty, expected at least one sample"),
        (
            {"x": [[1, 2], [3, np.nan]], "y": [0, 1]},
            {},
            r"data\.inputs: 'x' at \(1, 1\) is nan, .*gradwatch fills in nothing",
        ),
        ({"x": np.eye(2), "y": [0.5, np.inf]}, {}, r"data\.targets: 'y' at \(1,\) is inf"),
        ({"x": [1.0, 2.0], "y": [0, 1]}, {}, r"data\.inputs: got dtype float64 and shape \(2,\)"),
        ({"x": [["a"], ["b"]], "y": [0, 1]}, {}, r"data\.inputs: got dtype <U1"),
        ({"x": np.eye(2), "y": ["a", "b"]}, {"kind": "values"}, r"data\.kind: got values, but the targets are <U1"),
        (
            {"x": np.eye(2), "y": np.eye(2, dtype=int)},
            {},
            r"expected one label per sample; take the argmax of one-hot rows",
        ),
        ({"x": np.eye(2), "y": [0, 1]}, {"val_inputs": "x"}, r"data\.val_inputs, data\.val_targets: got one of them"),
        ({"x": np.eye(2), "y": np.array([{}, {}])}, {}, "without pickles"),
    ],
)
def test_a_mistake_is_named_with_its_place(save, arrays, options, message):
    with pytest.raises(GradwatchError, match=message):
        npz.build(file=save(**arrays), **options)


def test_files_that_are_no_npz_are_refused(tmp_path):
    (tmp_path / "text.npz").write_text("no zip file")
    np.save(tmp_path / "single.npy", np.eye(2))

    with pytest.raises(GradwatchError, match=r"text\.npz is not a NumPy \.npz"):
        npz.build(file=str(tmp_path / "text.npz"))
    with pytest.raises(GradwatchError, match=r"single\.npy is not a NumPy \.npz; write one"):
        npz.build(file=str(tmp_path / "single.npy"))
    with pytest.raises(GradwatchError, match=rf"no file {tmp_path / 'none.npz'}"):
        npz.build(file=str(tmp_path / "none.npz"))
