"""Sending delays nobody: a slow server gets fewer points, a dead one is left alone."""

import threading

import pytest

from gradwatch.render.trackers.outbox import MAX_FAILURES, MAX_WAITING, Outbox


@pytest.fixture
def broken():
    return []


@pytest.fixture
def outbox(broken):
    return Outbox("test", on_broken=broken.append)


def fail():
    raise ConnectionError("no route to host")


def test_functions_are_called_in_order_on_another_thread(outbox):
    called = []
    for i in range(5):
        outbox.put(lambda i=i: called.append((i, threading.current_thread().name)))
    outbox.close(lambda: called.append("last"), timeout_s=10)

    assert called == [*((i, "test") for i in range(5)), "last"]


def test_a_slow_server_gets_fewer_points_but_every_finding(outbox):
    gate, points, findings = threading.Event(), [], []
    outbox.put(gate.wait)
    for i in range(3 * MAX_WAITING):
        outbox.put_point(lambda i=i: points.append(i))
    outbox.put(lambda: findings.append("nan"))
    gate.set()
    outbox.close(lambda: None, timeout_s=10)

    # the thread may have taken the function that waits
    assert MAX_WAITING - 1 <= len(points) <= MAX_WAITING
    assert findings == ["nan"]


def test_a_server_that_hangs_does_not_hang_the_end(outbox):
    gate = threading.Event()
    outbox.put(gate.wait)

    with pytest.raises(TimeoutError, match=r"not everything was sent within 0\.1 s"):
        outbox.close(lambda: None, timeout_s=0.1)
    gate.set()


def test_a_dead_server_is_reported_once_and_only_gets_the_end(outbox, broken):
    called = []
    for _ in range(MAX_FAILURES):
        outbox.put(fail)
    outbox.put(lambda: called.append("point"))
    outbox.close(lambda: called.append("end"), timeout_s=10)

    assert called == ["end"]
    assert [str(error) for error in broken] == ["no route to host"]


def test_failures_that_are_not_in_a_row_are_forgiven(outbox, broken):
    called = []
    for _ in range(MAX_FAILURES):
        outbox.put(fail)
        outbox.put(lambda: called.append("point"))
    outbox.close(lambda: None, timeout_s=10)

    assert (len(called), broken) == (MAX_FAILURES, [])


def test_the_end_raises_if_it_fails(outbox):
    with pytest.raises(ConnectionError, match="no route to host"):
        outbox.close(fail, timeout_s=10)
