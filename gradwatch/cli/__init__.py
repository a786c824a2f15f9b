"""Parse the command line: each command has a file that parses, calls one function, and returns an exit code.

Exit codes: 0 healthy, 1 findings at or above `--fail-on`, 2 a mistake of the user, 3 interrupted but resumable;
70 if an exception escaped from the user's code or from gradwatch (as in sysexits.h: 1 means findings here), 130 for
Ctrl-C before training.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from gradwatch.cli import (
    attribute,
    check,
    compare,
    diagnose,
    explain,
    export,
    plan,
    ranks,
    replay,
    run,
    runs,
    schema,
    train,
)
from gradwatch.cli import list as list_
from gradwatch.cli.command import Command, Group
from gradwatch.cli.output.console import output_error, print_message, show_warning, write
from gradwatch.cli.output.errors import print_crash, print_mistake
from gradwatch.errors import GradwatchError, RankError

MISTAKE, CRASHED = 2, 70

EPILOG = """\
**Examples**

    gradwatch train configs/quickstart.yaml --set train.epochs=2
    gradwatch plan configs/quickstart.yaml --budget 8GB  # before training
    gradwatch run -- python train.py  # watches an unedited script
    gradwatch diagnose                # the newest run under runs/
    gradwatch diagnose runs/RUN --format html
    gradwatch replay runs/RUN         # find the operation that made the first NaN
    gradwatch check package.module:Layer --input 8x16  # is its gradient right?
    gradwatch attribute runs/RUN --worst 4  # which inputs decide, and can the map be trusted?
    gradwatch explain vanishing-gradient

**Exit codes**

    0   healthy
    1   findings at or above --fail-on
    2   a mistake in the command, the config or the files
    3   interrupted; continue with gradwatch train --resume RUN
    70  an unexpected error in your own code or in gradwatch; the last line says in which

Documentation: README.md and the folder docs/ of the repository.
"""

app = typer.Typer(
    name="gradwatch",
    cls=Group,
    help="Train PyTorch models, monitor every layer's gradients, and find out which layer broke, when and why.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("train", cls=Command, no_args_is_help=True)(train.command)
app.command("plan", cls=Command, no_args_is_help=True)(plan.command)
app.command("run", cls=Command, no_args_is_help=True, context_settings={"allow_interspersed_args": False})(run.command)
app.command("diagnose", cls=Command)(diagnose.command)
app.command("replay", cls=Command)(replay.command)
app.command("check", cls=Command, no_args_is_help=True)(check.command)
app.command("attribute", cls=Command, no_args_is_help=True)(attribute.command)
app.command("runs", cls=Command)(runs.command)
app.command("compare", cls=Command, no_args_is_help=True)(compare.command)
app.command("export", cls=Command)(export.command)
app.command("list", cls=Command)(list_.command)
app.command("explain", cls=Command)(explain.command)
app.command("schema", cls=Command)(schema.command)


def main(args: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        args: Arguments after `gradwatch`; by default those of this process.
    """
    with warnings.catch_warnings():  # restores showwarning for a caller in the same process, such as a test
        warnings.showwarning = show_warning
        if not ranks.is_printing_rank():
            warnings.simplefilter("ignore")  # rank 0 shows them
        code = _run(args)
        # checked here as well, because `train` continues without its terminal output
        code = MISTAKE if _output_failed() and code == 0 else code
    if args is None and ranks.is_rank():
        ranks.end(code)
    return code


def _run(args: Sequence[str] | None) -> int:
    try:
        app(args=args, prog_name="gradwatch")
    except SystemExit as end:  # how typer ends, also for its own usage errors (2)
        # an exit without a code is 0, and an exit with a message instead of a code is 1
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except RankError as error:  # the rank that failed first shows why
        return MISTAKE if error.is_mistake else CRASHED
    except GradwatchError as error:
        if ranks.is_failure_shown():
            print_mistake(error)
        return MISTAKE
    except Exception as error:  # Python's own exit code would be 1, which means findings here
        if isinstance(error, OSError) and _output_failed(error):
            return MISTAKE
        print_crash(error)
        return CRASHED
    return 0


def _output_failed(error: OSError | None = None) -> bool:
    """Return whether standard output could not be written, and say so."""
    reason = output_error(after=error)
    if reason:
        print_message("error", f"standard output cannot be written: {reason}")
    return bool(reason)


def _print_version(wanted: bool) -> None:
    if wanted:
        from gradwatch._version import __version__

        write(f"gradwatch {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Every command has its own `--help`."""
