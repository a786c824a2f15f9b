"""Customize typer's commands: help without `<bool>` next to flags, and a hint for a setting without `--set`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from typer.core import TyperCommand, TyperGroup

from gradwatch.paths import user_path

_SETTING = re.compile(r"[\w-]+(\.[\w-]+)*=.*")
"""An argument such as `optim.lr=3e-4`, as in Hydra and OmegaConf."""


@final
class Group(TyperGroup):
    """The app as a whole: its options and the list of commands."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with an empty metavar for flags."""
        return _without_flag_types(super().get_params(ctx))


@final
class Command(TyperCommand):
    """One command, which rejects surplus arguments with a hint."""

    allow_extra_args = True  # refused below, with a hint that typer does not give

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with an empty metavar for flags."""
        return _without_flag_types(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, and end with a usage error if some are surplus."""
        parsed = super().parse_args(ctx, args)
        # a shell expands `~/RUN`, but not `--resume=~/RUN`
        ctx.params = {name: _expanded(value) for name, value in ctx.params.items()}
        if ctx.args and not ctx.resilient_parsing:  # resilient: shell completion, which must not fail
            ctx.fail(surplus(ctx.args, takes_settings="overrides" in ctx.params))
        return parsed


def _without_flag_types(params: list[Any]) -> list[Any]:
    for param in params:
        if getattr(param, "is_flag", False):
            param.metavar = ""  # a flag takes no value, so `<bool>` next to it says nothing
    return params


def _expanded(value: Any) -> Any:
    """Return the value of an argument with a leading `~` expanded: only paths begin with `~`."""
    if isinstance(value, list | tuple):
        return type(value)(map(_expanded, value))
    is_path = isinstance(value, str | Path) and str(value).startswith("~")
    return type(value)(user_path(value)) if is_path else value


def surplus(args: Sequence[str], *, takes_settings: bool) -> str:
    """Return the message on surplus arguments of a command."""
    text = f"Got unexpected extra argument{'s' if len(args) > 1 else ''}: {' '.join(args)}"
    if Path(args[-1]).is_dir():  # the shell expanded a pattern such as `runs/ci-*`, sorted by name
        return f"{text}; expected one run: the last of these is {args[-1]}"
    return text + (suggest_set(args[0]) if takes_settings else "")


def suggest_set(text: str) -> str:
    """Return `; did you mean ...?` for a setting that was given without `--set`, or an empty string."""
    return f"; did you mean `--set {text}`?" if _SETTING.fullmatch(text) else ""
