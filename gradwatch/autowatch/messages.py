"""Report on standard error which loops are watched, or why none is."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable

from torch.optim import Optimizer

from gradwatch.autowatch.settings import is_first_rank

PAGE = "docs/get-started/unedited-script.md"


def say(text: str) -> None:
    """Print a line for the user."""
    if is_first_rank():
        print(f"gradwatch: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the user's terminal is the output


def say_not_understood(reason: str) -> None:
    """Print why a loop is not watched, and what to do."""
    say(
        f"I do not understand this loop: {reason}; see {PAGE}, or call gradwatch.watch(model, optimizer) yourself. "
        "The script runs on without being watched"
    )


def say_left_out(names: str, reason: str) -> None:
    """Print why some optimizers of a script are not watched, while others are."""
    say(f"one training of this script is not watched ({names}): {reason}; see {PAGE}. The others are")


def say_no_step(num_backward: int) -> None:
    """Print that a script has never updated its weights."""
    say(
        f"the script made {num_backward} backward passes, but never called optimizer.step(), so no weight has changed. "
        "Call it after each backward pass"
    )


def kinds_of(optimizers: Iterable[Optimizer]) -> str:
    """Return the classes of optimizers, such as `Adam, 3 x SGD`."""
    numbers = Counter(type(optimizer).__name__ for optimizer in optimizers)
    return ", ".join(kind if number == 1 else f"{number} x {kind}" for kind, number in numbers.items())
