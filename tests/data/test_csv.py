"""Tables from CSV: what becomes a class or a value, how features are scaled, and where a mistake is."""

import numpy as np
import pytest

from gradwatch.data import check, csv
from gradwatch.errors import GradwatchError


@pytest.fixture
def write(tmp_path):
    def write(content, encoding="utf-8"):
        file = tmp_path / "table.csv"
        file.write_text(content, encoding=encoding)
        return str(file)

    return write


HOUSES = "size,rooms,price\n" + "".join(f"{50 + 10 * i},{1 + i % 4},{100.5 + 7 * i}\n" for i in range(20))
FLOWERS = "length,width,kind\n" + "".join(f"{i}.5,{i % 3},{['rose', 'iris'][i % 2]}\n" for i in range(20))


def test_fractions_are_values_of_width_one(write):
    splits = csv.build(file=write(HOUSES))

    check(splits, "csv")
    assert (splits.spec.kind, splits.spec.outputs, splits.spec.input_shape) == ("values", 1, (2,))
    assert splits.train.targets.shape == (16, 1)
    assert set(splits.train.targets.flatten().tolist()) <= {100.5 + 7 * i for i in range(20)}


def test_words_are_classes_in_sorted_order_held_out_alike(write):
    splits = csv.build(file=write(FLOWERS), standardize=False)

    assert (splits.spec.kind, splits.spec.outputs) == ("classes", 2)
    assert splits.val.targets.bincount().tolist() == [2, 2], "a fifth of ten of each"
    rows = [*zip(splits.train.inputs[:, 0].tolist(), splits.train.targets.tolist(), strict=True)]
    assert all(label == (0 if int(length) % 2 else 1) for length, label in rows), "iris before rose"


@pytest.mark.parametrize(
    ("options", "kind", "outputs"),
    [({"target_column": "rooms"}, "classes", 4), ({"target_column": 1, "kind": "values"}, "values", 1)],
)
def test_whole_numbers_are_classes_unless_told_otherwise(write, options, kind, outputs):
    splits = csv.build(file=write(HOUSES), **options)

    assert (splits.spec.kind, splits.spec.outputs) == (kind, outputs)


def test_features_are_scaled_by_the_training_part_alone(write):
    splits = csv.build(file=write(HOUSES))
    raw = csv.build(file=write(HOUSES), standardize=False)

    assert splits.train.inputs.mean(0).numpy() == pytest.approx([0, 0], abs=1e-6)
    assert splits.train.inputs.std(0, correction=0).numpy() == pytest.approx([1, 1], abs=1e-6)
    mean, deviation = raw.train.inputs.mean(0), raw.train.inputs.std(0, correction=0)
    assert splits.val.inputs.numpy() == pytest.approx(((raw.val.inputs - mean) / deviation).numpy(), abs=1e-5)


def test_a_feature_that_never_changes_does_not_divide_by_zero(write):
    splits = csv.build(file=write("a,b,y\n" + "".join(f"{i},7,{i}.5\n" for i in range(10))))

    assert not splits.train.inputs[:, 1].any()


def test_features_can_be_chosen_by_name_or_number(write):
    table = "id,a,b,y\n" + "".join(f"row{i},{i},{-i},{i}.5\n" for i in range(10))

    splits = csv.build(file=write(table), features=["b", 1], standardize=False)

    assert (splits.train.inputs[:, 0] == -splits.train.inputs[:, 1]).all()


def test_a_table_without_header_and_with_other_marks_is_read(write):
    splits = csv.build(file=write("1;2;0\n3;4;1\n5;6;0\n7;8;1\n\n"), header=False, delimiter=";", val_fraction=0.0)

    assert splits.val is None
    assert len(splits.train) == 4


def test_the_mark_that_spreadsheets_put_before_a_file_is_no_part_of_a_name(write):
    splits = csv.build(file=write(HOUSES, encoding="utf-8-sig"), features=["size"])

    assert splits.spec.input_shape == (1,)


def test_the_split_is_the_same_each_time(write):
    first, second = csv.build(file=write(HOUSES)), csv.build(file=write(HOUSES))

    assert np.array_equal(first.val.inputs, second.val.inputs)


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (
            HOUSES,
            {"target_column": "prise"},
            r"data\.target_column: there is no column 'prise', .*did you mean 'price'",
        ),
        (HOUSES, {"target_column": 3}, r"data\.target_column: there is no column 3, expected one from 0 to 2"),
        (HOUSES, {"features": ["sise"]}, r"data\.features: there is no column 'sise'.*did you mean 'size'"),
        (HOUSES, {"features": ["price"]}, r"data\.features: .*expected columns other than the target 'price'"),
        (HOUSES, {"delimiter": ";;"}, r"data\.delimiter: got ';;', expected one character"),
        ("a,b,y\n1,2,3.5\n1,x,2.5\n", {}, r"row 3, column 'b' is 'x', expected a finite number; leave it out of data"),
        ("a,b,y\n1,,3.5\n", {}, r"row 2, column 'b' is missing, .*gradwatch fills in nothing"),
        ("a,b,y\n1,nan,3.5\n", {}, r"row 2, column 'b' is 'nan', .*gradwatch fills in nothing"),
        ("a,b,y\n1,2,\n", {}, r"row 2, column 'y' is missing"),
        ("a,b,y\n1,2,x\n", {"kind": "values"}, r"row 2, column 'y' is 'x'"),
        ("a,b,y\n1,2\n", {}, r"row 2 has 2 cells, expected 3; is data\.delimiter right"),
        ("a,b,y\n1,2,1\n3,4,1\n", {}, r"every target is .*1.*, expected at least two classes"),
        ("a,a,y\n1,2,3.5\n", {"features": ["a"]}, r"2 columns are called 'a'; give the column's number"),
        ("a,b,y\n", {}, "holds no row of data"),
        ("", {}, "holds no row of data"),
    ],
)
def test_a_mistake_is_named_with_its_place_and_the_way_out(write, table, options, message):
    with pytest.raises(GradwatchError, match=message):
        csv.build(file=write(table), **options)


def test_a_missing_file_is_named_in_full(tmp_path):
    with pytest.raises(GradwatchError, match=rf"data\.file: no file {tmp_path / 'none.csv'}, expected a CSV table"):
        csv.build(file=str(tmp_path / "none.csv"))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "table.csv").write_bytes(b"a,y\n\xff\xfe,1\n")

    with pytest.raises(GradwatchError, match=r"table\.csv, line 2 is not UTF-8 text"):
        csv.build(file=str(tmp_path / "table.csv"))
