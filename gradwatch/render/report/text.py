"""Write small pieces of HTML: sentences with links and code, code blocks, badges, lists of facts."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from gradwatch.records import Severity
from gradwatch.render.common import format as units
from gradwatch.render.common.sparkline import UNICODE

# a doubled backtick is reStructuredText's code, as docstrings have it
_CODE = re.compile(r"(`{1,2})([^`\n]+)\1")
# punctuation at the end belongs to the sentence, not to the URL
_URL = re.compile(r"https?://[^\s<>&]*[^\s<>&.,;)]")


def prose(text: str) -> str:
    """Return a sentence as HTML: its URLs as links, its backticks as code."""
    # escape first, so that only our own tags are HTML
    safe = _CODE.sub(r"<code>\2</code>", escape(text))
    return _URL.sub(r'<a href="\g<0>" rel="noreferrer">\g<0></a>', safe)


def badge(severity: Severity | None, text: str) -> str:
    """Return a text with the sign and the color of a severity; None is healthy."""
    name = "healthy" if severity is None else str(severity)
    sign = UNICODE.ok if severity is None else UNICODE.marks[severity]
    # screen readers read the text, not the sign
    return f'<span class="badge {name}"><span aria-hidden="true">{sign}</span> {escape(text)}</span>'


def code(text: str, *, copy: str = "") -> str:
    """Return text as a code block that scrolls horizontally.

    Args:
        text: The code.
        copy: What a button copies, such as `the command`; without it there is no button.
    """
    # tabindex: a block that has the focus scrolls by keyboard
    block = f'<pre tabindex="0"><code>{escape(text.rstrip())}</code></pre>'
    # hidden: the script shows the buttons, so there are none without a script
    button = f'<button type="button" class="copy" hidden aria-label="Copy {escape(copy)}">Copy</button>'
    return f'<div class="code">{button}{block}</div>' if copy else block


def definitions(rows: Iterable[tuple[str, str]]) -> str:
    """Return names with their values as a list, without the unknown values."""
    # a list, unlike a table, needs no placeholder for unknown values
    items = (f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in rows if v != units.MISSING)
    return f"<dl>{''.join(items)}</dl>"
