"""Windows of characters: what is predicted, where they are cut, and which texts are refused."""

import sys

import pytest
import torch

from gradwatch.data import check, text
from gradwatch.errors import GradwatchError
from gradwatch.train.batches import Batches


@pytest.fixture
def alphabet(tmp_path):
    file = tmp_path / "alphabet.txt"
    file.write_text("abcdefghijklmnopqrstuvwxyz" * 4, encoding="utf-8")
    return str(file)


def test_targets_are_the_inputs_one_character_later(alphabet):
    splits = text.build(file=alphabet, context=8, val_fraction=0.0)

    inputs, targets = splits.train[1]
    assert inputs.tolist() == list(range(8, 16)), "the second window starts where the first ends"
    assert targets.tolist() == list(range(9, 17))
    assert inputs.dtype == targets.dtype == torch.int64
    assert (splits.spec.input_shape, splits.spec.outputs, splits.spec.kind) == ((8,), 26, "tokens")


def test_windows_touch_by_default_and_overlap_with_a_smaller_stride(alphabet):
    touching = text.build(file=alphabet, context=10, val_fraction=0.0).train
    overlapping = text.build(file=alphabet, context=10, stride=1, val_fraction=0.0).train

    assert len(touching) == (104 - 1) // 10, "each needs one character more for its last target"
    assert len(overlapping) == 104 - 10
    assert overlapping[3][0].tolist() == list(range(3, 13))


def test_a_batch_equals_its_windows_stacked(alphabet):
    dataset = text.build(file=alphabet, context=7, stride=3, val_fraction=0.0).train
    indices = torch.tensor([5, 0, 5, 11])

    inputs, targets = dataset.batch(indices)

    assert torch.equal(inputs, torch.stack([dataset[i][0] for i in indices]))
    assert torch.equal(targets, torch.stack([dataset[i][1] for i in indices]))
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


def test_validation_is_the_end_of_the_text_and_shares_no_character_with_training(tmp_path):
    file = tmp_path / "two.txt"
    file.write_text("a" * 80 + "b" * 20)

    splits = text.build(file=str(file), context=5, val_fraction=0.2)

    assert not torch.cat([splits.train[i][1] for i in range(len(splits.train))]).any(), "only a"
    assert torch.cat([splits.val[i][0] for i in range(len(splits.val))]).all(), "only b"


def test_the_default_text_comes_with_python():
    splits = text.build(context=64)

    check(splits, "text")
    assert len(splits.train) > 1000
    assert 60 < splits.spec.outputs < 300, "letters, digits, signs"
    inputs, targets = next(Batches(splits.train, batch_size=16, shuffle=True).epoch(0))
    assert inputs.shape == targets.shape == (16, 64)


def test_a_python_without_its_manual_asks_for_a_file(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)  # as if it were not installed

    with pytest.raises(GradwatchError, match=r"data\.file: this Python lacks pydoc_data\.topics"):
        text.build()


def test_characters_beyond_ascii_are_characters(tmp_path):
    file = tmp_path / "signs.txt"
    file.write_text("äß漢🎉" * 10, encoding="utf-8")

    assert text.build(file=str(file), context=4, val_fraction=0.0).spec.outputs == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty, expected text"),
        (b"too short", r"8 characters do not fit into each part .*8 for training and 1 for validation.*at least 9"),
        (b"caf\xe9" * 100, r"is not UTF-8 text \(byte 3\)"),
    ],
)
def test_texts_that_cannot_be_used_are_refused(tmp_path, content, message):
    file = tmp_path / "text.txt"
    file.write_bytes(content)

    with pytest.raises(GradwatchError, match=message):
        text.build(file=str(file), context=8)


def test_a_missing_file_is_named_in_full(tmp_path):
    with pytest.raises(GradwatchError, match=rf"data\.file: no file {tmp_path / 'none.txt'}"):
        text.build(file=str(tmp_path / "none.txt"))


@pytest.mark.parametrize("options", [{"context": 0}, {"stride": 0}, {"val_fraction": 1.5}])
def test_impossible_numbers_are_refused_by_name(alphabet, options):
    with pytest.raises(GradwatchError, match=rf"data\..*{next(iter(options))}"):
        text.build(**{"file": alphabet} | options)
