"""Read docstrings: their first sentence, and what they say of each argument, without markup."""

from __future__ import annotations

import re

_ARGUMENT = re.compile(r"\*{0,2}(\w+)(?: ?\(.*?\))?: (.*)")
_SENTENCE_END = re.compile(r"(?<=[\w)`]\.)\s+(?=[A-Z`])")


def summary(docstring: str) -> str:
    """Return the first sentence."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return _plain(_SENTENCE_END.split(paragraph)[0])


def arguments(docstring: str) -> dict[str, str]:
    """Return what the section `Args` says, by the name of the argument."""
    lines = docstring.partition("Args:\n")[2].splitlines()
    indent = _depth(lines[0]) if lines else 0
    docs: dict[str, str] = {}
    name = ""
    for line in lines:
        if not line.strip() or _depth(line) < indent:
            break
        if _depth(line) == indent and (entry := _ARGUMENT.match(line.strip())):
            name, docs[entry[1]] = entry[1], entry[2]
        elif name:
            docs[name] += " " + line.strip()
    return {name: _plain(doc) for name, doc in docs.items()}


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _plain(text: str) -> str:
    """Return a text without reStructuredText roles, links and double backticks."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*(?:<[^>]*>)?`__?", r"\1", text)
    return text.replace("``", "")
