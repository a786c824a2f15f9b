"""Labels: what may be classes, what a guess says, and one number for each class in both parts of the data."""

import numpy as np
import pytest
import torch
from real_formats import write_folder
from torch.utils.data import Subset, TensorDataset, random_split
from torchvision import datasets

from gradwatch.data import _torchvision, check, csv, from_target, npz
from gradwatch.data._labels import could_be_classes, labels_of
from gradwatch.errors import GradwatchError


@pytest.fixture
def table(tmp_path):
    def write(cells):
        file = tmp_path / "table.csv"
        file.write_text("a,target\n" + "".join(f"{i}.5,{cell}\n" for i, cell in enumerate(cells)))
        return str(file)

    return write


@pytest.fixture
def save(tmp_path):
    def save(**arrays):
        np.savez(tmp_path / "arrays.npz", **arrays)
        return str(tmp_path / "arrays.npz")

    return save


PRICES = [50_000 + 137 * i for i in range(40)]


@pytest.mark.parametrize(
    ("cells", "remedy"),
    [
        (PRICES, "data.kind: values"),
        (PRICES[:25] + [50_000] * 15, "data.kind: values"),  # one price occurs often
        ([-i for i in range(40)], "data.kind: values"),
        ([f"id-{i}" for i in range(40)], "a column of labels"),
    ],
)
def test_labels_that_mostly_occur_once_are_not_taken_for_classes(table, cells, remedy):
    with pytest.raises(GradwatchError, match=rf"data\.kind: column 'target' has \d+ different labels .*{remedy}"):
        csv.build(file=table(cells))

    assert csv.build(file=table(cells), kind="classes").spec.kind == "classes", "unless the user says so"


def test_prices_are_refused_in_arrays_and_in_a_users_dataset(save):
    x = np.random.default_rng(0).normal(size=(40, 3))
    with pytest.raises(GradwatchError, match=r"data\.kind: array 'y' has 40 different labels in 40 samples"):
        npz.build(file=save(x=x, y=PRICES))
    with pytest.raises(
        GradwatchError, match=r"data\.target: the training part has 40 different labels .*float targets"
    ):
        from_target(TensorDataset(torch.from_numpy(x), torch.tensor(PRICES)))


@pytest.mark.parametrize(
    "labels", [[0, 1] * 20, [3, 5, 9] * 5, ["lo", "hi"] * 4, [0] * 30 + [1] * 2, list(range(9)) * 3]
)
def test_labels_that_repeat_are_classes(labels):
    assert could_be_classes(np.array(labels))


@pytest.mark.parametrize(
    ("cells", "kind", "guess"),
    [
        ([0, 1] * 10, "classes", "whole numbers in column 'target'"),
        (["no", "yes"] * 10, "classes", "words in column 'target'"),
        ([f"{i}.25" for i in range(20)], "values", "fractions in column 'target'"),
    ],
)
def test_a_guess_says_where_it_comes_from(table, cells, kind, guess):
    splits = csv.build(file=table(cells))

    assert (splits.spec.kind, splits.guess) == (kind, guess)
    assert not splits.notes
    assert not csv.build(file=table(cells), kind=kind).guess, "nothing is guessed"


def test_flags_written_as_fractions_are_values_with_a_note(table, save):
    (note,) = csv.build(file=table(["0.0", "1.0"] * 10)).notes
    assert note.startswith("data.kind: column 'target' is read as values, for a regression: its 2 different numbers")

    x = np.random.default_rng(0).normal(size=(12, 3))
    assert npz.build(file=save(x=x, y=np.float32([0, 1, 2] * 4))).notes
    assert not npz.build(file=save(x=x, y=np.float32([0, 1, 2] * 4)), kind="values").notes
    assert not npz.build(file=save(x=x, y=np.arange(12.0))).notes, "each number once: amounts"


def test_folders_of_both_parts_get_the_numbers_of_the_training_part(tmp_path):
    write_folder(tmp_path / "train", classes=("ant", "bee", "cat"))
    write_folder(tmp_path / "val", classes=("bee", "cat"), each=2)

    splits = check(_torchvision.build(name="ImageFolder", root=str(tmp_path)), "ImageFolder")

    assert [splits.val[i][1] for i in range(4)] == [1, 1, 2, 2]
    assert splits.notes == ("data: no validation sample belongs to 1 of 3 classes: ant",)


def test_parts_of_a_split_get_the_numbers_of_the_training_part(monkeypatch):
    """DTD, Country211 and ImageNet number the classes of each split by themselves."""

    class Numbered(datasets.FakeData):
        def __init__(self, root, split="train", download=False):
            if split not in ("train", "val"):
                raise ValueError(f"Unknown value '{split}' for argument split.")
            super().__init__(size=6, image_size=(3, 4, 4), num_classes=3)
            self.classes = ["banded", "dotted", "lined"] if split == "train" else ["dotted", "lined"]
            self.class_to_idx = {name: i for i, name in enumerate(self.classes)}
            self._labels = [i % len(self.classes) for i in range(6)]

        def __getitem__(self, index):
            return super().__getitem__(index)[0], self._labels[index]

    monkeypatch.setattr(datasets, "DTD", Numbered)

    splits = check(_torchvision.build(name="DTD"), "DTD")

    assert [splits.val[i][1] for i in range(4)] == [1, 2, 1, 2]
    assert splits.notes == ("data: no validation sample belongs to 1 of 3 classes: banded",)


def test_a_folder_that_the_training_part_lacks_is_refused(tmp_path):
    write_folder(tmp_path / "train", classes=("ant", "bee"))
    write_folder(tmp_path / "val", classes=("ant", "Bee"))

    with pytest.raises(
        GradwatchError, match=r"data\.root: .*/val has a class that .*/train lacks: Bee; .*mean 'bee'\?"
    ):
        _torchvision.build(name="ImageFolder", root=str(tmp_path))


@pytest.mark.parametrize(
    ("y", "val_y", "unknown"),
    [(["a", "b"] * 3, ["a", "B"], "B"), ([0, 1] * 3, [1, 2], "2"), ([0, 1] * 3, ["0", "1"], "0, 1")],
)
def test_validation_targets_that_the_training_part_lacks_are_refused(save, y, val_y, unknown):
    file = save(x=np.eye(6), y=y, vx=np.ones((2, 6)), vy=val_y)

    with pytest.raises(GradwatchError, match=rf"data\.val_targets: has labels that data\.targets lacks: {unknown};"):
        npz.build(file=file, val_inputs="vx", val_targets="vy")


def test_two_datasets_of_a_user_must_number_classes_alike(tmp_path):
    write_folder(tmp_path / "train", classes=("ant", "bee", "cat"))
    write_folder(tmp_path / "val", classes=("bee", "cat"))
    both = [
        datasets.ImageFolder(str(tmp_path / part), transform=lambda image: torch.zeros(3)) for part in ("train", "val")
    ]

    with pytest.raises(
        GradwatchError, match=r"data\.target: class_to_idx: the validation part numbers the classes dif"
    ):
        from_target(both)


def test_a_class_of_validation_alone_is_reported(save):
    inputs = torch.zeros(6, 2)
    train, val = TensorDataset(inputs, torch.tensor([0, 0, 0, 3, 3, 3])), TensorDataset(inputs, torch.tensor([1] * 6))

    notes = check(from_target((train, val)), "mine").notes

    assert notes == (
        "data: no training sample belongs to 2 of 4 classes: 1, 2",
        "data: validation has a class without a training sample, which counts as wrong: 1",
        "data: no validation sample belongs to 2 of 4 classes: 0, 3",
    )


def test_labels_of_selected_samples_are_known():
    base = TensorDataset(torch.zeros(4, 2), torch.tensor([5, 6, 7, 8]))
    base.targets = [5, 6, 7, 8]
    part, _ = random_split(base, [2, 2], generator=torch.Generator().manual_seed(0))

    assert labels_of(part).tolist() == [[5, 6, 7, 8][i] for i in part.indices]
    assert labels_of(Subset(part, [1])).tolist() == [[5, 6, 7, 8][part.indices[1]]]
    assert labels_of(TensorDataset(torch.zeros(4))) is None, "they would have to be read"


def test_a_missing_label_is_called_a_label(table, save):
    with pytest.raises(GradwatchError, match=r"row 3, column 'target' is missing, expected a label"):
        csv.build(file=table(["a", "", "b", "a", "b"]))
    with pytest.raises(GradwatchError, match=r"row 3, column 'target' is missing, expected a label"):
        csv.build(file=table([1, "", 2, 1, 2]), kind="classes")
    with pytest.raises(GradwatchError, match=r"row 4, column 'target' is missing, expected a finite number"):
        csv.build(file=table(["0.5", "1.5", ""]))
    with pytest.raises(GradwatchError, match=r"data\.targets: 'y' at 1 is empty, expected a label"):
        npz.build(file=save(x=np.eye(4), y=["a", "", "a", "b"]))
