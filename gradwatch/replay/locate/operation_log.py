"""Name every operation of a step as it runs: its phase, line and module, and the forward operation it belongs to."""

from __future__ import annotations

from types import CodeType
from typing import Any, final

import torch
from torch import Tensor

from gradwatch.probe.nested import storage_id
from gradwatch.replay.locate.call_site import find_call_site
from gradwatch.replay.locate.module_stack import ModuleStack
from gradwatch.replay.locate.records import Operation


@final
class OperationLog:
    """The operations of one run of a step, for a dispatch mode that appends to it.

    Args:
        modules: Provides the names of modules and tensors; entered by the caller.
        within: Code of the frame that runs the step. Frames outside of it are not searched for the calling line.

    Attributes:
        operations: Operations in the order in which they ran.
    """

    def __init__(self, modules: ModuleStack, *, within: CodeType | None = None) -> None:
        self.operations: list[Operation] = []
        self._modules = modules
        self._within = within
        self._made: dict[int, int] = {}  # operation by the sequence number of the autograd node that it created
        self._grads: dict[int, tuple[Tensor, Tensor | None, Tensor | None]] = {}  # leaf, its gradient, copy of that

    def begin(self, func: Any) -> Operation:
        """Create the record of the next operation, with its calling line and module; called by the mode itself."""
        index, name = len(self.operations), func.overloadpacket.__name__.lstrip("_")
        place, again = find_call_site(self._within, skip=3)  # its frame, this one and the dispatcher
        module, kind = self._modules.current()
        node = torch._C._current_autograd_node()
        # activation checkpointing recomputes the forward pass inside of a node of the backward pass
        if node is not None and not again:
            return self._called_back(node, Operation(index=index, name=name, phase="backward", place=place))
        # autograd numbers a node before it calls the operation; operations without a node see the old number again
        self._made.setdefault(torch._C._autograd._get_sequence_nr() - 1, index)
        if again and not kind:
            module, kind = self._module_of(name, place)
        return Operation(index=index, name=name, phase="forward", module=module, module_type=kind, place=place)

    def of_node(self, node: Any) -> Operation | None:
        """Return the operation that created a node of the autograd graph, or None if it did not run here."""
        index = self._made.get(node._sequence_nr())
        return None if index is None else self.operations[index]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the gradients that the backward pass has added to."""
        for leaf, grad, values in self._grads.values():
            leaf.grad = grad
            if grad is not None and values is not None:  # autograd may have added to the gradient in place
                grad.copy_(values)

    def _called_back(self, node: Any, operation: Operation) -> Operation:
        """Add the forward operation that created the node of a backward operation, with its line and module."""
        operation.node = node.name().rpartition("::")[2]  # without the C++ namespace
        operation.forward = self._made.get(node._sequence_nr())
        if operation.forward is not None:
            made = self.operations[operation.forward]
            operation.module, operation.module_type = made.module, made.module_type
            operation.place = operation.place or made.place  # a backward pass in Python has its own line
        # only the node that adds to the gradient of a leaf has a variable
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            grad = leaf.grad
            self._grads.setdefault(id(leaf), (leaf, grad, None if grad is None else grad.clone()))
            operation.leaf, _ = self._modules.leaves.get(storage_id(leaf), ("a tensor", "constant"))
        return operation

    def _module_of(self, name: str, place: object) -> tuple[str, str]:
        """Return the module of a recomputed operation that runs outside of all module calls."""
        # the same operation on the same line has run before, in the original forward pass
        for other in self.operations:
            if other.name == name and other.place == place and other.module_type:
                return other.module, other.module_type
        return "", ""
