"""Follow where a step leaves the autograd graph (detach, no_grad, item) or writes in place, and hold such values."""

from __future__ import annotations

import ast
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.modules import module as module_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gradwatch.errors import is_users
from gradwatch.gradcheck.source import source_of
from gradwatch.gradcheck.stepping.engine import is_inner_pass
from gradwatch.gradcheck.stepping.function_calls import CallLog
from gradwatch.probe.place import NOWHERE, Place, calling_place

DETACHING = (Tensor.detach, vars(torch._C.TensorBase)["data"].__get__)
CARRYING = frozenset(("clone", "contiguous", "to", "float", "double", "requires_grad_", "view", "reshape", "flatten"))
"""Operations whose result has the values of their first argument."""
TO_PYTHON = (Tensor.item, Tensor.__float__, Tensor.tolist)


@final
@dataclass(slots=True, eq=False)
class Cut:
    """A value that leaves the autograd graph.

    Args:
        place: The line of the user's code.
        value: The value in the first run.
        on_purpose: Reason why the cut counts as deliberate, or an empty string.
        source: Identity of the module whose output was detached, or 0.
        is_outside: Whether a tensor was detached outside of all modules.
        within: Identities of the modules that run without a graph, if one does.
        entered: The line that calls the outermost of them.
        feeds_back: Whether a module iterates without a graph and its result goes back into it with one: a solver.
    """

    place: Place
    value: Any
    on_purpose: str
    source: int = 0
    is_outside: bool = False
    within: frozenset[int] = frozenset()
    entered: Place = NOWHERE
    feeds_back: bool = False


@final
@dataclass(frozen=True, slots=True)
class Write:
    """A write in place: the memory that it changed, the line, and how many tensors had been saved before."""

    memory: int
    place: Place
    saved_before: int


@final
class GraphCuts(TorchFunctionMode):
    """Record the cuts and writes of a run, or keep the values of chosen cuts from the first run.

    Args:
        log: Log of custom Functions, whose forward runs without a graph as it should.
        held: Positions of the cuts to keep, or None to record.
        first: The recorded cuts, if some are held.
        fills: Whether the step runs its backward pass itself; it may detach the loss that it returns.
    """

    def __init__(
        self,
        log: CallLog,
        *,
        held: Collection[int] | None = None,
        first: list[Cut] | None = None,
        fills: bool = False,
    ) -> None:
        super().__init__()
        self.cuts: list[Cut] = [] if first is None else first
        self.writes: list[Write] = []
        self.saved = 0
        self._log, self._held, self._fills = log, held, fills
        self._position = 0
        self._stack: list[tuple[int, bool]] = []
        self._outputs: dict[int, int] = {}
        self._alive: list[Any] = []
        self._runs: dict[int, int] = {}
        self._fed_back: set[int] = set()
        self._iterated: set[int] = set()
        self._entered = NOWHERE
        self._roots, self._bare_passes, self._backwards = 0, 0, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record or replace its result."""
        if self._log.depth or is_inner_pass():
            return func(*args, **(kwargs or {}))
        self._backwards += func is Tensor.backward
        is_cut = _cuts(func, args) and not (self._fills and self._reads_number(args))
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if self._held is None and _writes(name, kwargs) and args and isinstance(args[0], Tensor):
            self.writes.append(Write(args[0].untyped_storage().data_ptr(), calling_place(), self.saved))
        if args and (func in DETACHING or name in CARRYING):
            self._carry(args[0], result)
        if not is_cut:
            return result
        position, self._position = self._position, self._position + 1
        if self._held is None:
            value = tree_map_only(Tensor, lambda t: t.detach().clone(), result)
            is_detached = func in DETACHING
            source = self._outputs.get(id(args[0]), 0) if is_detached else 0
            is_outside = is_detached and not self._stack
            within = frozenset(module for module, with_graph in self._stack if not with_graph)
            entered = self._entered if within else NOWHERE
            self.cuts.append(Cut(calling_place(), value, self._purpose(func), source, is_outside, within, entered))
            return result
        if position not in self._held or position >= len(self.cuts):
            return result
        kept = self.cuts[position].value
        if name.endswith("_") and not name.endswith("__") and isinstance(result, Tensor):
            return result.copy_(kept)
        return tree_map_only(Tensor, lambda t: t.clone(), kept)

    def _carry(self, value: Any, result: Any) -> None:
        """Register a tensor with the values of another one as an output of the same module."""
        source = self._outputs.get(id(value))
        if source is not None and isinstance(result, Tensor):
            self._outputs[id(result)] = source
            self._alive.append(result)

    def _reads_number(self, args: Any) -> bool:
        """Return whether a cut reads a number outside of modules, in a step that runs its own backward pass."""
        return not self._stack and bool(args) and isinstance(args[0], Tensor) and args[0].numel() == 1

    def _purpose(self, func: Any) -> str:
        """Return the reason why a cut counts as deliberate."""
        if not is_users(_innermost()):
            return "torch itself leaves the graph here"
        if any(not with_graph for _, with_graph in self._stack) and not torch.is_grad_enabled():
            return "a whole module runs under no_grad"
        if not torch.is_grad_enabled() and not self._stack and self._bare_passes:
            return "it follows a pass through the model under no_grad"
        if func in DETACHING and _is_straight_through(calling_place()):
            return "straight-through: x + (f(x) - x).detach()"
        return ""

    def _settle(self) -> None:
        """Mark the cuts that only the whole run shows to be deliberate."""
        for cut in self.cuts:
            if self._fed_back & self._iterated & cut.within:
                cut.on_purpose, cut.feeds_back = "", True
            elif not cut.on_purpose and self._runs.get(cut.source, 0) > 1:
                cut.on_purpose = "the output of one of several passes through a module"
            elif not cut.on_purpose and cut.is_outside and self._roots > max(self._backwards, 1):
                cut.on_purpose = "one of several passes through the model"

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Start a run: enter the mode, and follow the calls of modules."""
        self._position, self._roots, self._bare_passes, self._backwards = 0, 0, 0, 0
        self._stack, self._runs, self._outputs, self._alive = [], {}, {}, []
        self._fed_back, self._iterated = set(), set()
        handles = [
            module_hooks.register_module_forward_pre_hook(self._enter),
            module_hooks.register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with self:
                yield
            if self._held is None:
                self._settle()
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: Any, inputs: Any) -> None:
        if not self._stack:
            self._roots += 1
            self._bare_passes += not torch.is_grad_enabled()
        given = [t for t in tree_leaves(inputs) if isinstance(t, Tensor) and not t.requires_grad]
        if any(self._outputs.get(id(t)) == id(module) for t in given):
            (self._fed_back if torch.is_grad_enabled() else self._iterated).add(id(module))
        if not torch.is_grad_enabled() and all(with_graph for _, with_graph in self._stack):
            self._entered = calling_place()
        self._stack.append((id(module), torch.is_grad_enabled()))
        self._runs[id(module)] = self._runs.get(id(module), 0) + 1

    def _leave(self, module: Any, _: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._outputs[id(tensor)] = id(module)
                self._alive.append(tensor)  # an identity is not used again


def _cuts(func: Any, args: Any) -> bool:
    """Return whether an operation takes a value out of the graph."""
    tensors = [t for t in tree_leaves(args) if isinstance(t, Tensor)]
    if func in DETACHING or func in TO_PYTHON:
        return bool(tensors) and tensors[0].requires_grad
    if torch.is_grad_enabled() or getattr(func, "__name__", "") in ("__get__", "size", "dim", "stride"):
        return False
    return any(t.is_floating_point() or t.is_complex() for t in tensors)


def _writes(name: str, kwargs: Any) -> bool:
    if name in ("__setitem__", "__set__") or (kwargs and kwargs.get("out") is not None):
        return True
    if (
        name.startswith("__i")
        and name.endswith("__")
        and name not in ("__init__", "__index__", "__int__", "__invert__")
    ):
        return True
    return name.endswith("_") and not name.endswith("__") and name not in ("requires_grad_",)


def _innermost() -> str:
    """Return the file that called the operation: not of this package, and not torch's dispatch of overrides."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        own = "gradwatch" in name.replace("\\", "/").split("/") and not is_users(name)
        if not own and not name.endswith(("overrides.py", "_tensor.py", "_contextlib.py")):
            return str(name)
        frame = frame.f_back
    return ""


def _is_straight_through(place: Place) -> bool:
    """Return whether a line is `x + (f(x) - x).detach()`: the value of one, the gradient of the other."""
    try:
        tree = ast.parse(place.text)
    except SyntaxError:
        return False
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            for kept, cut in ((node.left, node.right), (node.right, node.left)):
                inside = _detached(cut)
                is_difference = isinstance(inside, ast.BinOp) and isinstance(inside.op, ast.Sub)
                if is_difference and ast.dump(inside.right) == ast.dump(kept):  # type: ignore[union-attr]  # a BinOp
                    return True
    return False


def _detached(node: ast.expr) -> ast.expr | None:
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach"
    return node.func.value if is_call else None  # type: ignore[attr-defined]  # checked in the line above


def positions_at(cuts: Iterable[Cut], places: Collection[Place]) -> set[int]:
    """Return the positions of the cuts at some lines."""
    return {i for i, cut in enumerate(cuts) if cut.place in places}


def function_at(place: Place, functions: Iterable[Any]) -> str:
    """Return the name of the user's function that a line is in, or an empty string."""
    for function in functions:
        source = source_of(function)
        if source.file != place.file or not isinstance(source.node, ast.FunctionDef):
            continue
        if source.node.lineno <= place.line <= (source.node.end_lineno or 0):
            return source.node.name
    return ""
