"""The time of watching that a row tells is all of it, so that the budget can be kept."""

import time

import numpy as np
import pytest
import torch
from end_to_end.watch.loops import batches, loss_of, make

import gradwatch
from gradwatch.monitor import Schedule
from gradwatch.pipeline.ingest import Ingest
from gradwatch.probe.activations.accumulator import ActivationAccumulator
from gradwatch.probe.updates.from_moments import MomentUpdateProbe

SLOW_S = 0.02


def slowed(method):
    def slow(self, *args, **options):
        time.sleep(SLOW_S)
        return method(self, *args, **options)

    return slow


def watched_ms(**options):
    """The time of watching at ten steps."""
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with gradwatch.watch(model, optimizer, **options) as monitor:
        for x, y in batches(10):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor.history["watch_ms"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [(MomentUpdateProbe, "after"), (ActivationAccumulator, "add")],
    ids=["what a step left is traced", "forward hooks"],
)
def test_the_steps_that_measure_more_are_charged_for_it(owner, name, monkeypatch):
    monkeypatch.setattr(owner, name, slowed(getattr(owner, name)))

    spent_T = watched_ms(schedule=Schedule(updates=2, activations=2, histograms=0))

    assert (spent_T[2::2] >= 0.9e3 * SLOW_S).all()
    assert (spent_T[3::2] < 0.9e3 * SLOW_S).all()


def test_what_the_training_waits_for_is_charged_once(tmp_path, monkeypatch):
    ingest = Ingest.ingest

    def slow(self, rows, **options):
        until = time.thread_time() + SLOW_S
        while time.thread_time() < until:
            pass
        return ingest(self, rows, **options)

    monkeypatch.setattr(Ingest, "ingest", slow)

    spent_T = watched_ms(run=tmp_path / "run", record=True)[2:]

    assert 0.9e3 * SLOW_S <= np.median(spent_T) <= 1.8e3 * SLOW_S
