"""What a user gets wrong is told in one message, without a traceback, with the way out, and leaves nothing behind."""

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import warnings

import pytest

from gradwatch.cli import main
from gradwatch.errors import PACKAGE

CONFIG = """\
run: {out: runs}
model: {name: mlp, depth: 2, width: 8}
data: {name: digits}
optim: {name: adamw, lr: 1e-3}
train: {steps: 4, threads: 1}
sinks: {tensorboard: {enabled: false}}
"""
USERS_CODE = """\
import torch
import warnings
from torch import nn
from torch.utils.data import TensorDataset


class Linear(nn.Module):
    def __init__(self, outputs=10, stride=1):
        super().__init__()
        self.head = nn.Linear(64, outputs)
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        return self.head(images.flatten(1))


class Pair(Linear):
    def forward(self, images):
        return super().forward(images), images


class Buggy(Linear):
    def __init__(self, after=0):
        super().__init__()
        self.after = after

    def forward(self, images):
        outputs = super().forward(images)
        if self.calls > self.after:
            raise RuntimeError("my own bug")
        return outputs


class Warning_(Linear):
    def forward(self, images):
        warnings.warn("my own\\n   warning", stacklevel=1)
        return super().forward(images)


class Frozen(Linear):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class Channels(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images):
        return self.conv(images)


def number():
    return 3


def failing():
    return {}["k"]


def empty():
    return TensorDataset(torch.zeros(0, 4), torch.zeros(0, dtype=torch.long))


def per_sample(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


def detached(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets).detach()


def plain(outputs, targets):
    return 3.0


def alone(outputs):
    return outputs


constant = 3
"""
FILLING = '''\
import resource
from pathlib import Path
from torch import nn


class Filling(nn.Module):
    """From its eighth call on, no file can grow far beyond the size that some file of the run has."""

    def __init__(self, like, room=100):
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.like, self.room = like, room
        self.calls = 0

    def forward(self, images):
        self.calls += 1
        if self.calls == 8:
            size = max(path.stat().st_size for path in Path("runs").rglob(self.like))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + self.room, resource.RLIM_INFINITY))
        return self.head(images.flatten(1))
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a folder to work in, with a config and a user's own modules."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.yaml").write_text(CONFIG)
    (tmp_path / "mine.py").write_text(USERS_CODE)
    (tmp_path / "broken.py").write_text("def model(\n")
    (tmp_path / "failing.py").write_text("raise OSError('no licence')\n")
    (tmp_path / "needing.py").write_text("import surely_not_installed\n")
    (tmp_path / "header.csv").write_text("a,b,label\n")
    (tmp_path / "noise.npz").write_bytes(b"no zip")
    yield tmp_path
    for name in ("mine", "broken", "failing", "needing"):
        sys.modules.pop(name, None)
    sys.path[:] = [path for path in sys.path if path != str(tmp_path)]


@pytest.fixture
def train(folder, capsys):
    """Return a function that trains with overrides and returns the exit code, and what was written to both outputs."""

    def run(*args):
        code = main(["train", *map(str, args)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def settings(*overrides):
    return [part for override in overrides for part in ("--set", override)]


def line_of(text):
    """Return the number of the line of the user's code with a text in it."""
    return 1 + next(i for i, line in enumerate(USERS_CODE.splitlines()) if text in line)


MISTAKES = {
    "unknown key": (
        ["optm.lr=1"],
        "optm: unknown setting, expected one of run, model, data, loss, optim, schedule, train, watch, detect, sinks; "
        "did you mean 'optim'? (--set optm.lr=1)",
    ),
    "wrong type": (
        ["train.steps=many"],
        "train.steps: got 'many', expected a whole number of at least 1, or null (--set train.steps=many)",
    ),
    "misspelt model": (
        ["model.name=mpl"],
        "model.name: got 'mpl', expected one of cnn, gpt, mlp, or a classification model of torchvision "
        "(`gradwatch list models` shows all); did you mean 'mlp'? (--set model.name=mpl)",
    ),
    "missing data file": (["data={name: csv, file: gone.csv}"], "data.file: no file {folder}/gone.csv, expected a CSV"),
    "damaged data file": (["data={name: npz, file: noise.npz}"], "data.file: noise.npz is no NumPy .npz; write one"),
    "no data there": (
        ["data={name: MNIST, root: gone}"],
        "data.root: MNIST was not found in {folder}/gone (Dataset not found. You can use download=True to download it)"
        "; put its files there, or let data.download: true fetch them",
    ),
    "table without rows": (
        ["data={name: csv, file: header.csv}"],
        "data.file: header.csv holds no row of data, expected at least one sample",
    ),
    "empty dataset": (
        ["data={target: 'mine:empty'}"],
        "data.target: the training part is empty, expected at least one sample",
    ),
    "batch larger than the data": (
        ["data.batch_size=2000", "data.drop_last=true"],
        "data.batch_size: got 2000 for 1438 samples, and data.drop_last leaves out a batch that is not full: none "
        "would be left; expected at most 1438, or drop_last: false",
    ),
    "module that is not there": (
        ["model={target: 'gone.away:model'}"],
        "model.target: 'gone.away:model' does not import: No module named 'gone'; expected package.module:factory, on "
        "the Python path or below the folder that gradwatch runs in",
    ),
    "module that needs another": (
        ["model={target: 'needing:model'}"],
        "model.target: 'needing:model' does not import: ModuleNotFoundError: No module named 'surely_not_installed' "
        "(needing.py, line 1, in <module>)",
    ),
    "module with a syntax error": (
        ["model={target: 'broken:model'}"],
        "model.target: 'broken:model' does not import: SyntaxError: '(' was never closed (broken.py, line 1)",
    ),
    "module that raises": (
        ["model={target: 'failing:model'}"],
        "model.target: 'failing:model' does not import: OSError: no licence (failing.py, line 1, in <module>)",
    ),
    "misspelt attribute": (
        ["model={target: 'mine:Buggi'}"],
        "model.target: module 'mine' has no 'Buggi'; did you mean 'Buggy'?",
    ),
    "attribute that cannot be called": (
        ["model={target: 'mine:constant'}"],
        "model.target: 'mine:constant' is a int, expected a function or a class",
    ),
    "target that returns no module": (
        ["model={target: 'mine:number'}"],
        "model.target: 'mine:number' returned a int, expected a nn.Module",
    ),
    "target that raises": (
        ["model={target: 'mine:failing'}"],
        f"model.target: 'mine:failing' raised KeyError: 'k' (mine.py, line {line_of('{}[')}, in failing)",
    ),
    "target with other keywords": (
        ["model={target: 'mine:Linear', strid: 2}"],
        "model.target: 'mine:Linear' does not accept these settings: got an unexpected keyword argument 'strid'",
    ),
    "data target that raises": (
        ["data={target: 'mine:failing'}"],
        "data.target: 'mine:failing' raised KeyError: 'k' (",
    ),
    "model without anything to train": (
        ["model={target: 'mine:Frozen'}"],
        "model: 'mine:Frozen' has no parameter to train: each has requires_grad=False",
    ),
    "model that returns a tuple": (
        ["model={target: 'mine:Pair'}"],
        "model: returned a tuple of 2, expected one tensor for CrossEntropyLoss; return the logits alone, or give a "
        "loss that takes this output (loss.target: package.module:function)",
    ),
    "loss per sample": (
        ["loss={target: 'mine:per_sample'}"],
        "loss: returned a tensor of shape (64,), expected a scalar; use reduction: mean, or return loss.mean()",
    ),
    "loss that is no tensor": (
        ["loss={target: 'mine:plain'}"],
        "loss: returned a float, expected a tensor of one number",
    ),
    "loss that is cut off": (
        ["loss={target: 'mine:detached'}"],
        "loss: no parameter has a part in it, so there is no gradient to take; look for detach(), item(), no_grad() or "
        "a new tensor between the model's parameters and the loss",
    ),
    "loss of other arguments": (
        ["loss={target: 'mine:alone'}"],
        "loss.target: 'mine:alone' is called with the model's outputs and the targets: too many positional arguments",
    ),
    "fewer outputs than classes": (
        ["model={target: 'mine:Linear', outputs: 3}"],
        "loss: the labels of a batch run from 0 to 9, but the model has 3 outputs, expected labels from 0 to 2; give "
        "the model as many outputs as there are classes, or mend the labels",
    ),
    "class weights of another number": (
        ["loss={name: CrossEntropyLoss, weight: [1, 2]}"],
        "loss: CrossEntropyLoss cannot take outputs of shape (64, 10) and targets of shape (64,) and type torch.int64",
    ),
    "values against labels": (
        ["loss={name: MSELoss}"],
        "loss: MSELoss got outputs of shape (64, 10) and targets of shape (64,), expected equal shapes; broadcasting "
        "would compare every output with every target",
    ),
    "gpt on images": (
        ["model={name: gpt}"],
        "model: gpt takes tokens, but the data has classes; use mlp or cnn, or data: text",
    ),
    "mlp on text": (
        ["data={name: text}"],
        "model: mlp takes classes or values, but the data has a label per position; use gpt",
    ),
    "cnn on a table": (
        ["model={name: cnn}", "data={name: synthetic}"],
        "model: cnn takes images of shape (channels, height, width), but a sample has shape (20,); use mlp, or give "
        "the data that shape",
    ),
    "colour model on grey images": (
        ["model={name: resnet18}"],
        "model: resnet18 takes images of 3 channels, but a sample has 1; add {{Grayscale: {{num_output_channels: 3}}}} "
        "to data.transform",
    ),
    "images too small for a torchvision model": (
        ["model={name: alexnet}", "data.transform=[{Grayscale: {num_output_channels: 3}}]"],
        "model: AlexNet cannot take inputs of shape (64, 3, 8, 8) and type torch.float32: ",
    ),
    "batch of one with BatchNorm": (
        ["model.normalisation=batch", "data.batch_size=1"],
        "model: its BatchNorm cannot normalise one sample, and a batch came with inputs of shape (1, 1, 8, 8) and type "
        "torch.float32; set data.drop_last: true, or another data.batch_size",
    ),
    "schedule that ends before the run": (
        ["schedule={name: one_cycle, max_lr: 1, total_steps: 2}"],
        "schedule.total_steps: OneCycleLR ends after 2 of the 4 times that it is asked for a learning rate; leave it "
        "out to have it fit",
    ),
    "optimizer that refuses": (
        ["optim.lr=-1"],
        "optim: AdamW does not accept these settings: Invalid learning rate: -1.0",
    ),
    "device that does not exist": (
        ["train.device=gpu"],
        "train.device: got 'gpu', expected auto, cpu, cuda, cuda:1, mps or xpu (--set train.device=gpu)",
    ),
    "device that is not here": (["train.device=cuda:77"], "train.device: 'cuda:77' cannot be used here: "),
    "compiler that is not there": (["train.compile={backend: gone}"], "train.compile: Invalid backend: 'gone'."),
    "folder that cannot be made": (
        ["run.out=base.yaml/runs"],
        "run.out: cannot make base.yaml/runs/",
    ),
    "more memory than there is": (
        ["model.width=1000000000000"],  # 256 TB, twice what a process can address
        "out of memory: can't allocate memory: you tried to allocate 256000000000000 bytes; lower data.batch_size",
    ),
}


@pytest.mark.parametrize(("overrides", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_one_message_that_says_the_way_out_and_leaves_no_run(train, folder, overrides, message):
    code, out, err = train("base.yaml", *settings(*overrides))

    assert err.startswith(f"error: {message.format(folder=folder)}"), err
    assert err.count("\n") == 1, "one message, without traceback"
    assert (code, out) == (2, "")
    assert not list(folder.glob("runs/*")), "a run without a step is not kept"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "other.yaml: there is no such file"),
        ("", "other.yaml"),
        ("- a\n- b\n", "other.yaml"),
        ("a: &x [1\n", "other.yaml: is not YAML: "),
        ("train: {steps: 1, steps: 2}\n", "other.yaml"),
        ("train:\n\tsteps: 1\n", "other.yaml: is not YAML: "),
    ],
)
def test_a_config_that_is_no_yaml_mapping_is_a_mistake_with_its_file(train, folder, text, message):
    if text is not None:
        (folder / "other.yaml").write_text(text)

    code, out, err = train("other.yaml")

    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_anchors_and_merges_of_yaml_are_understood(train, folder):
    (folder / "other.yaml").write_text(CONFIG.replace("{name: mlp,", "&m {name: mlp,") + "detect: {}\n")

    assert train("other.yaml")[0] == 0


def test_a_batch_larger_than_the_data_is_the_whole_data(train):
    code, _, err = train("base.yaml", *settings("data.batch_size=2000"))

    assert (code, err) == (0, "")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bug_in_the_user_s_model_shows_the_user_s_own_lines(train, folder, workers):
    overrides = settings("model={target: 'mine:Buggy', after: 2}", f"data.workers={workers}")

    code, out, err = train("base.yaml", *overrides)

    (run,) = folder.glob("runs/*")
    lines = err.splitlines()
    assert code == 70
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{folder}/mine.py", line {line_of("raise RuntimeError")}, in forward', (
        "the first frame is the user's"
    )
    assert lines[-3:] == [
        "RuntimeError: my own bug",
        "note: the model was called with inputs of shape (64, 1, 8, 8) and type torch.float32",
        f"note: the run got to step 2, before its first checkpoint; see what was recorded with: gradwatch diagnose "
        f"{run.relative_to(folder)}",
    ]
    assert '"status": "failed"' in (run / "run.json").read_text()
    assert "2 steps of 4" in out


def test_a_bug_at_the_first_step_leaves_no_run(train, folder):
    assert train("base.yaml", *settings("model={target: 'mine:Buggy'}"))[0] == 70
    assert not list(folder.glob("runs/*"))


def test_shapes_that_do_not_fit_in_the_user_s_model_are_told_with_those_of_the_inputs(train):
    code, _, err = train("base.yaml", *settings("model={target: 'mine:Channels'}"))

    assert code == 70
    assert 'mine.py", line' in err
    assert "to have 3 channels, but got 1 channels instead" in err
    assert err.endswith("note: the model was called with inputs of shape (64, 1, 8, 8) and type torch.float32\n")


def test_warnings_while_training_are_single_lines(train):
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, err = train(
            "base.yaml", *settings("model={target: 'mine:Warning_'}", "train.accumulate=2", "data.val_fraction=0")
        )

    assert (code, err) == (0, f"warning: my own warning (mine.py, line {line_of('warnings.warn')})\n")


def test_batch_norm_with_accumulation_warns_in_one_line(train):
    overrides = settings("model.normalisation=batch", "train.accumulate=2")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, _, err = train("base.yaml", *overrides)

    assert code == 0
    assert err.startswith("warning: train.accumulate: 1 BatchNorm layers (blocks.0.norm, ...) normalise each")
    assert err.count("\n") == 1


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a finished run with three checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "base.yaml").write_text(CONFIG)
    arguments = settings(
        f"run.out={folder}/runs", "train.steps=30", "train.checkpoint={every: 10, keep: 3, best: false}"
    )
    assert main(["train", str(folder / "base.yaml"), *arguments]) == 0
    (run,) = folder.glob("runs/*")
    return run


@pytest.fixture
def run(trained, folder, capsys):
    """Return a copy of it, in the folder to work in."""
    capsys.readouterr()
    shutil.copytree(trained, folder / "runs" / "one")
    return folder.joinpath("runs", "one").relative_to(folder)


def damage(checkpoint, how):
    tensors = checkpoint / "tensors.safetensors"
    data = bytearray(tensors.read_bytes())
    if how == "truncated":
        del data[100:]
    elif how == "flipped":
        data[len(data) // 2] ^= 1
    elif how == "foreign":
        data = bytearray(b"PK\x03\x04 somebody's torch.save")
    else:
        (checkpoint / "state.json").unlink()
    tensors.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("truncated", "tensors.safetensors has 100 bytes, expected "),
        ("flipped", "tensors.safetensors does not match its checksum"),
        ("foreign", "tensors.safetensors has 26 bytes, expected "),
        ("incomplete", "state.json is missing"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(train, run, how, reason):
    damage(run / "checkpoints" / "step-000030", how)

    code, out, err = train("--resume", run, *settings("train.steps=32"))

    assert code == 0, err
    assert err.startswith(f"warning: {run}/checkpoints/step-000030 is damaged: {reason}")
    assert err.endswith(f". Going back to {run}/checkpoints/step-000020.\n")
    assert "32 steps" in out


def test_no_good_checkpoint_is_a_mistake(train, run):
    for checkpoint in run.glob("checkpoints/*"):
        damage(checkpoint, "truncated")

    code, out, err = train("--resume", run)

    assert (code, out) == (2, "")
    assert err.count(" is damaged: tensors.safetensors has 100 bytes, expected ") == 3
    assert err.endswith(". There is no good checkpoint left.\n")
    assert run.is_dir(), "only a new run is removed"


def test_a_run_without_a_checkpoint_says_how_to_train_anew(train, run):
    shutil.rmtree(run / "checkpoints")

    code, _, err = train("--resume", run)

    assert (code, err) == (
        2,
        f"error: {run}: the run ended before its first checkpoint, so there is nothing to go on from; train it anew: "
        f"gradwatch train {run}/config.yaml\n",
    )


def test_a_finished_run_that_is_resumed_says_how_to_go_on(train, run):
    code, out, err = train("--resume", run)

    assert code == 0
    assert err == ("warning: the run has made all of its 30 steps; to go on, give it more with --set train.steps=...\n")
    assert "healthy" in out


def test_what_a_resume_changes_holds_for_the_next(train, run):
    train("--resume", run, *settings("train.steps=32"))

    _, out, err = train("--resume", run)

    assert "all of its 32 steps" in err
    assert "healthy  " in out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.width=9", "model.width: the run has 8, got 9"),
        ("optim.name=sgd", "optim.name: the run has AdamW, got SGD"),
        ("optim.lr=1", "optim.lr: the run has 0.001, got 1.0"),
        ("schedule={name: StepLR, step_size: 3}", "schedule.name: the run has nothing, got StepLR; schedule.step_size"),
        ("data.batch_size=32", "data.batch_size: the run has 64, got 32"),
        ("run.seed=1", "run.seed: the run has 0, got 1"),
        ("watch.enabled=false", "watch.enabled: the run has True, got False"),
    ],
)
def test_a_config_that_no_longer_fits_the_run_is_a_mistake(train, run, override, message):
    before = (run / "config.yaml").read_text()

    code, out, err = train("--resume", run, *settings(override))

    assert (code, out) == (2, "")
    assert err.startswith(f"error: --resume: {message}")
    assert err.endswith("Leave that as it is, or train anew\n")
    assert (run / "config.yaml").read_text() == before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["diagnose", "."], ". is not a run directory: it has no run.json"),
        (["diagnose", "runs"], "runs is not a run directory: it has no run.json; it contains runs, the last of them "),
        (["diagnose", "base.yaml"], "base.yaml is not a run directory: it has no run.json"),
        (["diagnose", "runs/onne"], "runs/onne: there is no such run directory; did you mean 'one'?"),
        (["train", "--resume", "."], "--resume: . is no run of `gradwatch train`: it holds no config.yaml"),
        (
            ["train", "--resume", "runs"],
            "--resume: runs is no run of `gradwatch train`: it holds no config.yaml; it cont",
        ),
        (["train", "--resume", "gone"], "--resume: there is no run directory gone"),
        (
            ["train", "runs/one"],
            "runs/one: is a folder, expected a YAML file; to go on with that run: gradwatch train ",
        ),
    ],
)
def test_a_run_directory_that_is_none_is_a_mistake(run, capsys, args, message):
    code = main(args)

    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("running", "the run is going on, or its process was killed"),
        ("interrupted", "the run was interrupted"),
        ("failed", "the run ended with an error"),
    ],
)
def test_a_diagnosis_says_of_a_run_that_is_not_finished_how_to_go_on(run, capsys, status, told):
    header = (run / "run.json").read_text()
    (run / "run.json").write_text(header.replace('"status": "finished"', f'"status": "{status}"'))

    main(["diagnose", str(run), "--fail-on", "never"])

    assert capsys.readouterr().err == f"note: {told}; to go on with it: gradwatch train --resume {run}\n"


def in_process(folder, *args, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "gradwatch", "train", *args],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
        text=options.pop("text", True),
        **options,
    )


DISK_FULL = {
    "history": ("history/steps/*", r"error: {run}/history/steps/\d+\.bin: file too large\. \d+ more bytes were needed"),
    "checkpoint": (
        "state.json",
        r"error: {run}/checkpoints/step-000010.tmp: file too large: a checkpoint takes [\d,]+ bytes\. "
        r"The last good checkpoint is intact: {run}/checkpoints/step-000005\. Make room on that disk",
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
    assert err.endswith(f"; go on from its checkpoint of step 5 with: gradwatch train --resume {run}\n")
    assert main(["train", "--resume", str(run), *settings("train.steps=6")]) == 0, "the disk has room again"


def test_a_full_disk_under_tensorboard_stops_only_that(folder):
    # without its thrift, so that it is TensorBoard's file that grows too large first
    thriftless = "from gradwatch.render import _share\n_share.GRACE_S = 60.0\n"
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
    assert events.startswith("warning: sink TensorBoard is switched off: OSError: [Errno 27] File too large: 'runs/")
    assert report.startswith("warning: the report was not written: runs/"), "it is larger than what is left, too"


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

    seen = read_until(ours, "1,000,000")
    send = os.killpg if to_all else os.kill
    send(process.pid, signal.SIGTERM)
    seen = read_until(ours, "gradwatch train --resume", seen=seen)

    assert process.wait(timeout=30) == 3, seen
    assert "Traceback" not in seen
    assert seen.rfind("\x1b[?25h") > seen.rfind("\x1b[?25l") >= 0, "the cursor was hidden, and is back"
    os.close(ours)
