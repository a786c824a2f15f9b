"""Replace the tensors of a model and its optimizer by tensors without data while a step is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only


@final
class StandIns:
    """Tensors without data, one for each real tensor; tensors that share a storage share it here too.

    Args:
        mode: Creates the tensors without data.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._of_meta: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: Tensor) -> Tensor:
        """Return the stand-in of a tensor; for a tensor on the meta device, a stand-in on the CPU."""
        if not tensor.is_meta:
            stand_in: Tensor = self._mode.from_tensor(tensor)
            return stand_in
        if id(tensor) not in self._of_meta:
            with self._mode:
                made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
            self._of_meta[id(tensor)] = (made, tensor)  # the real one as well, so that its id stays taken
        return self._of_meta[id(tensor)][0]

    def of_all(self, nested: Any) -> Any:
        """Return nested tuples, lists and dicts with the stand-in of each tensor in them."""
        return tree_map_only(Tensor, self.of, nested)


@contextlib.contextmanager
def replaced(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, of: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Replace all tensors of a model and its optimizer in a `with` block, and restore the real ones.

    Args:
        model: Parameters and buffers are replaced in its modules.
        optimizer: Its parameters, state, and tensors in its attributes are replaced; or None.
        of: Returns the replacement of a tensor.
    """
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            for held in (module._parameters, module._buffers):
                tensors: dict[str, Any] = held
                stack.callback(tensors.update, dict(tensors))
                tensors.update({name: t if t is None else of(t) for name, t in tensors.items()})
        if optimizer:
            # a copy of the dict, whose own mutable values are rebuilt below, so the originals stay untouched
            before = dict(vars(optimizer))
            stack.callback(vars(optimizer).update, before)
            groups = [dict(group, params=[of(p) for p in group["params"]]) for group in optimizer.param_groups]
            state = type(optimizer.state)(optimizer.state.default_factory)
            for parameter, values in optimizer.state.items():
                state[of(parameter)] = tree_map_only(Tensor, of, values)
            others = {k: tree_map_only(Tensor, of, v) for k, v in before.items() if k not in ("param_groups", "state")}
            vars(optimizer).update(others, param_groups=groups, state=state)
        yield
