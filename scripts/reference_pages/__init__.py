"""Write the pages of the reference that come from the code: faults, settings, commands, statistics."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gradwatch.config
from gradwatch.cli import app
from scripts.reference_pages.commands import commands_page
from scripts.reference_pages.config import config_page
from scripts.reference_pages.faults import fault_pages
from scripts.reference_pages.statistics import statistics_page

SCHEMA = Path(gradwatch.config.__file__).with_name("schema.json")


def write_pages(folder: Path) -> None:
    """Write all generated pages.

    Args:
        folder: Where they go; what it held before is deleted.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "faults").mkdir(parents=True)
    for name, text in fault_pages():
        (folder / "faults" / f"{name}.md").write_text(text + "\n", encoding="utf-8")
    (folder / "config.md").write_text(
        config_page(json.loads(SCHEMA.read_text(encoding="utf-8"))) + "\n", encoding="utf-8"
    )
    (folder / "commands.md").write_text(commands_page(app) + "\n", encoding="utf-8")
    (folder / "statistics.md").write_text(statistics_page() + "\n", encoding="utf-8")
