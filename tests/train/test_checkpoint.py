"""Run checkpoints: the last good one is there whatever happens, and what does not fit says so."""

import errno
import json
import os
import random
import re
import subprocess
import textwrap
import warnings

import numpy as np
import pytest
import torch
import warm_python

from gradwatch.errors import CheckpointError
from gradwatch.state import checkpoint_folder as checkpoint_folder
from gradwatch.state.rng import random_state, set_random_state
from gradwatch.train.checkpoint import load, save


def state(step):
    return {"step": step, "model": {"weight": torch.full((50, 40), float(step))}, "lr": [0.1, float("nan")]}


def assert_state(found, step):
    assert found["step"] == step
    assert torch.equal(found["model"]["weight"], torch.full((50, 40), float(step)))


def steps(root):
    return sorted(path.name for path in root.iterdir())


def damage(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_newest_checkpoint_is_loaded(tmp_path):
    for step in (1, 20, 3000000):
        path = save(tmp_path, state(step), step=step, keep=3)
        assert path == tmp_path / f"step-{step:06d}"
    number, found = load(tmp_path)
    assert number == 3000000
    assert_state(found, 3000000)
    assert_state(load(tmp_path, step=20)[1], 20)


def test_the_last_ones_and_the_best_are_kept(tmp_path):
    for step in range(1, 8):
        save(tmp_path, state(step), step=step, keep=2, best=step in (1, 3))
    assert steps(tmp_path) == ["step-000003", "step-000006", "step-000007"]


def test_a_step_that_was_the_best_stays_the_best_when_it_is_saved_again(tmp_path):
    save(tmp_path, state(1), step=1, keep=1, best=True)
    save(tmp_path, state(1), step=1, keep=1, best=False)
    save(tmp_path, state(2), step=2, keep=1)
    assert steps(tmp_path) == ["step-000001", "step-000002"]


def test_saving_an_earlier_step_drops_the_life_that_was_given_up(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, state(step), step=step, keep=9, best=step == 3)
    save(tmp_path, state(2), step=2, keep=9)
    assert steps(tmp_path) == ["step-000001", "step-000002"]
    assert load(tmp_path)[0] == 2


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors", "manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "empty"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, name, how):
    for step in (1, 2):
        save(tmp_path, state(step), step=step, keep=2)
    path = tmp_path / "step-000002" / name
    if how == "flipped":
        damage(path, at=len(path.read_bytes()) // 2 if name != "manifest.json" else 0)
    elif how == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-3] if how == "cut" else b"")

    shortened = "has .* bytes, expected" if name != "manifest.json" else "cannot be read"
    reason = {"gone": "is missing", "cut": shortened, "empty": shortened, "flipped": ""}[how]
    expected = rf"step-000002 is damaged: .*{re.escape(name)}.*{reason}.*Going back to .*step-000001"
    with pytest.warns(RuntimeWarning, match=expected):
        number, found = load(tmp_path)
    assert number == 1
    assert_state(found, 1)
    with pytest.raises(CheckpointError, match="step-000002 is damaged"):
        load(tmp_path, step=2)


def test_every_flipped_byte_of_the_tensors_is_noticed(tmp_path):
    path = save(tmp_path, {"x": torch.arange(3)}, step=1, keep=1) / "tensors.safetensors"
    good = path.read_bytes()
    for at in range(len(good)):
        damage(path, at)
        with pytest.raises(CheckpointError, match="does not match its checksum"):
            load(tmp_path)
        path.write_bytes(good)
    load(tmp_path)


def test_without_a_good_checkpoint_the_error_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint; steps there: none at all"):
        load(tmp_path / "nowhere")
    for step in (1, 2):
        damage(save(tmp_path, state(step), step=step, keep=2) / "state.json")
    with pytest.raises(
        CheckpointError, match=r"step-000002 is damaged.*step-000001 is damaged.*no good checkpoint left"
    ):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 7; steps there: 1, 2"):
        load(tmp_path, step=7)


def test_a_newer_format_asks_for_a_newer_gradwatch_instead_of_going_back(tmp_path):
    for step in (1, 2):
        path = save(tmp_path, state(step), step=step, keep=2) / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": checkpoint_folder.FORMAT + 1}))
    with pytest.raises(CheckpointError, match=r"newer than this gradwatch reads .*update gradwatch"):
        load(tmp_path)


def test_nothing_in_a_checkpoint_is_code(tmp_path):
    path = save(tmp_path, state(1), step=1, keep=1)
    assert steps(path) == ["manifest.json", "state.json", "tensors.safetensors"]
    json.loads((path / "state.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_state_that_cannot_be_saved_leaves_everything_as_it_was(tmp_path):
    save(tmp_path, state(1), step=1, keep=1)
    with pytest.raises(CheckpointError, match=r"state\['bad'\]"):
        save(tmp_path, {"bad": object()}, step=2, keep=1)
    assert steps(tmp_path) == ["step-000001"]


def test_leftovers_of_a_killed_writer_are_put_right(tmp_path):
    save(tmp_path, state(1), step=1, keep=3)
    save(tmp_path, state(2), step=2, keep=3)
    (tmp_path / "step-000003.tmp").mkdir()
    (tmp_path / "step-000003.tmp" / "state.json").write_text("{")
    (tmp_path / "step-000002").rename(tmp_path / "step-000002.old")  # killed between the two renames

    assert_state(load(tmp_path)[1], 2)
    save(tmp_path, state(4), step=4, keep=3)
    assert steps(tmp_path) == ["step-000001", "step-000002", "step-000004"]


class KilledError(BaseException):
    """Stands in for SIGKILL: nothing in between handles it, and clean-up is disabled."""


@pytest.mark.parametrize(
    ("there", "saved"), [([1], 2), ([1], 1), ([1, 5], 2)], ids=["new step", "same step again", "earlier step"]
)
def test_a_kill_at_any_operation_leaves_a_good_checkpoint(tmp_path, monkeypatch, there, saved):
    """Stops the writer at the n-th system operation, for every n, and loads."""
    finished = False
    for n in range(200):
        root = tmp_path / str(n)
        for step in there:
            save(root, state(step), step=step, keep=9)
        count = iter(range(n))

        def stopping(function, count=count):
            def run(*args, **kwargs):
                if next(count, None) is None:
                    raise KilledError
                return function(*args, **kwargs)

            return run

        with monkeypatch.context() as patch:
            for module, name in (
                (os, "fsync"),
                (os, "open"),
                (os, "close"),
                (os, "rename"),
                (os, "mkdir"),
                (os, "unlink"),
                (os, "rmdir"),
                (checkpoint_folder, "_written"),
            ):
                patch.setattr(module, name, stopping(getattr(module, name)))
            try:
                save(root, state(2), step=saved, keep=1)
                finished = True
            except KilledError:
                pass
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _, found = load(root)
        assert_state(found, found["step"])
        assert found["step"] in {*there, 2}
        save(root, state(7), step=7, keep=1)
        assert steps(root) == ["step-000007"], f"leftovers after a kill at operation {n}"
        if finished:
            break
    assert finished, "the writer never got to its end"
    assert n > 12, f"only {n} operations were interrupted"


CHILD = """
import sys, torch
from pathlib import Path
from gradwatch.train.checkpoint import save
root = Path(sys.argv[1])
step = 0
while True:
    step += 1
    save(root, {"step": step, "model": {"weight": torch.full((50, 40), float(step))}}, step=step, keep=1)
    print(step, flush=True)
"""


@pytest.mark.parametrize("after", [1, 3, 20])
def test_kill_9_leaves_the_last_checkpoint_good(tmp_path, after):
    process = subprocess.Popen([*warm_python.command(), "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    done = [int(process.stdout.readline()) for _ in range(after)]
    process.send_signal(warm_python.KILL)
    done += [int(line) for line in process.stdout if line.endswith("\n")]
    process.wait()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        number, found = load(tmp_path)
    assert number >= done[-1], "a checkpoint that was reported saved is gone"
    assert_state(found, number)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_says_that_the_last_checkpoint_is_intact_and_what_to_do(tmp_path, monkeypatch, code):
    save(tmp_path, state(1), step=1, keep=1)

    def full(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError) as caught:
            save(tmp_path, state(2), step=2, keep=1)
    text = str(caught.value)
    assert os.strerror(code).lower() in text
    assert "a checkpoint takes 8,000 bytes" in text
    assert f"The last good checkpoint is intact: {tmp_path / 'step-000001'}" in text
    assert "Free space on that disk" in text
    assert steps(tmp_path) == ["step-000001"]
    assert_state(load(tmp_path)[1], 1)


def test_a_file_size_limit_stops_a_real_writer_without_harm(tmp_path):
    code = """
        import resource, sys, torch
        from pathlib import Path
        from gradwatch.errors import GradwatchError
        from gradwatch.train.checkpoint import save
        root = Path(sys.argv[1])
        save(root, {"step": 1, "model": {"weight": torch.full((50, 40), 1.0)}}, step=1, keep=1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        try:
            save(root, {"step": 2, "model": {"weight": torch.full((50, 40), 2.0)}}, step=2, keep=1)
        except GradwatchError as error:
            print(error)
    """
    command = [*warm_python.command(), "-c", textwrap.dedent(code), str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "file too large" in output
    assert "The last good checkpoint is intact" in output
    assert_state(load(tmp_path)[1], 1)


def test_an_unwritable_root_is_not_called_a_full_disk(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(
        CheckpointError, match=r"cannot be written: (file exists|not a directory)\. There is no earlier"
    ):
        save(tmp_path / "file", state(1), step=1, keep=1)


def draw():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(()), torch.randn(())


def test_random_generators_go_on_where_they_were(tmp_path):
    random.gauss(0, 1)  # leaves a second normal number waiting in the generator
    np.random.randn()
    save(tmp_path, {"random": random_state()}, step=1, keep=1)
    expected = draw()
    draw()
    set_random_state(load(tmp_path)[1]["random"])
    assert draw() == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_every_cuda_generator_goes_on_where_it_was(tmp_path):
    torch.rand(1, device="cuda")
    save(tmp_path, {"random": random_state()}, step=1, keep=1)
    expected = [torch.rand(3, device=f"cuda:{i}") for i in range(torch.cuda.device_count())]
    set_random_state(load(tmp_path)[1]["random"])
    for i, numbers in enumerate(expected):
        assert torch.equal(torch.rand(3, device=f"cuda:{i}"), numbers)


def test_a_run_goes_on_where_there_are_fewer_devices(monkeypatch):
    saved = random_state() | {"cuda": [torch.get_rng_state()] * 2}
    used = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _, device: used.append(device))
    set_random_state(saved)
    assert used == [0]
