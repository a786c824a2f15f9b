"""`gradwatch explain`: the manual page of a kind."""

import pytest

from gradwatch.detect import detectors
from gradwatch.mistakes import MISTAKES


@pytest.mark.parametrize("detector", detectors(), ids=lambda d: d.kind)
def test_every_kind_has_a_page_under_its_name_and_its_code(gradwatch, detector):
    page = gradwatch("explain", detector.kind)

    assert page.code == 0
    assert page.out.startswith(f"{detector.code}  {detector.kind}\n")
    assert gradwatch("explain", detector.code).out == page.out


def test_a_page_ends_with_the_thresholds_as_they_are_written_in_a_config(gradwatch):
    out = gradwatch("explain", "dead_layer").out

    assert "\ndetect:\n  dead-layer:\n    enabled: true\n    every: " in out


def test_without_a_kind_all_are_listed(gradwatch):
    result = gradwatch("explain")

    assert (result.code, result.err) == (0, "")
    found = [[d.code, d.kind] for d in detectors()]
    assert [line.split("\t")[:2] for line in result.out.splitlines()] == [
        *found,
        *([mistake.code, kind] for kind, mistake in MISTAKES.items()),
    ]


@pytest.mark.parametrize("kind", MISTAKES)
def test_every_mistake_has_a_page_under_its_name_and_its_code(gradwatch, kind):
    page = gradwatch("explain", kind)

    assert page.out.startswith(f"{MISTAKES[kind].code}  {kind}\n\n")
    assert gradwatch("explain", MISTAKES[kind].code).out == page.out
    assert gradwatch("explain", kind.upper().replace("_", "-")).out == page.out


def test_an_unknown_kind_suggests_a_near_one(gradwatch):
    result = gradwatch("explain", "dead-lair")

    assert result.code == 2
    assert result.err == (
        "error: explain: got 'dead-lair', expected a detector such as dead-layer, dead-relu, failed-load "
        "(`gradwatch list detectors` shows all); did you mean 'dead-layer'?\n"
    )


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("vanishing", "did you mean 'vanishing-gradient'?"),
        ("GW1O1", "did you mean 'GW101'?"),
        ("GW999", "expected a detector such as GW001, GW002, GW003 (`gradwatch list detectors` shows all)"),
    ],
)
def test_a_suggestion_has_the_real_spelling_and_codes_for_a_code(gradwatch, kind, words):
    assert words in gradwatch("explain", kind).err
