"""Track the running module and the names of its tensors through forward hooks, and restore the module afterwards."""

from __future__ import annotations

from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_leaves

from gradwatch.probe.inert_hook import remove_hooks
from gradwatch.probe.nested import storage_id
from gradwatch.probe.parameters import without_wrappers
from gradwatch.replay.locate.records import Origin


@final
class ModuleStack:
    """Tracks the calls of modules while the context is entered.

    A module that is called outside of all other modules is a root, and paths are relative to it. `restore` resets its
    buffers and gradients to their state at its first call.

    Args:
        model: Root that is known in advance, or None.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.running: list[nn.Module] = []
        self.leaves: dict[int, tuple[str, Origin]] = {}
        """Name and origin of every tensor that existed before the step, by the identity of its storage."""
        self._paths: dict[int, tuple[str, str]] = {}
        self._roots: list[nn.Module] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._grads: list[tuple[nn.Parameter, Tensor | None]] = []
        self._handles: list[Any] = []
        if model is not None:
            self._meet(model)

    def __enter__(self) -> Self:
        # global hooks, since the roots are not known before they are called
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave, always_call=True),  # also if the forward raises
        ]
        return self

    def __exit__(self, *_: object) -> None:
        remove_hooks(self._handles)
        self.running.clear()

    def current(self) -> tuple[str, str]:
        """Return path and class name of the running module; both are empty outside of all modules."""
        return self._paths[id(self.running[-1])] if self.running else ("", "")

    def name(self, tensor: Tensor, name: str, origin: Origin) -> None:
        """Name a tensor that exists before the step."""
        # the first name stays, for example of a tied weight
        self.leaves.setdefault(storage_id(tensor), (name, origin))

    def restore(self) -> None:
        """Restore the buffers of all roots in place, and their gradients."""
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        for parameter, grad in self._grads:
            parameter.grad = grad

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if id(module) not in self._paths:
            if self.running:  # not registered in its root, so it has no path there: use its class name instead
                path, _ = self.current()
                self._paths[id(module)] = (f"{path}.{type(module).__name__}".lstrip("."), type(module).__name__)
            else:
                self._meet(module)
        # other roots, such as a loss module, get outputs of the model as inputs
        # under vmap and other transforms of functorch, tensors have no memory of their own
        if not self.running and module is self._roots[0] and not torch._C._are_functorch_transforms_active():
            self._name_inputs(args)
        self.running.append(module)

    def _leave(self, module: nn.Module, _args: object, _outputs: object) -> None:
        if self.running and self.running[-1] is module:
            self.running.pop()

    def _name_inputs(self, args: tuple[Any, ...]) -> None:
        tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        for i, tensor in enumerate(tensors):
            self.name(tensor, "inputs" if len(tensors) == 1 else f"inputs[{i}]", "input")

    def _meet(self, root: nn.Module) -> None:
        """Register the names of a root's parts, and save the tensors that a run of it changes."""
        # the first root is the model; names of later roots could collide with its names
        prefix = f"{type(root).__name__}." if self._roots else ""
        self._roots.append(root)
        for path, module in root.named_modules():
            self._paths.setdefault(id(module), (without_wrappers(path), type(module).__name__))
        for name, parameter in root.named_parameters():
            self.name(parameter, prefix + without_wrappers(name), "parameter")
            # removed, so that the backward pass does not add to the saved gradient
            self._grads.append((parameter, parameter.grad))
            parameter.grad = None
        for name, buffer in root.named_buffers():
            self.name(buffer, prefix + without_wrappers(name), "buffer")
            self._buffers.append((buffer, buffer.clone()))
