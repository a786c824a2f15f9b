"""A training that runs out of memory ends with the plan of its step and the changes that fit, without a traceback."""

import pytest
from end_to_end.bad_input.commands import settings

from gradwatch.cli.output import out_of_memory
from gradwatch.train.step import Stepper

ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "


def test_weights_that_no_machine_holds_are_planned(train, folder):
    # 256 TB, twice what a process can address
    code, out, err = train("base.yaml", *settings("model.width=1000000000000"))

    assert code == 2
    assert "TB on cpu" in out
    assert "does not fit in" in out
    assert err.startswith("error: out of memory: can't allocate memory: you tried to allocate 256000000000000 bytes; ")
    assert "Traceback" not in err
    assert not list(folder.glob("runs/*"))


PLAIN = ("optim={name: sgd, lr: 0.1}", "train.precision=bf16")
"""Settings that leave few changes to plan."""


@pytest.fixture
def failing(monkeypatch):
    """Let the third step run out of memory, and return a function that sets what is free then."""
    backward = Stepper.backward
    calls = []

    def fail(self, window):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError(f"{ALLOCATOR}allocate 4096 bytes. Error code 12 (Cannot allocate memory)")
        return backward(self, window)

    monkeypatch.setattr(Stepper, "backward", fail)
    return lambda left: monkeypatch.setattr(out_of_memory, "host_memory_left", lambda: left)


def test_the_smallest_change_that_fits_is_shown(train, failing, folder):
    failing(2**19)
    code, out, err = train("base.yaml", *settings("model.width=64", "data.batch_size=1024", *PLAIN))

    assert code == 2
    assert "does not fit in 524 kB" in out
    assert "largest data.batch_size that fits: " in out
    assert "fits, same updates" in out
    assert "  accumulate: " in out
    assert "error: out of memory: can't allocate memory: you tried to allocate 4096 bytes; " in err
    assert "note: the run got to step 2" in err
    (run,) = folder.glob("runs/*")
    assert '"kind": "out-of-memory"' in (run / "findings.jsonl").read_text()


def test_a_step_that_fits_has_another_cause(train, failing):
    failing(2**40)
    code, out, err = train("base.yaml", *settings("data.batch_size=64"))

    assert code == 2
    assert "fits in 1.1 TB" in out
    assert "note: the step itself would fit: something else took the memory, or it grew over the steps" in err
