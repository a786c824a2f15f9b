"""`gradwatch explain`: print the manual page of a kind of finding."""

from __future__ import annotations

from typing import Annotated

import typer

from gradwatch.cli.output.console import write


def command(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="Such as `dead-layer` or `GW103`.", show_default=False)],
) -> None:
    """Explain a kind of finding: what is measured, why it matters, when it is wrong, what to do."""
    from gradwatch.config.names import registry
    from gradwatch.config.names.checks import find_usable
    from gradwatch.errors import GradwatchError

    entry = find_usable(registry.DETECTORS, kind)
    if isinstance(entry, str):
        raise GradwatchError(f"explain: {entry}")
    signature = entry.read()
    page = f"{' '.join(entry.aliases)}  {entry.name}\n\n{signature.doc.strip()}"
    settings = "\n".join(f"    {p.name}: {p.shown_default()}" for p in signature.parameters)
    in_config = f"In a config, with the defaults:\n\ndetect:\n  {entry.name}:\n    enabled: true\n{settings}"
    write(f"{page}\n\n{in_config}\n")
