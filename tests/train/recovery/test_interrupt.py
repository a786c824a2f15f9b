"""The first signal asks, the second quits, and afterwards the handlers are as before."""

import os
import signal

import pytest

from gradwatch.train.recovery.interrupt import Interrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_asks(number):
    with Interrupt() as interrupt:
        os.kill(os.getpid(), number)

        assert interrupt.requested


def test_the_second_signal_quits():
    with Interrupt():
        os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

    with Interrupt():
        pass

    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
