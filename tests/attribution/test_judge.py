"""The verdict follows from the evidence by the thresholds, and each reason says whether it is a proof."""

import math
from dataclasses import replace

import pytest

from gradwatch.attribution.evidence import Deletion, Estimate, Evidence
from gradwatch.attribution.judge import judge
from gradwatch.attribution.thresholds import Thresholds

SOUND = Evidence(
    score=1.0,
    baseline_scores={"zeros": 0.0, "mean": 0.1},
    gap=0.001,
    steps={"zeros": 16, "mean": 16},
    activity=1.0,
    sizes={"zeros": 1.0, "mean": 0.8},
    agreement={"mean": 0.9},
    stability=Estimate(mean=0.95, standard_error=0.01),
    deletion=Deletion(area=0.3, standard_error=0.02, better_orders=0.0, spread=0.1),
    interaction=0.1,
)


def verdict(**changes):
    return judge(replace(SOUND, **changes), "integrated", Thresholds())


def test_a_map_without_objection_holds():
    assert verdict() == ("holds", ())


@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        ({"activity": 0.01}, "saturation", "misleads"),
        ({"deletion": Deletion(area=0.03, standard_error=0.02, better_orders=0.4, spread=0.1)}, "random", "misleads"),
        (
            {"deletion": Deletion(area=0.1, standard_error=0.02, better_orders=0.2, spread=0.1)},
            "within-random",
            "cannot tell",
        ),
        ({"stability": Estimate(mean=0.3, standard_error=0.05)}, "unstable", "misleads"),
        ({"stability": Estimate(mean=0.45, standard_error=0.05)}, "unstable", "cannot tell"),
        ({"gap": 0.05}, "incomplete", "cannot tell"),
        ({"agreement": {"mean": 0.2, "blurred": math.nan}}, "baselines", "cannot tell"),
        ({"interaction": 0.8}, "interaction", "cannot tell"),
        ({"sizes": {"zeros": 0.0, "mean": 0.0}}, "constant", "cannot tell"),
    ],
)
def test_each_objection_has_its_verdict(changes, kind, expected):
    found, reasons = verdict(**changes)

    assert (found, [reason.kind for reason in reasons]) == (expected, [kind])
    assert reasons[0].is_proof == (expected == "misleads")


def test_a_proof_comes_before_a_doubt():
    found, reasons = verdict(interaction=0.8, activity=0.01)

    assert found == "misleads"
    assert [reason.kind for reason in reasons] == ["saturation", "interaction"]


def test_evidence_that_could_not_be_measured_is_no_objection():
    unknown = {"activity": math.nan, "stability": Estimate(mean=math.nan, standard_error=math.nan), "deletion": None}

    assert verdict(**unknown) == ("holds", ())


def test_an_order_that_makes_no_difference_is_no_objection():
    assert verdict(deletion=Deletion(area=0.0, standard_error=0.0, better_orders=0.0, spread=0.0)) == ("holds", ())


def test_a_threshold_is_a_field():
    strict = Thresholds(interaction=0.05)

    assert judge(SOUND, "integrated", strict)[0] == "cannot tell"
