"""`gradwatch explain`: print the manual page of a finding."""

from __future__ import annotations

import itertools
from typing import Annotated

import typer

from gradwatch.cli.list import print_rows
from gradwatch.cli.output.console import write


def command(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="FINDING", help="Name or code, such as `dead-layer` or `GW103`.", show_default=False),
    ] = None,
) -> None:
    """Explain a kind of finding: what it means, why it matters, when it is wrong, and how to fix it.

    The mistakes that `gradwatch check` names have pages too. Without FINDING, all kinds are listed.
    """
    from gradwatch.config.names import registry
    from gradwatch.config.names.checks import find_usable
    from gradwatch.errors import GradwatchError, Problem
    from gradwatch.mistakes import MISTAKES, page_of

    if kind is None:
        entries = ((" ".join(e.aliases), e.name, e.read().summary) for e in registry.DETECTORS.entries())
        mistakes = ((mistake.code, name, mistake.meaning) for name, mistake in MISTAKES.items())
        print_rows(("code", "finding", "meaning"), itertools.chain(entries, mistakes))
        return
    if page := page_of(kind):
        write(page)
        return
    entry = find_usable(registry.DETECTORS, kind)
    if isinstance(entry, Problem):
        raise GradwatchError(str(entry.below("explain")))
    signature = entry.read()
    head = f"{' '.join(entry.aliases)}  {entry.name}\n\n{signature.doc.strip()}"
    settings = "\n".join(f"    {p.name}: {p.shown_default()}" for p in signature.parameters)
    in_config = f"In a config, with the defaults:\n\ndetect:\n  {entry.name}:\n    enabled: true\n{settings}"
    write(f"{head}\n\n{in_config}\n")
