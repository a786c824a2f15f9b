"""Settings of the site: `sphinx-build -W docs site`, after `pip install -e '.[docs]'`."""

import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

from gradwatch import __version__  # noqa: E402 - the path comes first
from scripts.reference_pages import write_pages  # noqa: E402

project = "gradwatch"
author = "the gradwatch authors"
release = __version__
language = "en"
smartquotes = False  # options keep both of their hyphens

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["reference/generated/*.md", "llms.txt"]  # included by the pages of reference/
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
default_role = "literal"  # docstrings write names in single backticks
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"gradwatch {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_extra_path = ["llms.txt"]
html_copy_source = False
html_show_sphinx = False

OUTSIDE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)+(?:configs|scripts|tests|gradwatch|LICENSE|README|\.github/[A-Z])[^)\s]*\)"
)
"""Links that leave docs/ for a file of the repository: on the site, only their text is kept."""
CODE_CELL = re.compile(r"^\| (GW\d{3}) \| ([a-z0-9-]+) \|", re.M)


def generate_reference(app: Sphinx) -> None:
    """Write the pages that come from the code, before the sources are read."""
    write_pages(DOCS / "reference" / "generated")


def adapt_links(app: Sphinx, docname: str, source: list[str]) -> None:
    """Take out links to files outside of docs/, and link the table of kinds to the generated pages."""
    source[0] = OUTSIDE.sub(r"\1", source[0])
    if docname == "reference/faults":
        source[0] = CODE_CELL.sub(r"| [\1](generated/faults/\1.md) | [\2](generated/faults/\1.md) |", source[0])


def adapt_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Escape what reStructuredText takes for markup in docstrings, which know only backticks.

    `Returns` becomes a field at once: napoleon would take the words before its first colon for a type.
    """
    for i, line in enumerate(lines):
        parts = line.split("`")  # code in backticks is every other part
        parts[::2] = [re.sub(r"[*|]", r"\\\g<0>", part) for part in parts[::2]]
        lines[i] = "`".join(parts)
    if "Returns:" in lines:
        place = lines.index("Returns:")
        lines[place] = ""
        lines[place + 1] = ":returns: " + lines[place + 1].strip()


def setup(app: Sphinx) -> None:
    """Connect these functions to the build."""
    app.connect("builder-inited", generate_reference)
    app.connect("source-read", adapt_links)
    app.connect("autodoc-process-docstring", adapt_docstring, priority=400)  # before napoleon, at 500, writes markup
