"""How often something is shown."""

import pytest

from gradwatch.render.tensorboard.throttle import GRACE_S, Throttle


def test_it_is_due_every_so_many_steps():
    throttle = Throttle(10, fraction=1.0)

    granted = [step for step in range(35) if throttle.grants(step, elapsed_s=1.0)]

    assert granted == [0, 10, 20, 30]


def test_it_catches_up_after_steps_that_were_not_shown():
    throttle = Throttle(10, fraction=1.0, first=10)

    granted = [step for step in (3, 17, 18, 20, 45, 49, 50) if throttle.grants(step, elapsed_s=1.0)]

    assert granted == [17, 20, 45, 50]


def test_zero_is_never():
    assert not any(Throttle(0, fraction=1.0).grants(step, elapsed_s=1e9) for step in range(100))


@pytest.mark.parametrize("cost_s", [0.0001, 0.003, 0.02])
def test_it_takes_no_more_than_its_share_of_the_time(cost_s):
    throttle, elapsed_s, step_s = Throttle(10, fraction=0.003), 0.0, 0.001

    for step in range(50_000):
        if throttle.grants(step, elapsed_s=elapsed_s):
            throttle.quota.charge(cost_s)
            elapsed_s += cost_s
        elapsed_s += step_s

    assert throttle.quota.spent_s <= GRACE_S + 0.003 * elapsed_s
    affordable = min(5000, (GRACE_S + 0.003 * elapsed_s) / cost_s)
    assert throttle.quota.spent_s / cost_s >= 0.8 * affordable, "and makes use of it"
