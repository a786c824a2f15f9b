"""What a script gets for `watch`: nothing, or `gradwatch.watch` and the callbacks."""

import contextlib
import importlib

from gradwatch.monitor import watch as watch_module


class Unwatched(contextlib.AbstractContextManager):
    """What a script calls if it does not watch itself: nothing happens."""

    def __call__(self, model, optimizer, **options):
        return self

    def __exit__(self, *error):
        return None

    def step(self, loss, **context):
        pass

    def callbacks(self, library):
        return []


class ThreeLines:
    """What a script calls if it watches itself."""

    def __call__(self, model, optimizer, **options):
        return watch_module.watch(model, optimizer, **options)

    def callbacks(self, library):
        return [importlib.import_module(f"gradwatch.callbacks.{library}").Watch()]
