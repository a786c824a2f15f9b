"""Write the reference of the command line from its typer application."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer
import typer.main

from scripts.reference_pages.markdown import cell, table


def commands_page(app: typer.Typer) -> str:
    """Return one section for each command: its usage, help text, arguments and options."""
    group: Any = typer.main.get_command(app)
    return "\n\n".join(_command(name, command) for name, command in group.commands.items())


def _command(name: str, command: Any) -> str:
    shown = [p for p in command.params if not p.hidden and p.name != "help"]
    arguments = [p for p in shown if not p.opts[0].startswith("-")]
    usage = " ".join(
        [
            "gradwatch",
            name,
            *("[OPTIONS]" if len(shown) > len(arguments) else "").split(),
            *(_argument(p) for p in arguments),
        ]
    )
    parts = [f"## gradwatch {name}", f"```text\n{usage}\n```", inspect.cleandoc(command.help or "")]
    panels: dict[str, list[Any]] = {}
    for parameter in shown:
        panels.setdefault(parameter.rich_help_panel or "", []).append(parameter)
    for title, parameters in panels.items():
        if title:
            parts.append(f"**{title}**")
        parts.append(table(("option", "default", "meaning"), _rows(parameters)))
    return "\n\n".join(parts)


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _rows(parameters: list[Any]) -> Iterator[tuple[str, str, str]]:
    for parameter in parameters:
        is_option = parameter.opts[0].startswith("-")
        name = ", ".join(f"`{opt}`" for opt in parameter.opts) if is_option else f"`{_argument(parameter)}`"
        if is_option and parameter.metavar:
            name = f"{name} `{parameter.metavar}`"
        choices = _choices(parameter)
        default = parameter.default
        is_shown = is_option and default is not None and default is not False and not callable(default)
        yield name, f"`{getattr(default, 'value', default)}`" if is_shown else "", cell(parameter.help or "") + choices


def _choices(parameter: Any) -> str:
    """Return the values of an option that takes one of a few words."""
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    words = getattr(annotation, "__members__", None)
    names = [member.value for member in words.values()] if words else list(getattr(annotation, "__args__", ()))
    listed = ", ".join(f"`{name}`" for name in names if isinstance(name, str))
    return f" One of {listed}." if listed else ""
