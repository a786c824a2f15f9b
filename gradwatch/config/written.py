"""Locate a key in a file or an override: its line, its column and the characters to underline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from yaml.nodes import MappingNode, Node, SequenceNode

from gradwatch.errors import Excerpt, Key


@final
@dataclass(frozen=True, slots=True)
class File:
    """YAML in a file.

    Args:
        name: Name of the file.
        lines: Lines of the file.
        root: Root of the YAML nodes; None if the file is empty.
    """

    name: str
    lines: list[str]
    root: Node | None

    def place(self, key: Key) -> str:
        """Return the file and line of a key, or of the nearest mapping around a key that is missing."""
        named, _, _ = find(self.root, key)
        return f"{self.name}, line {named.start_mark.line + 1}" if named else self.name

    def excerpt(self, key: Key, *, is_about_key: bool) -> Excerpt:
        """Return the line of a key, with its name or its value underlined."""
        named, value, is_written = find(self.root, key)
        if named is None:
            return Excerpt(name=self.name)
        line, column, width = _span(named, value, is_about_key=is_about_key or not is_written, lines=self.lines)
        return Excerpt(name=self.name, line=line + 1, column=column + 1, text=self.lines[line], width=width)


@final
@dataclass(frozen=True, slots=True)
class Override:
    """One `--set` of the command line.

    Args:
        argument: The argument, such as `optim.lr=3e-4`.
        root: Root of the YAML nodes of the value; None if the value is empty or not YAML.
        key: Key that the override sets.
    """

    argument: str
    root: Node | None = None
    key: Key = ()

    def place(self, key: Key) -> str:
        """Return the override as written by the user."""
        return f"--set {self.argument}"

    def excerpt(self, key: Key, *, is_about_key: bool) -> Excerpt:
        """Return the override, with the part of its path or the value at a key underlined."""
        option = "--set "
        path, _, value = self.argument.partition("=")
        if not self.key:  # malformed, so underline the whole argument
            return _option(option + self.argument, len(option), len(self.argument))
        lines = value.splitlines() or [""]
        shift = len(option) + len(path) + 1  # columns before the value
        line, column, width = 0, 0, len(lines[0])
        inside = key[len(self.key) :]  # empty if the problem is at the key itself or above it
        if inside and self.root is not None:
            named, node, is_written = find(self.root, inside)
            if named:
                is_name = is_about_key or not is_written
                line, column, width = _span(named, node, is_about_key=is_name, lines=lines)
        elif is_about_key or len(key) < len(self.key) or not value.strip():
            parts = path.split(".")
            before = parts[: len(key) - 1]
            start = len(option) + sum(len(part) + 1 for part in before)
            return _option(option + self.argument, start, len(parts[len(before)]))
        if line:  # a value of several lines: show only the line of the mistake
            return _option(lines[line], column, width)
        return _option((option + self.argument).splitlines()[0], shift + column, width)


Source = File | Override
"""Origin of a value: a file, or an override on the command line."""


def find(root: Node | None, key: Key) -> tuple[Node | None, Node | None, bool]:
    """Return the nodes of the name and of the value at a key, and whether the key exists.

    If the key does not exist, the nodes belong to the nearest mapping around it; None for the whole document.
    """
    named: Node | None = None
    node = root
    for part in key:
        below = _below(node, part)
        if below is None:
            return named, node, False
        named, node = below
    return named, node, True


def _option(text: str, start: int, width: int) -> Excerpt:
    return Excerpt(name="command line", text=text, column=start + 1, width=max(width, 1))


def _span(named: Node, value: Node | None, *, is_about_key: bool, lines: list[str]) -> tuple[int, int, int]:
    """Return line, column and width of a name or its value; of the name if the value spans several lines."""
    spans_lines = value is None or value.start_mark.line != value.end_mark.line
    node = named if is_about_key or value is None or spans_lines or value.start_mark == value.end_mark else value
    start, end = node.start_mark, node.end_mark
    # of a name over several lines, underline the rest of its first line
    last = end.column if end.line == start.line else len(lines[start.line].rstrip())
    return int(start.line), int(start.column), max(int(last) - int(start.column), 1)


def _below(node: Node | None, part: str | int) -> tuple[Node, Node] | None:
    """Return the node that names a key and the node of its value; for a position in a list, both are the item."""
    if isinstance(node, MappingNode):
        # reversed: if a key is set twice, its last value counts
        return next(((name, value) for name, value in reversed(node.value) if name.value == part), None)
    if isinstance(node, SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], node.value[part]
    return None
