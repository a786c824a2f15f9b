"""The shipped digits: the true ones, split alike, the same every time."""

import hashlib
from pathlib import Path

import pytest
import torch

from gradwatch.data import check, digits
from gradwatch.errors import GradwatchError


def test_the_file_holds_what_scikit_learn_ships():
    datasets = pytest.importorskip("sklearn.datasets")
    original = datasets.load_digits()
    splits = digits.build(val_fraction=0.0)

    assert (splits.train.inputs[:, 0].numpy() * 16 == original.images).all()
    assert (splits.train.targets.numpy() == original.target).all()


def test_a_readme_beside_the_file_names_source_and_licence():
    text = (digits.FILE.parent / "README.md").read_text()

    assert "https://doi.org/10.24432/C50P49" in text
    assert "CC BY 4.0" in text


def test_images_run_from_0_to_1_and_labels_from_0_to_9():
    splits = digits.build()

    check(splits, "digits")
    assert splits.spec.input_shape == splits.train[0][0].shape == (1, 8, 8)
    assert (splits.train.inputs.min(), splits.train.inputs.max()) == (0.0, 1.0)
    assert splits.val.targets.unique().tolist() == list(range(10))


def test_each_digit_is_held_out_in_the_same_proportion():
    splits = digits.build(val_fraction=0.25)

    counts = torch.bincount(splits.val.targets) / (
        torch.bincount(splits.val.targets) + torch.bincount(splits.train.targets)
    )
    assert counts.numpy() == pytest.approx([0.25] * 10, abs=0.005)
    assert len(splits.train) + len(splits.val) == 1797


def test_the_split_is_the_same_each_time_and_another_for_another_seed():
    def fingerprint(seed):
        return hashlib.sha256(digits.build(split_seed=seed).val.inputs.numpy().tobytes()).hexdigest()

    assert fingerprint(0) == fingerprint(0)
    assert fingerprint(0) != fingerprint(1)


def test_nothing_held_out_is_no_validation_part():
    assert digits.build(val_fraction=0.0).val is None


@pytest.mark.parametrize("fraction", [-0.1, 1.0, 3.0])
def test_an_impossible_fraction_is_refused_by_name(fraction):
    with pytest.raises(
        GradwatchError, match=rf"data\.val_fraction: got {fraction}, expected a number from 0 to below 1"
    ):
        digits.build(val_fraction=fraction)


def test_the_file_is_small_and_opens_without_pickle():
    assert Path(digits.FILE).stat().st_size < 50_000
