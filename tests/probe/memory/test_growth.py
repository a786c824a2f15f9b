"""Growth is a finding only when it is even and half of the free memory is gone; fragmentation needs retries."""

import pytest

from gradwatch.probe.memory.growth import MAX_READINGS, MIN_READINGS, GrowthJudge, find_fragmentation

LIMIT = 10e9
BEGIN, RATE = 1e9, 5e5  # bytes, bytes per step
STEPS_PER_READING = 100


def first_alarm(used, *, total_steps=None, readings=400):
    """Return the step and the observation of the first alarm for readings of memory, or None."""
    growth = GrowthJudge(total_steps)
    for i in range(readings):
        step = i * STEPS_PER_READING
        now = used(step)
        if found := growth.add(step, now, lambda now=now: LIMIT - now):
            return step, found
    return None


def test_even_growth_is_found_when_half_of_the_free_memory_is_gone():
    step, found = first_alarm(lambda step: BEGIN + RATE * step)

    half = (LIMIT - BEGIN) / 2 / RATE
    # later readings are two apart, since every second one is dropped
    assert half <= step <= half + 4 * STEPS_PER_READING
    assert found.values["rate"] == pytest.approx(RATE)
    assert found.values["steps"] == pytest.approx((LIMIT - BEGIN - RATE * step) / RATE)
    assert "grows by 0.5 MB a step, and is full in about" in found.text


def test_growth_that_ends_in_time_is_none():
    full = (LIMIT - BEGIN) / RATE

    assert first_alarm(lambda step: BEGIN + RATE * step, total_steps=int(0.9 * full), readings=162) is None
    assert first_alarm(lambda step: BEGIN + RATE * step, total_steps=int(2 * full)) is not None


BOUNDED = {
    "constant": lambda step: BEGIN,
    "a replay buffer that is full at step 8,000": lambda step: BEGIN + RATE * min(step, 8_000),
    "a cache of the data, filled in the first epoch": lambda step: BEGIN + 2e9 * (1 - 0.999**step),
    "a library that starts late": lambda step: BEGIN + 6e9 * (step > 3_000),
    "an epoch that frees what it kept": lambda step: BEGIN + RATE * (step % 2_000),
    "shrinking": lambda step: BEGIN * 0.99 ** (step / 100),
}


@pytest.mark.parametrize("used", BOUNDED.values(), ids=BOUNDED)
def test_memory_that_is_bounded_raises_no_alarm(used):
    assert first_alarm(used) is None


# MB of the process once a second, measured on a machine with 2 cores: a small model that inductor compiles, and the
# first epochs with two worker processes, which start again in each epoch or persist
MEASURED = {
    "a model that is compiled": [
        *(294, 313, 324, 330, 337, 342, 352, 359, 366, 374, 378, 382, 394, 404, 410, 416, 418, 420, 427, 428, 431, 432),
        *(432, 432, 434, 435, 437, 440, 441, 444, 450, 450, 450, 450, 450, 450, 450, 450, 450, 450, 450, 451, 452, 453),
        *(454, 454, 455, 455, 455, 455, 455, 455, 455, 455, 455, 455),
    ],
    "workers that start again": [
        *(294, 317, 329, 342, 350, 359, 365, 372, 380, 382, 382, 382, 382, 382, 382, 382, 382, 386, 390, 390, 382, 382),
        *(382, 385, 385, 382, 382, 382),
    ],
    "persistent workers": [
        *(296, 317, 329, 342, 350, 358, 365, 371, 378, 383, 396, 396, 384, 387, 391, 396, 396, 396, 396, 396, 396, 397),
        *(397, 392, 395, 395, 395, 395, 383, 387),
    ],
}


def alarms(megabytes, *, limit):
    growth = GrowthJudge()
    found = [growth.add(step, 1e6 * now, lambda now=now: limit - 1e6 * now) for step, now in enumerate(megabytes)]
    return [observation for observation in found if observation]


@pytest.mark.parametrize("megabytes", MEASURED.values(), ids=MEASURED)
def test_the_start_of_a_compiler_or_of_workers_raises_no_alarm_where_even_growth_would(megabytes):
    end = max(megabytes)
    tight = 1e6 * (end + 0.8 * (end - megabytes[0]))  # even growth by as much would fill more than half of it

    assert alarms(megabytes, limit=tight) == []
    count = max(len(megabytes), MIN_READINGS)
    even = [megabytes[0] + (end - megabytes[0]) * i / (count - 1) for i in range(count)]
    assert alarms(even, limit=tight)


def test_few_readings_say_nothing_and_their_number_stays_bounded():
    assert first_alarm(lambda step: BEGIN + 8.9e9 * step / 1_400, readings=MIN_READINGS - 1) is None
    growth = GrowthJudge()
    for step in range(10 * MAX_READINGS):
        growth.add(step, BEGIN, lambda: LIMIT)
    assert len(growth._readings) <= MAX_READINGS


def statistics(*, retries=5, split=8, reserved=20):
    return {
        "num_alloc_retries": retries,
        "inactive_split_bytes.all.current": int(split * 1e9),
        "reserved_bytes.all.current": int(reserved * 1e9),
    }


def test_fragmentation_is_retries_with_much_memory_in_pieces():
    found = find_fragmentation(statistics())

    assert found.text == "8 of 20 GB reserved are unusable pieces, and 5 allocations were tried again"


@pytest.mark.parametrize("few", [{"retries": 1}, {"split": 3.9}, {"reserved": 0, "split": 0}], ids=str)
def test_one_retry_or_few_pieces_are_no_fragmentation(few):
    assert find_fragmentation(statistics(**few)) is None
    assert find_fragmentation({}) is None
