"""Every mechanism is a fact, an effect that lasts, or a test that shares the error budget, and the page says which."""

import re
import sys
from collections import Counter
from inspect import signature
from pathlib import Path
from types import FunctionType

from gradwatch.detect import detector_classes
from gradwatch.detect.features.sequential_test import ALPHA, SequentialTest

PAGE = (Path(__file__).parents[2] / "docs" / "how-it-works.md").read_text()
SECTION = PAGE.partition("## The error budget")[2].partition("\n## ")[0]
TESTS, EFFECTS = (
    [line for line in SECTION.splitlines() if re.match(rf"\| `{first}", line)] for first in ("[A-Z]", "[a-z]")
)
FACTS = re.findall(r"`([^`]+)`", " ".join(SECTION.partition("Facts, read")[2].partition("\n\n")[0].split()))


def mechanisms():
    """Return the functions that detectors take from their rules to find something, and the other detectors."""
    found = []
    for cls in detector_classes():
        module = sys.modules[cls.__module__]
        rules = [
            f"{cls.kind}: {name}"
            for name, value in vars(module).items()
            if name.startswith("find_") and isinstance(value, FunctionType) and "_rules." in value.__module__
            if "Recovery" not in str(signature(value).return_annotation)
        ]
        found += rules or [cls.kind]
    return found


def named(rows, column):
    return [re.findall(r"`([^`]+)`", row.split("|")[column])[0] for row in rows]


def test_every_mechanism_has_its_class_on_the_page():
    # each has a second mechanism, with a file of its own: minimized entropies, and the statistics of copies
    expected = {*mechanisms(), "saturated-activation", "train-eval-mismatch"}
    tests = set(named(TESTS, 2))

    written = Counter([*tests, *named(EFFECTS, 1), *FACTS])

    assert set(written) == expected, "classify the mechanism in docs/how-it-works.md, the error budget"
    assert set(written.values()) == {1}, "a mechanism has one class"


def test_every_share_of_the_budget_is_on_the_page():
    assert named(TESTS, 1) == [test.name for test in SequentialTest]
    assert f"at most {100 * ALPHA:.0f} % of all runs" in SECTION
