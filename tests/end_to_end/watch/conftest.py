"""A watch that looks at everything at every step."""

import pytest
from end_to_end.watch.loops import EVERY

import gradwatch


@pytest.fixture
def monitors():
    return []


@pytest.fixture
def watch(monitors):
    """Watch everything at every step, and keep the monitor."""

    def attach(*args, **options):
        monitors.append(gradwatch.watch(*args, **options | {"schedule": EVERY}))
        return monitors[-1]

    return attach
