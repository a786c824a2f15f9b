"""Start the command of `gradwatch run`, and wait for its end. The command line imports this file without torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

from gradwatch.autowatch.settings import VARIABLE, ScriptSettings
from gradwatch.errors import GradwatchError, did_you_mean
from gradwatch.paths import user_path

STARTUP = Path(__file__).parent / "startup"
SUFFIX = ".py"
WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
"""Options of Python that take a value as the next argument."""

ISOLATED = ("E", "I", "S")
"""Options of Python that leave out PYTHONPATH or `sitecustomize`."""

FORWARDED = ("SIGTERM", "SIGHUP")
"""Signals to pass on. A terminal sends Ctrl-C to the command as well."""


@final
class Target:
    """The program that a command runs.

    Args:
        command: The words after `--`: a Python file, or any command with its arguments.

    Attributes:
        words: The command to start.
        name: Name for the run directory.

    Raises:
        GradwatchError: There is no such file or command, or it leaves out the hook by which scripts are watched.
    """

    def __init__(self, command: Sequence[str]) -> None:
        first = command[0]
        if first.endswith(SUFFIX):
            _check_script(first)
            self.words = [sys.executable, *command]
        elif shutil.which(first) is None:
            text = "expected a Python file, or a command such as `python train.py`"
            raise GradwatchError(f"run: there is no command '{first}'; {text}")
        else:
            self.words = [*command]
        is_python = Path(self.words[0]).name.startswith("python")
        name = _of_python(self.words[1:]) if is_python else None
        scripts = [word for word in self.words[1:] if word.endswith(SUFFIX)]
        self.name = name or Path(scripts[0] if scripts else first).stem


def launch(target: Target, settings: ScriptSettings) -> int:
    """Run a command, watched, and return its exit code: 128 + N if signal N has ended it, as in a shell."""
    with tempfile.TemporaryDirectory(prefix="gradwatch-") as folder:
        unseen = Path(folder) / "unseen"
        unseen.touch()
        paths = [str(STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            VARIABLE: replace(settings, unseen=str(unseen)).to_text(),
        }
        process = subprocess.Popen(target.words, env=environment)
        with _passing_signals(process):
            code = process.wait()
        if code == 0 and unseen.exists():
            text = "no process of this command trained a model: no optimizer of torch took a step"
            sys.stderr.write(f"gradwatch: {text}\n")
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _passing_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave Ctrl-C to the command, and forward other termination signals to it."""
    handlers = {signal.SIGINT: signal.SIG_IGN} | {
        getattr(signal, name): lambda number, _: process.send_signal(number)
        for name in FORWARDED
        if hasattr(signal, name)
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_script(script: str) -> None:
    path = user_path(script)
    if path.is_file():
        return
    near = did_you_mean(path.name, [p.name for p in path.parent.glob(f"*{SUFFIX}")])
    raise GradwatchError(f"run: there is no file {script}{near}")


def _of_python(args: Sequence[str]) -> str | None:
    """Return the name of the script or module among the arguments of Python, or None."""
    words = iter(args)
    for word in words:
        if word in WITH_VALUE:
            next(words, None)
        elif word == "-m":
            return next(words, None)
        elif word == "-c" or word == "-":
            return None
        elif not word.startswith("-"):
            return Path(word).stem
        elif word[1:2] not in "-WX" and any(letter in word for letter in ISOLATED):
            raise GradwatchError(
                f"run: got the option {word} of Python, which leaves out the hook by which gradwatch watches; remove it"
            )
    return None
