"""Run a step any number of times from one state: its loss at shifted leaves, and its gradients as it fills them."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gradwatch.errors import GradwatchError
from gradwatch.gradcheck.stepping.engine import CREATE_GRAPH, backward_engine, is_inner_pass, put_engine
from gradwatch.gradcheck.stepping.reached_state import ReachedState
from gradwatch.gradcheck.stepping.tensors import dense, is_continuous, random_like, scale_of, widened
from gradwatch.probe.device.sync import to_float

Call = Callable[..., Any]


@final
@dataclass(slots=True)
class Gradients:
    """The gradients of one run of the step.

    Args:
        loss: Value of the loss.
        by_name: Gradient of each leaf, dense; zeros where there was none.
        absent: Names of leaves without a gradient.
        backwards: Number of backward passes that the step ran itself.
        parts: Number of forward passes through the model, if each takes a part of the samples.
        is_second: Whether the step differentiates a gradient.
    """

    loss: float
    by_name: dict[str, Tensor]
    absent: frozenset[str]
    backwards: int
    parts: int
    is_second: bool


@final
@dataclass(slots=True)
class Point:
    """Values of the leaves and of the other float tensors of the batch."""

    leaves: dict[str, Tensor]
    others: list[Tensor] = field(default_factory=list)


@final
class CheckedStep:
    """A step with its leaves: the parameters of a model, and the tensors of the batch that require a gradient.

    Args:
        call: Called with the parts of the batch; returns the loss, or outputs that are projected to one number.
        batch: Parts of the batch, nested.
        model: Model of the step.
        functions: The user's functions that the call runs, to find the objects they hold and their source lines.
        dtype: Format to compute in.

    Attributes:
        around: Makes a context in which each call runs.
        fills: Whether the call runs its backward pass itself.
    """

    def __init__(
        self,
        call: Call,
        batch: tuple[Any, ...],
        *,
        model: nn.Module | None,
        functions: tuple[Any, ...],
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self._call = call
        self.model = model
        self.functions = functions
        self.dtype = dtype
        self._before = ReachedState(model, *functions, copies=lambda _: False)
        self.modules = self._before.modules()
        self._widen()
        self.batch = tree_map_only(Tensor, lambda t: widened(t, dtype).requires_grad_(t.requires_grad), batch)
        self.leaves = self._leaves()
        if not self.leaves:
            self.restore()
            raise GradwatchError("check: nothing requires a gradient, neither a parameter of the model nor an input")
        self._first = self._start = self._save()
        self.locate_home()
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.fills = False
        self.runs = 0
        self._projections: list[Tensor] = []
        self._needs_graph = True

    @property
    def samples(self) -> int:
        """Return the largest first dimension of the batch."""
        return max((t.shape[0] for t in tree_leaves(self.batch) if isinstance(t, Tensor) and t.ndim), default=0)

    @property
    def epsilon(self) -> float:
        """Return the epsilon of the format."""
        return torch.finfo(self.dtype).eps

    def move(self, point: Point) -> None:
        """Make another point the base of `loss` and `gradients`."""
        self.point = point

    def moved(self, generator: torch.Generator, size: float, *, others: bool = False) -> Point:
        """Return a point near the first one, at which no value is exactly 0 or tied by accident."""
        leaves = {n: v + size * scale_of(v) * random_like(v, generator) for n, v in self.home.leaves.items()}
        rest = [v + size * scale_of(v) * random_like(v, generator) if is_continuous(v) else v for v in self.home.others]
        return Point(leaves, rest if others else self.home.others)

    def loss(self, shifts: Mapping[str, Tensor] | None = None, multiple: float = 0.0) -> float:
        """Return the loss with leaves shifted by a multiple of directions."""
        with self.placed(shifts or {}, multiple), torch.set_grad_enabled(self._needs_graph):
            return to_float(self.scalar(*self.batch).detach())

    def gradients(self) -> Gradients:
        """Run forward and backward, and return the gradients; the state is reset before, not after."""
        with self.placed(), torch.enable_grad(), counted(self.model, self.samples) as count:
            loss = self.scalar(*self.batch)
            self.fills = any(t.grad is not None for t in self.leaves.values())
            if not self.fills:
                if not loss.requires_grad:
                    raise GradwatchError(
                        "check: the step returned a loss without a graph and ran no backward pass; look for detach(), "
                        "item() or no_grad() between the parameters and the loss"
                    )
                loss.backward()
            grads = {n: t.grad for n, t in self.leaves.items()}
            return Gradients(
                loss=to_float(loss.detach()),
                by_name={n: dense(g, self.leaves[n]) for n, g in grads.items()},
                absent=frozenset(n for n, g in grads.items() if g is None),
                backwards=count.backwards,
                parts=count.parts,
                is_second=count.with_graph > 0,
            )

    def decide_graph(self, loss: float) -> float:
        """Run evaluations without a graph if the loss is the same; steps with a second derivative need a graph.

        Args:
            loss: The loss of a run with a graph.

        Returns:
            The difference of a second run from that loss.
        """
        self._needs_graph = False
        try:
            difference = abs(self.loss() - loss)
        except RuntimeError:
            difference = math.inf
        if difference <= self.epsilon * abs(loss):
            return difference
        self._needs_graph = True
        return abs(self.loss() - loss)

    @contextmanager
    def inside(self, around: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
        """Run each call inside a context, and with a graph."""
        before, self._needs_graph, self.around = self._needs_graph, True, around
        try:
            yield
        finally:
            self._needs_graph, self.around = before, nullcontext

    def restore(self) -> None:
        """Restore the user's objects."""
        self._before.restore()

    @property
    def originals(self) -> list[tuple[Tensor, Tensor]]:
        """Return the converted tensors outside of the batch, each with its values before the conversion."""
        return self._before.tensors

    def remember(self) -> None:
        """Begin each run from the present state."""
        self._start = self._save()

    def forget(self) -> None:
        """Begin each run from the first state again."""
        self._start = self._first

    def with_batch(self, batch: Any) -> CheckedStep:
        """Return the step on another batch, with the same state."""
        other = copy.copy(self)
        other.batch = batch
        other.leaves = {n: t for n, t in self.leaves.items() if isinstance(t, nn.Parameter)} | other.input_leaves()
        other.locate_home()
        # the live parameters may stand at another point
        fixed = {n: v for n, v in self.home.leaves.items() if isinstance(self.leaves[n], nn.Parameter)}
        other.home.leaves.update(fixed)
        return other

    def locate_home(self) -> None:
        """Make the present values of the leaves and the batch the first point."""
        self._others = [t for t in tree_leaves(self.batch) if isinstance(t, Tensor) and not t.requires_grad]
        self.point = Point(
            {n: t.detach().clone() for n, t in self.leaves.items()}, [t.detach().clone() for t in self._others]
        )
        self.home = self.point

    @contextmanager
    def placed(self, shifts: Mapping[str, Tensor] | None = None, multiple: float = 0.0) -> Iterator[None]:
        """Place the leaves, rewind the state, and count the run."""
        shifts = shifts or {}
        self.runs += 1
        self._start.rewind()
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf.data.copy_(self.point.leaves[name])
                if name in shifts:
                    leaf.data.add_(shifts[name], alpha=multiple)
                leaf.grad = None
            for tensor, value in zip(self._others, self.point.others, strict=True):
                tensor.copy_(value)
        with warnings.catch_warnings(), eager():
            warnings.simplefilter("ignore")
            yield

    def scalar(self, *batch: Any) -> Tensor:
        """Run the step, and return the loss, or a fixed projection of the outputs if there is none."""
        with self.around():
            result = self._call(*batch)
        tensors = [t for t in tree_leaves(result) if isinstance(t, Tensor) and is_continuous(t)]
        if not tensors:
            if isinstance(result, (int, float)):
                return torch.tensor(float(result), dtype=self.dtype)
            raise GradwatchError(f"check: the step returned {type(result).__name__}, expected a loss or outputs")
        if len(tensors) == 1 and tensors[0].numel() == 1 and not tensors[0].is_complex():
            return tensors[0].reshape(())
        if not self._projections:
            generator = torch.Generator().manual_seed(1)
            self._projections = [random_like(t.detach(), generator) for t in tensors]
        parts = [(u.conj() * t).sum() for u, t in zip(self._projections, tensors, strict=True)]
        return torch.stack([p.real if p.is_complex() else p for p in parts]).sum()

    def _save(self) -> ReachedState:
        leaves = {id(t) for t in self.leaves.values()}  # each run sets them
        return ReachedState(self.model, *self.functions, copies=lambda t: id(t) not in leaves)

    def _widen(self) -> None:
        """Convert every tensor that the step reaches, in new memory: the original memory stays untouched."""
        for tensor, data in self._before.tensors:
            if tensor.is_leaf:
                tensor.grad = None
                tensor.data = widened(data, self.dtype)

    def _leaves(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        if self.model is not None:
            found.update({n: p for n, p in self.model.named_parameters() if p.requires_grad and is_continuous(p)})
        else:
            named = ((n, p) for m in self.modules for n, p in m.named_parameters())
            for name, parameter in named:
                if parameter.requires_grad and not any(parameter is t for t in found.values()):
                    found[name] = parameter
        return found | self.input_leaves()

    def input_leaves(self) -> dict[str, Tensor]:
        """Return the tensors of the batch that require a gradient, by name."""
        found: dict[str, Tensor] = {}
        for i, part in enumerate(self.batch):
            tensors = [t for t in tree_leaves(part) if isinstance(t, Tensor)]
            for j, tensor in enumerate(tensors):
                if tensor.requires_grad:
                    found[f"input{i}" if len(tensors) == 1 else f"input{i}.{j}"] = tensor
        return found


def eager() -> AbstractContextManager[Any]:
    """Run compiled models in eager mode; without one, torch's compiler is not even imported, which takes seconds."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@final
@dataclass(slots=True)
class PassCount:
    """Numbers of backward passes, of those that make a graph, and the samples of each forward pass."""

    backwards: int = 0
    with_graph: int = 0
    sizes: list[int] = field(default_factory=list)
    samples: int = 0

    @property
    def parts(self) -> int:
        """Return the number of passes if they take parts of the samples: fewer than all, or not equally many."""
        is_divided = max(self.sizes, default=0) < self.samples or len(set(self.sizes)) > 1
        return len(self.sizes) if is_divided else 0


@contextmanager
def counted(model: nn.Module | None, samples: int) -> Iterator[PassCount]:
    """Count the passes that are started inside."""
    count = PassCount(samples=samples)
    engine = backward_engine()

    def run(*args: Any, **options: Any) -> Any:
        if not is_inner_pass():
            count.backwards += 1
            count.with_graph += len(args) > CREATE_GRAPH and bool(args[CREATE_GRAPH])
        return engine(*args, **options)

    def passed(_: Any, inputs: Any) -> None:
        sizes = [t.shape[0] for t in tree_leaves(inputs) if isinstance(t, Tensor) and t.ndim]
        if sizes and not is_inner_pass():
            count.sizes.append(max(sizes))

    handle = model.register_forward_pre_hook(passed) if model is not None else None
    put_engine(run)
    try:
        yield count
    finally:
        put_engine(engine)
        if handle is not None:
            handle.remove()
