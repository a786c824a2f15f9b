"""Worker work: in order, on a thread of its own, complete when asked for, and never without its errors."""

import subprocess
import threading
import time

import pytest
import warm_python

from gradwatch.pipeline import worker
from gradwatch.pipeline.worker import Worker


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(worker, "BATCH_S", 0.001)
    monkeypatch.setattr(worker, "MAX_IDLE_S", 0.005)


def test_items_are_worked_off_in_their_order_on_another_thread():
    seen, threads = [], set()

    def process(items):
        seen.extend(items)
        threads.add(threading.current_thread().name)

    work = Worker(process, limit=1000, name="apart")
    for i in range(100):
        work.put(i)
    until(lambda: len(seen) == 100)

    assert seen == list(range(100))
    assert threads == {"apart"}


def test_finish_returns_when_nothing_is_left():
    seen = []
    work = Worker(lambda items: (time.sleep(0.002 * len(items)), seen.extend(items)), limit=1000, name="slow")
    for i in range(10):
        work.put(i)
        time.sleep(0.001)

    work.finish()

    assert seen == list(range(10))
    assert not work.is_busy


def test_a_caller_that_brings_too_much_works_it_off_and_nothing_is_dropped(monkeypatch):
    monkeypatch.setattr(worker, "BATCH_S", 60.0)
    seen = []
    work = Worker(seen.extend, limit=3, name="full")
    work._is_running = True  # a thread that is asleep

    for i in range(10):
        work.put(i)

    assert seen == list(range(8))
    assert len(work) == 2


def test_what_the_work_raises_is_raised_by_the_next_call_and_once():
    def process(items):
        raise ValueError(f"cannot do {items[0]}")

    work = Worker(process, limit=1000, name="broken")
    work.put("this")

    with pytest.raises(ValueError, match="cannot do this"):
        work.finish()
    work.finish()


def test_an_error_ends_the_work_on_what_waited_behind_it(monkeypatch):
    monkeypatch.setattr(worker, "BATCH_S", 60.0)
    monkeypatch.setattr(worker, "MAX_ITEMS_AT_ONCE", 1)
    seen = []

    def process(items):
        if items == [1]:
            raise ValueError("one")
        seen.extend(items)

    work = Worker(process, limit=1000, name="broken")
    work._is_running = True
    for i in range(4):
        work.put(i)
    with pytest.raises(ValueError, match="one"):
        work.finish()
    work.put(4)
    work.finish()

    assert seen == [0, 4]


def test_work_may_ask_for_its_own_end_without_waiting_for_itself():
    seen = []

    def process(items):
        work.finish()
        seen.extend(items)

    work = Worker(process, limit=1000, name="itself")
    work.put(1)
    work.finish()

    assert seen == [1]


def test_the_thread_ends_when_nothing_comes_and_the_next_item_starts_another():
    seen = []
    work = Worker(seen.extend, limit=1000, name="comes and goes")
    for i in range(3):
        work.put(i)
        until(lambda: not [t for t in threading.enumerate() if t.name == "comes and goes"])

    assert seen == [0, 1, 2]


def test_no_item_is_lost_while_the_thread_is_about_to_end(monkeypatch):
    monkeypatch.setattr(worker, "MAX_IDLE_S", 0.0)
    seen = []
    work = Worker(seen.extend, limit=10_000, name="brief")
    for i in range(300):
        work.put(i)
        time.sleep(0.001 if i % 3 else 0.0015)
    until(lambda: len(seen) == 300)

    assert seen == list(range(300))


def test_it_says_how_much_processor_time_the_work_took():
    work = Worker(lambda items: sum(range(200_000)), limit=1000, name="counts")
    work.put(1)
    work.finish()
    once = work.cpu_s
    work.put(2)
    work.finish()

    assert 0 < once < work.cpu_s


def test_a_program_that_ends_has_its_last_items_worked_off():
    program = (
        "import sys; from gradwatch.pipeline.worker import Worker\n"
        "work = Worker(lambda items: print(*items, sep='\\n'), limit=9, name='last')\n"
        "for i in range(3): work.put(i)\n"
        "sys.exit(4)\n"
    )

    ended = subprocess.run([*warm_python.command(), "-c", program], capture_output=True, text=True, timeout=60)

    assert (ended.returncode, ended.stdout) == (4, "0\n1\n2\n")


def until(condition, *, patience_s=20.0):
    end = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.001)
