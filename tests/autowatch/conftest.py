"""Run a script without a watch, with the three lines of `watch`, and unedited under `gradwatch run`."""

import contextlib

import pytest

from gradwatch.autowatch.script_watch import ScriptWatch
from gradwatch.autowatch.settings import ScriptSettings
from gradwatch.callbacks import recording
from gradwatch.monitor import Schedule
from gradwatch.monitor import watch as watch_module


@pytest.fixture
def monitors(monkeypatch):
    """Keep every monitor, and make its measurements independent of the clock."""
    kept = []
    watch = watch_module.watch

    def keep(*args, **options):
        kept.append(watch(*args, **options | {"schedule": Schedule(budget=0)}))
        return kept[-1]

    monkeypatch.setattr(watch_module, "watch", keep)
    monkeypatch.setattr(recording, "watch", keep)
    yield kept
    for monitor in kept:
        monitor.close()


@pytest.fixture
def unedited(monitors):
    """Return a context in which an unedited script is watched, and which yields the `ScriptWatch`."""

    @contextlib.contextmanager
    def watching(**settings):
        number = watch_module.calls.number
        watch_module.calls.number = 0  # as in a new process
        script_watch = ScriptWatch(ScriptSettings(**{"run": None} | settings))
        script_watch.install()
        try:
            yield script_watch
        finally:
            script_watch.finish()
            script_watch.end()
            watch_module.calls.number, watch_module.calls.listener = number, None

    return watching
