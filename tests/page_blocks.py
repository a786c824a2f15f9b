"""Run the code of a Markdown page in the order in which a reader meets it, and compare what it prints.

The blocks of a page share one folder, which has the configs of the repository, and one Python namespace:

- ```python runs. The ```text block right after it, if there is one, is what it prints.
- ```yaml and ```python that begin with `# file: NAME` are written to that file; Python is not run then.
- ```yaml that has a model and data is a whole config. One without a file name trains two steps, unless it is shipped
  (`tests/end_to_end/test_configs.py` trains those); one with a file name is for the commands below it, and may be
  wrong, but if it loads it does so without a warning.
- ```console is a list of commands, one a line. If lines begin with `$ `, the others are what the command prints.
  A command must end with 0, or with what its comment says: `# exits with 1`. Runs begin with `runs/`.
  What several pages train by one command is trained once.

In expected output `...` stands for any text, and all white space is the same.
"""

import contextlib
import doctest
import io
import itertools
import linecache
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

from gradwatch.cli import main
from gradwatch.config.ineffective import ineffective_settings
from gradwatch.config.load import load_config
from gradwatch.errors import ConfigError
from scripts.fault_zoo import __main__ as fault_zoo
from scripts.fault_zoo import mutants, variants

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SHIPPED = {re.sub(r"^#.*\n", "", path.read_text(), flags=re.M) for path in (ROOT / "configs").glob("*.yaml")}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
FILE = re.compile(r"# file: (\S+)\n")
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NOT_RUN = {"cd", "git", "tensorboard", "torchrun", "pre-commit", "sphinx-build"}
"""Commands that need a network, a browser or several processes."""
TRAINED = {}
"""The exit code, the output and the run directory of each training of a shipped config."""


class Block(NamedTuple):
    """One fenced block of a page: its language, its text, and the output that follows a block of Python."""

    language: str
    text: str
    output: str | None


def blocks_of(page):
    """Return the blocks of a page in their order."""
    text = page.read_text()
    found = [*FENCE.finditer(text)]
    blocks = []
    for match, following in itertools.zip_longest(found, found[1:]):
        language, body = match[1], match[2]
        is_output = following and following[1] == "text" and not text[match.end() : following.start()].strip()
        blocks.append(Block(language, body, following[2] if language == "python" and is_output else None))
    return blocks


def run_page(page, folder):
    """Run all blocks of a page in a folder, which must be the working directory."""
    names = {"__name__": "__main__"}
    for number, block in enumerate(blocks_of(page), 1):
        if file := FILE.match(block.text):
            Path(file[1]).parent.mkdir(parents=True, exist_ok=True)
            Path(file[1]).write_text(block.text[file.end() :])
        if block.language == "python" and not file:
            printed = run_python(block.text, f"{page.stem}_{number}.py", names)
            if block.output is not None:
                assert_output(block.output, printed, page, block.text)
        elif block.language == "yaml":
            check_yaml(block.text, folder / f"{page.stem}-{number}.yaml", is_example=file is None)
        elif block.language == "console":
            for command, expected in commands_of(block.text):
                printed = run_command(command)
                if expected:
                    assert_output(expected, printed, page, command)


def run_python(text, file, names):
    """Run Python as if it stood in a file of the folder, so that lines can be named, and return what it prints."""
    Path(file).write_text(text)
    linecache.checkcache(file)
    with printing() as printed:
        exec(compile(text, file, "exec"), names)
    return printed.getvalue()


def check_yaml(text, path, *, is_example):
    """Check a block that is a whole config: no warning, and if it is an example of its own, two steps of training."""
    if not (re.search(r"^model:", text, re.M) and re.search(r"^data:", text, re.M)):
        return
    path.write_text(text)
    try:
        config = load_config(path)
    except ConfigError:
        assert not is_example, text
        return  # a command of the page shows the mistakes, and ends with 2
    assert ineffective_settings(config) == (), text
    if is_example and text not in SHIPPED:
        changes = ["train.epochs=null", "train.steps=2", f"run.out={path.parent / 'examples'}"]
        if config.data.name == "text":
            changes.append("data.val_fraction=0.01")  # a tenth of the text takes most of the time
        settings = [word for change in changes for word in ("--set", change)]
        assert main(["train", str(path), *settings, "--fail-on", "never"]) == 0, text


def commands_of(text):
    """Yield each command of a console block with the output that is shown, which is empty if none is."""
    text = text.replace("\\\n", "")
    if "$ " not in text:
        yield from ((line, "") for line in text.splitlines() if line.strip())
        return
    assert text.startswith("$ "), text
    for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
        command, _, output = part.partition("\n")
        yield command, output


def run_command(line):
    """Run the commands of a line, and return what they print."""
    line, _, comment = line.partition("  #")
    expected = int(code[1]) if (code := re.search(r"exits with (\d+)", comment)) else 0
    with printing() as printed:
        for command in line.strip().split(" && "):
            words = [file for word in shlex.split(command) for file in expanded(word)]
            code = run_words(words)
            assert code == expected, f"{command}: exit code {code}\n{printed.getvalue()}"
    return printed.getvalue()


def expanded(word):
    """Return the files that a pattern of a command stands for, as a shell does."""
    files = sorted(map(str, Path().glob(word))) if "*" in word else []
    return files or [word]


def run_words(words):
    """Run one command, or check as much of it as can be checked here; return its exit code."""
    match words:
        case ["gradwatch", "train", config, *rest] if config.startswith("configs/") and "--set" not in str(rest):
            return train_once(tuple(words))
        case ["gradwatch", *rest]:
            return main(rest)
        case ["python", "-m", "gradwatch", *rest]:
            return main(rest)
        case ["python", file] if Path(file).is_file() and not file.startswith("scripts/"):
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_path(file, run_name="__main__")
            return 0
        case ["python", "-c", program]:
            sys.path.insert(0, str(Path.cwd()))
            for name in [path.stem for path in Path().glob("*.py")]:
                sys.modules.pop(name, None)  # a new process has imported none of them
            exec(compile(program, "<string>", "exec"), {})
            return 0
        case ["python", file, *rest] if file.startswith("scripts/"):
            assert_options(ROOT / file, rest)
            return 0
        case ["python", "-m", "scripts.fault_zoo", *rest]:
            fault_zoo.parse(rest)  # exits with 2 if there is no such option
            return 0
        case ["python", "-m", "scripts.fault_zoo.mutants", *rest]:
            mutants.parse(rest)
            return 0
        case ["python", "-m", "scripts.fault_zoo.variants", *rest]:
            variants.parse(rest)
            return 0
        case ["pip", "install", *rest]:
            extras = re.findall(r"\[([\w,]+)\]", " ".join(rest))
            assert {e for extra in extras for e in extra.split(",")} <= set(
                PYPROJECT["project"]["optional-dependencies"]
            )
            return 0
        case ["pytest", *rest]:
            assert all((ROOT / word).exists() for word in rest if not word.startswith("-")), rest
            return 0
        case [name, *_] if name in NOT_RUN:
            return 0
    raise AssertionError(f"no test knows how to run: {words}")


def train_once(words):
    """Train a shipped config, or take over what a page printed and recorded that has given the same command."""
    if words not in TRAINED:
        before = set(Path("runs").glob("*"))
        with printing() as printed:
            code = main(list(words[1:]))
        made = set(Path("runs").glob("*")) - before
        assert len(made) == 1, printed.getvalue()
        (run,) = made
        kept = shutil.copytree(run, Path(f"{Path.cwd()}-trained", run.name))  # before the page does more with it
        TRAINED[words] = code, printed.getvalue(), kept
    code, printed, kept = TRAINED[words]
    sys.stdout.write(printed)
    shutil.copytree(kept, Path("runs", kept.name), dirs_exist_ok=True)
    return code


def assert_options(script, words):
    """Check that a script has the options that it is given, in its own source or that of its neighbours."""
    assert script.is_file(), script
    sources = "".join(path.read_text() for path in script.parent.glob("*.py"))
    for word in words:
        assert not word.startswith("--") or f'"{word}"' in sources, f"{script.name} has no {word}"


@contextlib.contextmanager
def printing():
    """Collect what is printed to either stream."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        yield printed


def assert_output(expected, printed, page, command):
    """Check that output is as a page shows it."""
    is_same = doctest.OutputChecker().check_output(expected, printed, FLAGS)
    assert is_same, f"{page.name}: after\n{command}\nthe page shows\n{expected}\nbut this was printed:\n{printed}"
