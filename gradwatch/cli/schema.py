"""`gradwatch schema`: print the JSON schema of a config."""

from __future__ import annotations

from gradwatch.cli.output.console import write


def command() -> None:
    """Print the JSON schema of configs, for editors that complete and check them.

    Name it in the first line of a config: `# yaml-language-server: $schema=<path or URL>`.
    """
    from gradwatch.config.jsonschema import render_schema

    write(render_schema())
