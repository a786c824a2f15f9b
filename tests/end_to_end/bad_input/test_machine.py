"""A full disk keeps what is there, and a signal gives the terminal back."""

import os
import pty
import re
import select
import signal
import subprocess
import time

import pytest
from end_to_end.bad_input.commands import FILLING, in_process, settings

from gradwatch.cli import main

DISK_FULL = {
    "history": (
        "history/steps/*",
        r"error: {run}/history/steps/\d+\.bin: file too large\. [\d,]+ more bytes were needed",
    ),
    "checkpoint": (
        "state.json",
        r"error: {run}/checkpoints/step-000010.tmp: file too large: a checkpoint takes [\d,]+ bytes\. "
        r"The last good checkpoint is intact: {run}/checkpoints/step-000005\. Free space on that disk",
    ),
}


@pytest.mark.parametrize(("like", "message"), DISK_FULL.values(), ids=DISK_FULL.keys())
def test_a_full_disk_keeps_the_last_checkpoint_and_says_how_to_go_on(folder, like, message):
    (folder / "filling.py").write_text(FILLING)
    overrides = settings(
        f"model={{target: 'filling:Filling', like: '{like}'}}", "train.steps=40", "train.checkpoint={every: 5}",
        "data.val_fraction=0",
    )  # fmt: skip

    process = in_process(folder, "base.yaml", *overrides, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=60)

    (run,) = (path.relative_to(folder) for path in folder.glob("runs/*"))
    assert process.returncode == 2, err
    assert "Traceback" not in err
    assert re.search(message.format(run=run), err), err
    assert err.endswith(f"; continue from its checkpoint of step 5 with: gradwatch train --resume {run}\n")
    assert main(["train", "--resume", str(run), *settings("train.steps=6")]) == 0, "the disk has room again"


def test_a_full_disk_under_tensorboard_stops_only_that(folder):
    # without its thrift, so that it is TensorBoard's file that grows too large first
    thriftless = "from gradwatch.render.tensorboard import throttle\nthrottle.GRACE_S = 60.0\n"
    (folder / "filling.py").write_text(FILLING + thriftless)
    overrides = settings(
        "model={target: 'filling:Filling', like: 'tensors.safetensors', room: 9000}",
        "train.steps=45",
        "train.checkpoint={every: 5}",
        "sinks.tensorboard={every: 1, layers_every: 1}",
    )

    process = in_process(folder, "base.yaml", *overrides, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    _, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    events, report = err.splitlines()
    assert events.startswith("warning: sink TensorBoard failed (OSError: File too large)")
    assert report.startswith("warning: could not write the report: runs/"), "it is larger than what is left, too"


def read_until(terminal, text, *, seen="", seconds=60):
    """Return what a terminal shows until a text is there."""
    deadline = time.monotonic() + seconds
    while text not in seen:
        assert time.monotonic() < deadline, seen[-2000:]
        if select.select([terminal], [], [], 0.2)[0]:
            try:
                seen += os.read(terminal, 65536).decode(errors="replace")
            except OSError:  # Linux: the other end was closed
                break
    return seen


@pytest.mark.parametrize(("workers", "to_all"), [(0, False), (2, True)], ids=["one process", "the whole group"])
def test_a_terminal_is_given_back_after_a_signal(folder, workers, to_all):
    overrides = settings("train.steps=1000000", f"data.workers={workers}")
    ours, theirs = pty.openpty()
    process = in_process(
        folder, "base.yaml", *overrides, stdin=theirs, stdout=theirs, stderr=theirs, text=False, start_new_session=True
    )
    os.close(theirs)

    seen = read_until(ours, "/1,000,000")
    send = os.killpg if to_all else os.kill
    send(process.pid, signal.SIGTERM)
    seen = read_until(ours, "gradwatch train --resume", seen=seen)

    assert process.wait(timeout=30) == 3, seen
    assert "Traceback" not in seen
    assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l") >= 0, "the cursor was hidden, and is back"
    os.close(ours)
