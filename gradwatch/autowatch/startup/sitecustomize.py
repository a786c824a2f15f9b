"""Start watching a script: Python imports this file before the script, since its folder is on PYTHONPATH."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

NAME = "sitecustomize"


def run_hidden(folder: str) -> None:
    """Run the file of the same name that the environment would have imported without this folder."""
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != folder]  # noqa: PTH100 - starts every process
    spec = importlib.machinery.PathFinder.find_spec(NAME, sys.path)
    if spec is not None and spec.loader is not None:
        module = sys.modules[NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def start() -> None:
    """Prepare to watch this process, or say why that is impossible. The script runs in any case."""
    settings = os.environ.get("GRADWATCH_RUN")
    if settings is None:  # `gradwatch.autowatch.settings.VARIABLE`: the command has ended
        return
    try:
        from gradwatch.autowatch.begin import begin
    except Exception as error:  # another Python, without gradwatch or too old for it
        text = f"{sys.executable} cannot import gradwatch ({error}); the script runs without being watched"
        sys.stderr.write(f"gradwatch: {text}. Write the script without `python`: gradwatch run -- SCRIPT\n")
    else:
        begin(settings)


if __name__ == NAME:  # not if it is imported as a part of the package
    start()
    run_hidden(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
