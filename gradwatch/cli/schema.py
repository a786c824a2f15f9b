"""`gradwatch schema`: print the JSON schema of a config."""

from __future__ import annotations

from gradwatch.cli.output.console import write


def command() -> None:
    """Print the JSON schema of a config, for editors that complete and check.

    A config names it in its first line: `# yaml-language-server: $schema=<path or URL>`.
    """
    from gradwatch.config.jsonschema import render_schema

    write(render_schema())
