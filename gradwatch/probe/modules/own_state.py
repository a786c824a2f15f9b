"""Find loads of a state that is the model's own: `state_dict()` returns its tensors, and no copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwatch.events import OWN_STATE_LOADED
from gradwatch.probe.inert_hook import inert_hook, remove_hooks, takes_hooks
from gradwatch.records import Event

Models = Mapping[str, nn.Module]


@final
class OwnStates:
    """Note at which step each state of a model is taken, and whether it still is the model's own when it is loaded.

    A state that is loaded at the step at which it was taken restores nothing either, but nothing was to be restored.

    Args:
        models: The models by name.
        note: Called with an event `own-state-loaded`, once for each model.
        next_step: Returns the optimizer step in progress.
    """

    def __init__(self, models: Models, note: Callable[[Event], None], next_step: Callable[[], int]) -> None:
        self._note, self._next_step = note, next_step
        # by the `id` of the metadata of each state that lives: torch passes them on when it copies a state to load it
        self._taken: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._handles: list[RemovableHandle] = []
        self._noted: set[str] = set()
        for name, model in models.items():
            if not takes_hooks(model):
                continue

            def check(module: nn.Module, state: Any, prefix: str, *_: Any, name: str = name) -> None:
                self._before_loading(module, state, prefix, name)

            self._handles += [
                model.register_state_dict_post_hook(inert_hook(self._after_taking)),
                model.register_load_state_dict_pre_hook(inert_hook(check)),
            ]

    def find(self, _step: int, /) -> tuple[()]:
        """Return no observation: events are noted at the loads."""
        return ()

    def close(self) -> None:
        """Remove all hooks."""
        remove_hooks(self._handles)

    def _after_taking(self, _module: nn.Module, state: Any, *_: Any) -> None:
        self._taken = {key: entry for key, entry in self._taken.items() if entry[0]() is not None}
        metadata = state._metadata
        self._taken[id(metadata)] = weakref.ref(metadata), self._next_step()

    def _before_loading(self, module: nn.Module, state: Any, prefix: str, name: str) -> None:
        """Note the load of a state of an earlier step if it restores nothing."""
        metadata = getattr(state, "_metadata", None)
        ref, taken_at = self._taken.get(id(metadata), (None, 0))
        if ref is None or ref() is not metadata or name in self._noted:
            return
        step, params = self._next_step(), dict(module.named_parameters())
        if (
            step > taken_at
            and params
            and all(_is_same(param, state.get(prefix + key)) for key, param in params.items())
        ):
            self._noted.add(name)
            self._note(OWN_STATE_LOADED.emit(step=step - 1, layer=name or None, values={"since": taken_at}))


def _is_same(param: Tensor, loaded: Any) -> bool:
    """Return whether a loaded tensor has the memory of a parameter. A subclass, such as a shard, may have none."""
    is_plain = type(loaded) in (Tensor, nn.Parameter) and type(param) in (Tensor, nn.Parameter)
    return is_plain and loaded.data_ptr() == param.data_ptr() and loaded.data_ptr() != 0
