"""Print a located operation: its place, its values, the cause, and the path to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwatch.errors import shown_path
from gradwatch.render.common import format as units

if TYPE_CHECKING:
    from gradwatch.replay.locate.bad_operation import Located
    from gradwatch.replay.locate.records import Operation, Value

LABEL = 10
LINKS = 6
"""Most operations of a path shown: the last ones, in addition to the first."""
NAMES = 4
Row = tuple[str, str | Text]


def print_located(console: Console, located: Located | None, *, step: int, since: int | None = None) -> None:
    """Print the first bad operation of a step.

    Args:
        console: Console to print to.
        located: The operation, or None if there is none.
        step: The step.
        since: Step whose update made the weight bad, if a weight is the cause and the step is known.
    """
    if located is None:
        console.print(f"step {step:,}: every operation is finite, forward and backward")
        return
    what = "the first jump in magnitude" if located.is_jump else "the first bad operation"
    console.print(Text.assemble(f"step {step:,}: {what} is ", (located.title, "bold")))
    console.print(grid(located_rows(located, since)))


def grid(rows: Iterable[Row]) -> Table:
    """Return labelled paragraphs, each text indented after its label."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style="dim", width=LABEL, justify="right")
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, text if isinstance(text, Text) else Text(text))
    return table


def located_rows(located: Located, since: int | None, *, brief: bool = False) -> Iterator[Row]:
    """Yield the rows about an operation: its place, inputs, outputs and cause, and the path to it.

    Args:
        located: The operation.
        since: Step whose update made the weight bad, or None.
        brief: Whether to omit values and path.
    """
    operation = located.operation
    yield "module", _module(operation)
    if place := operation.place:
        yield "line", f"{shown_path(place.file)}:{place.line}, in {place.function}"
        yield "", Text(place.text, "bold")
    if not brief:
        yield from (("in", _value(value)) for value in operation.inputs)
        yield from (("out", _value(value)) for value in operation.outputs if value.size)
    blame = Text.assemble((str(located.blame), "bold"), f": {located.because}")
    if since is not None:
        blame.append(f"; since the update at step {since:,}")
    yield "cause", blame
    if located.samples and (not brief or located.blame.name == "DATA"):
        yield "samples", _few([str(i) for i in located.samples], 12) + " of the batch"
        if located.in_data:
            yield "", _few([f"{i:,}" for i in located.in_data], 12) + " of the training data"
    if brief:
        return
    if located.reaches:
        gradients = located.reaches != ("the loss",)
        yield "reaches", ("the gradient of " if gradients else "") + _few(located.reaches, NAMES)
    yield "path", _chain(located.chain)
    runs = f"{located.runs:,} run{'s' if located.runs > 1 else ''} of the step"
    yield "", Text(f"traced {located.followed:,} operations in {runs}", "dim")


def _module(operation: Operation) -> str:
    if not operation.module_type:
        return "in no module"
    return f"{operation.module or 'the model itself'} ({operation.module_type})"


def _value(value: Value) -> str:
    text = f"{'x'.join(map(str, value.shape)) or 'scalar'} {value.dtype}"
    if value.low == value.low:  # nan if no value is finite, or if the dtype is not floating
        low, high = units.number(value.low), units.number(value.high)
        text += f", {low}" if low == high else f", {low} to {high}"
    if value.bad:
        kinds = [f"{value.nans:,} NaN"] if value.nans else []
        infinity = "-Inf" if value.negative_only else "Inf"
        kinds += [f"{value.bad - value.nans:,} {infinity}"] if value.bad > value.nans else []
        text += f", {' and '.join(kinds)} of {value.size:,}"
    return text + (f"  {value.name}" if value.name else "")


def _chain(chain: Sequence[Operation]) -> str:
    names = [f"{o.module}: {o.name}" if o.module else o.name for o in chain]
    # consecutive operations with equal labels add nothing
    names = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]
    if len(names) > LINKS + 1:
        names = [names[0], f"({len(names) - LINKS - 1} more)", *names[-LINKS:]]
    return " > ".join(names)


def _few(names: Sequence[str], most: int) -> str:
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
