"""An activity is held to its share of the time."""

import pytest

from gradwatch.time_quota import TimeQuota


def test_what_remains_is_what_was_earned_and_not_spent():
    quota = TimeQuota(0.1)
    quota.charge(0.25)

    assert quota.remaining_s(10.0) == pytest.approx(0.75)
    quota.reset()
    assert quota.remaining_s(10.0) == pytest.approx(1.0)


def test_another_activity_must_be_earned_or_within_the_grace():
    quota = TimeQuota(0.1)
    quota.charge(1.0)

    assert not quota.allows_another(19.9)
    assert quota.allows_another(20.1)
    assert quota.allows_another(0.0, grace_s=2.0)
    assert not TimeQuota(0.1, expected_s=1.0).allows_another(9.9)


def test_a_pause_earns_the_last_activity():
    quota = TimeQuota(0.01)
    quota.charge(5.0)
    quota.charge(0.02)

    assert quota.pause_s == pytest.approx(2.0)
