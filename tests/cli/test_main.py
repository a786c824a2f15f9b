"""What all commands share: exit codes, where messages go, and that a reader may leave."""

import os
import pathlib
import re
import subprocess
import sys
import warnings

import pytest

import gradwatch as package
from gradwatch.errors import GradwatchError

COMMANDS = ("train", "run", "diagnose", "replay", "runs", "compare", "export", "list", "explain", "schema")


def test_help_names_every_command(gradwatch):
    result = gradwatch("--help")

    assert result.code == 0
    assert all(command in result.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(gradwatch, command):
    result = gradwatch(command, "--help")

    assert (result.code, result.err) == (0, "")
    assert f"gradwatch {command}" in result.out


def test_help_shows_exit_codes_examples_and_the_documentation(gradwatch):
    out = gradwatch("--help").out

    assert "gradwatch train configs/quickstart.yaml --set train.epochs=2" in out
    assert [line.split()[0] for line in out.splitlines() if line.strip()[:2] in ("0 ", "1 ", "2 ", "3 ")] == list(
        "0123"
    )
    assert "Documentation: README.md and the folder docs/" in out


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_shows_no_type_next_to_a_flag(gradwatch, command):
    assert "<bool>" not in gradwatch(*command.split(), "--help").out


def test_help_of_diagnose_is_in_panels(gradwatch):
    out = gradwatch("diagnose", "--help").out

    assert [t for t in ("Output", "Thresholds", "Verify and fix") if f"─ {t} ─" in out] == [
        "Output",
        "Thresholds",
        "Verify and fix",
    ]
    assert re.search(r"--within +SECONDS", out)


def test_the_version_is_the_package_s(gradwatch):
    assert gradwatch("--version").out == f"gradwatch {package.__version__}\n"


@pytest.mark.parametrize("args", [["trian"], ["list", "foo"], ["train", "--nope"], ["train"], ["compare", "a"], []])
def test_a_mistake_on_the_command_line_is_code_2(gradwatch, args):
    assert gradwatch(*args).code == 2


def _flat(err):
    """Return an error of typer's as one line, without the box around it."""
    return " ".join(err.replace("│", "").split())


def test_a_setting_without_its_option_suggests_the_option(gradwatch, config):
    after = gradwatch("train", config, "optim.lr=3e-4")
    alone = gradwatch("train", "optim.lr=3e-4")
    threshold = gradwatch("diagnose", "run", "detect.dead-layer.every=5")

    assert (after.code, alone.code, threshold.code) == (2, 2, 2)
    assert "unexpected extra argument: optim.lr=3e-4; did you mean `--set optim.lr=3e-4`?" in _flat(after.err)
    assert alone.err == (
        "error: train: got optim.lr=3e-4 as CONFIG, expected a YAML file; did you mean `--set optim.lr=3e-4`?\n"
    )
    assert "did you mean `--set detect.dead-layer.every=5`?" in _flat(threshold.err)


@pytest.mark.parametrize("args", [["diagnose", "a", "b"], ["runs", "a", "b=1"], ["explain", "a", "b"]])
def test_a_surplus_argument_is_named_and_no_option_suggested(gradwatch, args):
    result = gradwatch(*args)

    assert result.code == 2
    assert f"unexpected extra argument: {args[-1]}" in _flat(result.err)
    assert "--set" not in result.err


def test_a_mistake_of_the_user_s_is_one_message_without_traceback(gradwatch, tmp_path):
    result = gradwatch("train", tmp_path / "gone.yaml")

    assert (result.code, result.out) == (2, "")
    assert result.err == f"error: {tmp_path}/gone.yaml: there is no such file\n"


def test_several_mistakes_are_counted_and_each_shows_its_line_however_narrow_the_terminal(
    gradwatch, tmp_path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "20")
    path = tmp_path / "mlp.yaml"
    path.write_text("model: {name: mlp}\ndata: {name: digits}\noptim: {name: adamw}\ntrain:\n\n\n\n\n\n  stepz: 3\n")

    result = gradwatch("train", path, "--set", "train.precision=fp8", "--set", "train.accumulate=0")

    assert result.code == 2
    assert (
        result.err.replace(f"{tmp_path}/", "")
        == """\
error: train: has neither steps nor epochs, expected exactly one of them
 --> mlp.yaml:4:1
  |
4 | train:
  | ^^^^^

error: train.precision: got 'fp8', expected one of fp32, bf16, fp16
 --> command line
  |
  | --set train.precision=fp8
  |                       ^^^
  = help: did you mean 'fp16'?

error: train.accumulate: got 0, expected a whole number of at least 1
 --> command line
  |
  | --set train.accumulate=0
  |                        ^

error: train.stepz: unknown setting, expected one of steps, epochs, device, parallel, shard_ranks, sync_batchnorm, \
threads, precision, accumulate, clip, activation_checkpointing, activation_offloading, compile, eval_every, \
checkpoint, early_stop, on_nonfinite, on_critical, rewind, scaler
  --> mlp.yaml:10:3
   |
10 |   stepz: 3
   |   ^^^^^
   = help: did you mean 'steps'?

error: 4 problems in the config
"""
    )


@pytest.mark.parametrize(
    ("line", "shown", "caret"),
    [('run: {name: "你好", sed: 1}', 'run: {name: "你好", sed: 1}', 20), ("run: {\tsed: 1}", "run: { sed: 1}", 6)],
)
def test_a_caret_stands_below_its_character_in_a_wide_script_and_at_a_tab(gradwatch, config, line, shown, caret):
    config.write_text(f"{config.read_text()}{line}\n")

    lines = gradwatch("train", config).err.splitlines()

    assert lines[3] == f"5 | {shown}"
    assert lines[4].startswith("  | " + " " * caret + "^")


def test_a_mistake_is_coloured_on_a_terminal_only(gradwatch, config, monkeypatch):
    args = ("train", config, "--set", "train.precision=fp8")
    assert "\x1b[" not in gradwatch(*args).err

    monkeypatch.setenv("FORCE_COLOR", "1")

    assert "\x1b[1;91m^^^\x1b[0m" in gradwatch(*args).err


def test_square_brackets_in_a_message_are_text(gradwatch, config):
    result = gradwatch("train", config, "--set", "optim.betas=[bold]")

    assert "optim.betas: got [bold], expected a list of 2" in result.err


def test_a_bug_is_a_traceback_with_a_code_that_means_nothing_else(gradwatch, config, monkeypatch):
    def crash(*_, **__):
        raise KeyError("deep inside")

    monkeypatch.setattr("gradwatch.config.load.load_config", crash)

    result = gradwatch("train", config)

    assert result.code == 70, "1 would say that findings were made"
    assert "Traceback" in result.err
    assert "deep inside" in result.err


def test_a_bug_of_gradwatch_is_reported_as_such_in_the_last_line(gradwatch, config, monkeypatch):
    def crash(*_, **__):
        raise KeyError("deep inside")

    monkeypatch.setattr("gradwatch.config.load.load_config", crash)
    monkeypatch.setattr("gradwatch.cli.output.errors.is_users", lambda filename: False)  # the test itself is not

    last = gradwatch("train", config).err.splitlines()[-1]
    assert last.startswith("error: unexpected KeyError: 'deep inside' (")
    assert "the traceback says where" in last


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="the platform has no /dev/full")
@pytest.mark.parametrize("buffering", ["", "1"])
@pytest.mark.parametrize("args", [["list", "statistics"], ["list", "statistics", "--help"], ["--version"]])
def test_a_full_output_is_one_sentence_and_no_traceback(args, buffering):
    with pathlib.Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "gradwatch", *args],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": buffering},
        )

    assert (ended.returncode, ended.stderr) == (
        2,
        "error: standard output cannot be written: No space left on device\n",
    )


def test_ctrl_c_before_training_is_what_shells_expect(gradwatch, config, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("gradwatch.config.load.load_config", interrupt)

    result = gradwatch("train", config)

    assert result.code == 130, "3 would say that there is a run to go on with"
    assert "note: interrupted before training began" in result.err


def test_warnings_are_lines_of_their_own_and_those_of_the_user_s_code_say_where(gradwatch, config, monkeypatch):
    def warn(*_, **__):
        source = "import warnings\nwarnings.warn('sink x is switched off', RuntimeWarning, stacklevel=1)"
        warnings.simplefilter("always")
        exec(compile(source, f"{package.__path__[0]}/pipeline.py", "exec"))
        exec(compile(source.replace("sink", "torch"), "/elsewhere/torch.py", "exec"))
        raise GradwatchError("enough")

    monkeypatch.setattr("gradwatch.config.load.load_config", warn)

    with warnings.catch_warnings():
        err = gradwatch("train", config).err

    assert err.splitlines() == [
        "warning: sink x is switched off",
        "warning: torch x is switched off (/elsewhere/torch.py, line 2)",
        "error: enough",
    ]


@pytest.mark.parametrize("command", ["list statistics", "explain dead-layer"])
def test_a_reader_that_leaves_early_makes_no_noise(command):
    code = f"import sys; from gradwatch.cli import main; sys.exit(main({command.split()!r}))"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()

    _, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (0, b"")
