"""Check that sizes are read and shown in the units that people write."""

import pytest

from gradwatch.config.sizes import parse_size
from gradwatch.errors import GradwatchError
from gradwatch.render.common.format import shown_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8GB", 8e9), ("1.5 GiB", 1.5 * 2**30), ("24g", 24e9), ("512MB", 512e6), ("4096", 4096), ("2TiB", 2**41)],
)
def test_a_size_is_read_with_its_unit(text, nbytes):
    assert parse_size(text, key="--budget") == nbytes


@pytest.mark.parametrize("text", ["", "GB", "0GB", "-1GB", "8 apples", "8XB", "nan"])
def test_other_texts_are_mistakes(text):
    with pytest.raises(GradwatchError, match="--budget: got"):
        parse_size(text, key="--budget")


def test_a_size_is_shown_with_three_digits():
    assert [shown_size(n) for n in (7, 1304, 3_079_020, 1.12e11, 999_600)] == [
        "7 B",
        "1.3 kB",
        "3.08 MB",
        "112 GB",
        "1 MB",
    ]
