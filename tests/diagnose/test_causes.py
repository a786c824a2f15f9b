"""The table of causes is consistent: its kinds and remedies exist, and every kind and condition is used."""

import pytest

from gradwatch.detect import detectors
from gradwatch.diagnose.causes import CAUSES
from gradwatch.diagnose.condition import Condition, DataCondition, RankCondition
from gradwatch.diagnose.remedies import KNOWN

KINDS = {d.kind for d in detectors()}
each = pytest.mark.parametrize("cause", CAUSES, ids=lambda c: c.id)


def test_every_detector_leads_to_a_cause():
    assert {k for c in CAUSES for k in c.leads} >= KINDS


@each
def test_a_cause_speaks_of_kinds_that_exist(cause):
    assert {*cause.leads, *cause.explains} <= KINDS


@each
def test_a_cause_has_remedies_a_source_and_a_way_to_confirm(cause):
    assert cause.remedies, "a cause without remedy helps nobody"
    assert set(cause.remedies) <= set(KNOWN)
    assert "http" in cause.source
    assert cause.confirm.endswith(".")
    assert cause.because.endswith(".")
    assert "{" not in cause.because + cause.confirm, "only remedies have slots"


@each
def test_odds_are_positive_and_explaining_more_never_makes_less_sure(cause):
    assert all(odds > 0 for odds in (*cause.leads.values(), *cause.conditions.values()))
    assert all(odds >= 1 for odds in cause.explains.values())


def test_ids_are_unique_and_every_condition_is_used():
    assert len({c.id for c in CAUSES}) == len(CAUSES)
    used = {condition for c in CAUSES for condition in (*c.requires, *c.excludes, *c.conditions)}
    assert used == {*Condition, *DataCondition, *RankCondition}


def test_names_are_unique_and_every_remedy_is_used():
    assert len({c.name for c in CAUSES}) == len(CAUSES)
    assert {name for c in CAUSES for name in c.remedies} == set(KNOWN)
