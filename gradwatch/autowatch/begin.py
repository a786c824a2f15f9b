"""Wait until the script imports torch, and then hook torch. Nothing here imports torch."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import final

from gradwatch.autowatch.settings import ScriptSettings

TORCH = "torch"


def begin(text: str) -> None:
    """Watch this process as soon as it imports torch.

    Args:
        text: The settings, as `ScriptSettings.to_text` returns them.
    """
    sys.meta_path.insert(0, TorchImport(functools.partial(_hook_torch, ScriptSettings.of_text(text))))


def _hook_torch(settings: ScriptSettings) -> None:
    # not before: most processes that a script starts never import torch
    from gradwatch.autowatch.script_watch import ScriptWatch

    ScriptWatch(settings).install()
    if settings.in_place:
        import atexit
        import contextlib

        from gradwatch.probe.graph.in_place import record_in_place

        recording = contextlib.ExitStack()
        record_in_place(until=recording)
        atexit.register(recording.close)


@final
class TorchImport(MetaPathFinder):
    """Calls a function once, right after the script has imported torch.

    Args:
        callback: The function. Its errors are printed, and do not reach the script.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._is_searching = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of torch that the other finders return, with a loader that calls the function."""
        if fullname != TORCH or self._is_searching:
            return None
        self._is_searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_searching = False
        if spec is not None and spec.loader is not None:
            # in the instance, so that everything else about the loader stays as it is
            vars(spec.loader)["exec_module"] = functools.partial(self._execute, spec.loader)
        return spec

    def _execute(self, loader: Loader, module: ModuleType) -> None:
        del vars(loader)["exec_module"]
        loader.exec_module(module)
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            try:
                self._callback()
            except Exception as error:  # of any kind: the script must not stop
                sys.stderr.write(f"gradwatch: cannot watch this script: {type(error).__name__}: {error}\n")
