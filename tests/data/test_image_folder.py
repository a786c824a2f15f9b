"""Folders of pictures: what is left out, how 16 bits are read, and which file is damaged."""

import numpy as np
import pytest
import torch
from PIL import Image
from real_formats import write_folder
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision import datasets

from gradwatch.data import _torchvision
from gradwatch.data._sample_files import file_of, read_sample
from gradwatch.data._transforms import apply
from gradwatch.errors import GradwatchError
from gradwatch.train.batches import Batches

ROTATION = [{"RandomRotation": {"degrees": 5}}]


def _cut(path):
    path.write_bytes(path.read_bytes()[:60])


def _fill(path):
    path.write_text("no picture")


@pytest.mark.parametrize("folder", [".ipynb_checkpoints", "empty", ".thumbnails"])
def test_folders_that_are_no_class_are_left_out_with_a_note(tmp_path, folder):
    write_folder(tmp_path / "train")
    write_folder(tmp_path / "val", each=2)
    (tmp_path / "train" / folder).mkdir()
    if folder == ".thumbnails":
        (tmp_path / "train" / folder / "1.png").write_bytes((tmp_path / "train" / "cat" / "1.png").read_bytes())
    (tmp_path / "train" / "cat" / "._1.png").write_text("written by macOS")

    splits = _torchvision.build(name="ImageFolder", root=str(tmp_path))

    assert splits.classes == ("cat", "dog")
    assert (len(splits.train), splits.spec.outputs) == (8, 2)
    assert splits.notes == (f"data.root: these folders of {tmp_path}/train are hidden or without a picture: {folder}",)


def test_a_folder_without_any_picture_says_so(tmp_path):
    (tmp_path / "cat").mkdir()

    with pytest.raises(GradwatchError, match=r"no picture in the folders of .*: cat"):
        _torchvision.build(name="ImageFolder", root=str(tmp_path))


@pytest.mark.parametrize("extension", ["png", "tiff", "pgm"])
def test_16_bits_are_scaled_and_not_clipped(tmp_path, extension):
    pixels = np.linspace(0, 65535, 36).reshape(6, 6).astype(np.uint16)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(5):
            Image.fromarray(pixels).save(tmp_path / name / f"{i}.{extension}")

    image, _ = _torchvision.build(name="ImageFolder", root=str(tmp_path)).train[0]

    assert (image.shape, image.dtype) == ((3, 6, 6), torch.float32)
    assert image[2].numpy() == pytest.approx(pixels / 65535, abs=1e-6)


def test_pixels_of_unknown_range_are_refused(tmp_path):
    write_folder(tmp_path)
    Image.fromarray(np.ones((6, 9), np.float32)).save(tmp_path / "cat" / "0.tiff")

    with pytest.raises(GradwatchError, match=r"cat/0\.tiff has 32-bit pixels of unknown range, expected 8 or 16 bits"):
        list(
            Batches(
                _torchvision.build(name="ImageFolder", root=str(tmp_path), val_fraction=0.0).train, batch_size=4
            ).epoch(0)
        )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("harm", [_cut, _fill, lambda path: path.unlink()], ids=["cut", "text", "gone"])
def test_a_damaged_picture_is_named(tmp_path, harm, workers):
    write_folder(tmp_path)
    splits = apply(_torchvision.build(name="ImageFolder", root=str(tmp_path), val_fraction=0.0), augment=ROTATION)
    harm(tmp_path / "dog" / "2.png")
    batches = Batches(splits.train, batch_size=3, shuffle=True, workers=workers)

    with pytest.raises(GradwatchError, match=rf"data: {tmp_path}/dog/2\.png is missing, damaged or not a picture"):
        list(batches.epoch(0))
    batches.close()


def test_the_first_picture_is_named_while_the_training_is_built(tmp_path):
    write_folder(tmp_path)
    _cut(tmp_path / "cat" / "0.png")

    with pytest.raises(GradwatchError, match=r"cat/0\.png is missing, damaged or not a picture"):
        _torchvision.build(name="ImageFolder", root=str(tmp_path), val_fraction=0.0)


def test_pictures_of_different_sizes_are_named(tmp_path):
    write_folder(tmp_path, classes=("cat",))
    write_folder(tmp_path, classes=("dog",), size=(5, 5))
    splits = _torchvision.build(name="ImageFolder", root=str(tmp_path), val_fraction=0.0)

    with pytest.raises(GradwatchError, match=r"inputs of .*cat/0\.png have shape \(3, 6, 9\), .* of .*dog/0\.png"):
        list(Batches(splits.train, batch_size=8).epoch(0))


def test_files_behind_a_users_subsets_are_found(tmp_path):
    write_folder(tmp_path)
    pictures = datasets.ImageFolder(str(tmp_path))
    chained = ConcatDataset([Subset(pictures, [3, 1]), pictures])

    assert [file_of(chained, i).removeprefix(f"{tmp_path}/") for i in (0, 1, 2, 9)] == [
        "cat/3.png",
        "cat/1.png",
        "cat/0.png",
        "dog/3.png",
    ]
    _cut(tmp_path / "cat" / "1.png")
    with pytest.raises(GradwatchError, match=r"cat/1\.png is missing, damaged"):
        read_sample(Subset(pictures, [1]), 0)


def test_a_bug_of_the_user_keeps_its_type_and_gets_the_files_name():
    class Mine(Dataset):
        paths = ("one.dat", "two.dat")

        def __len__(self):
            return 2

        def __getitem__(self, index):
            raise KeyError("bug")

    with pytest.raises(KeyError) as caught:
        list(Batches(Mine(), batch_size=1).epoch(0))

    assert caught.value.__notes__ == ["while reading one.dat of the data (epoch 0)"]
