"""Find modules whose training passes drew random numbers until the first evaluation, and none since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwatch.events import DRAWS_ENDED, Observation
from gradwatch.probe.inert_hook import inert_hook, remove_hooks
from gradwatch.probe.parameters import Models, common_path, hookable_modules, named_modules

MIN_SAMPLES = 3
"""Minimum number of sampled steps, before and after the first evaluation, to compare."""

MAX_INTERVAL_STEPS = 64
"""Maximum number of steps between two samples before the evaluation: a rate may reach 0 by a schedule as well."""

MAX_IDLE_STEPS = 8
"""Sampled steps without a training pass after which the search ends: compiled code does not call hooks."""


class GeneratorState(NamedTuple):
    """State of the default generators: of the CPU in full, of CUDA devices the numbers drawn so far."""

    cpu: Tensor
    offsets: tuple[int, ...]

    def is_equal(self, other: GeneratorState) -> bool:
        """Return whether nothing was drawn between two states."""
        return self.offsets == other.offsets and torch.equal(self.cpu, other.cpu)


@final
class RandomDraws:
    """Compare the states of random generators before and after each forward call, at a few sampled steps.

    A draw belongs to the innermost module whose call contains it. A forward pass in evaluation mode that sets a rate to
    0 for good, as in `self.p = 0`, ends all draws of its module. The generators are read and never set.

    If no module draws at the first sample, no further step is sampled. There are hooks only from the step before a
    sample. Dropout modules are left out: only the training itself changes their rates. The validation loss shows an
    evaluation.

    Args:
        models: A model, or several by name.
    """

    def __init__(self, models: Models) -> None:
        roots = models.values() if isinstance(models, Mapping) else [models]
        # replicas run their forward calls on several threads, with one set of generators
        is_replicated = any(isinstance(root, nn.DataParallel) for root in roots)
        self._models: Models | None = None if is_replicated else models  # None: the search is over
        self._handles: list[RemovableHandle] = []
        self._stack: list[GeneratorState | None] = []
        self._names: dict[nn.Module, str] = {}
        self._devices: list[int] = []
        self._reached: dict[nn.Module, None] = {}  # modules whose hooks were called at any sample
        self._called: set[str] = set()
        self._drew: set[str] = set()
        self._inside: list[bool] = []  # for each call in progress, whether a module inside of it drew
        self._drawing: set[str] | None = None  # drew at each sample before the evaluation
        self._samples = self._samples_since = self._idle_steps = 0
        self._interval_steps, self._next_step = 1, 0
        self._is_evaluated = False

    @property
    def is_armed(self) -> bool:
        """Return whether the step in progress is sampled."""
        return bool(self._handles)

    def find(self, *, step: int, is_validated: bool) -> Iterator[Observation]:
        """Yield an observation if draws have ended, after an optimizer step, and decide about the next step.

        Args:
            step: Optimizer step.
            is_validated: Whether the step has a validation loss.
        """
        if self._models is None:
            return
        was_armed = self.is_armed
        if is_validated and not self._is_evaluated:
            # the pass of this step may have come before the evaluation or after it
            self._is_evaluated = True
            if self._samples < MIN_SAMPLES:
                self.close()
        elif was_armed:
            self._add_sample()
        if self._samples_since >= MIN_SAMPLES and self._drawing:
            yield self._describe(sorted(self._drawing))
            self.close()
        is_due = self._is_evaluated or self._samples < MIN_SAMPLES or step >= self._next_step
        if self._models is not None and is_due:
            self._interval_steps = min(2 * self._interval_steps, MAX_INTERVAL_STEPS)
            self._next_step = step + self._interval_steps
            self._arm(self._models)
        else:
            self._disarm()

    def close(self) -> None:
        """Remove all hooks and end the search."""
        self._disarm()
        self._models = None

    def _add_sample(self) -> None:
        called, drew = self._called, self._drew
        if not called:
            self._idle_steps += 1
        elif self._is_evaluated:
            assert self._drawing is not None, "the search would be over"
            self._drawing &= called - drew
            self._samples_since += 1
        else:
            self._drawing = drew if self._drawing is None else self._drawing & drew
            self._samples += 1
        if (called and not self._drawing) or self._idle_steps >= MAX_IDLE_STEPS:
            self.close()

    def _describe(self, names: list[str]) -> Observation:
        rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
        values = {"drawing modules": len(names), "samples before": self._samples, "samples since": self._samples_since}
        return DRAWS_ENDED.observe(common_path(names), values=values, who=f"{names[0] or 'the model'}{rest}")

    def _arm(self, models: Models) -> None:
        if not self._names:
            self._names = {module: name for name, module in named_modules(models)}
            devices = {p.device for module in self._names for p in module.parameters(recurse=False)}
            self._devices = sorted(device.index or 0 for device in devices if device.type == "cuda")
        self._called, self._drew = set(), set()
        self._stack.clear()
        self._inside.clear()
        if self.is_armed:
            return
        # torch.compile compiles a module again for each new hook, and calls none of these
        for module in [*self._reached] or hookable_modules(models):
            self._handles += [
                module.register_forward_pre_hook(inert_hook(self._before)),
                # always: a call that raises must not leave its state on the stack
                module.register_forward_hook(inert_hook(self._after), always_call=True),
            ]

    def _disarm(self) -> None:
        remove_hooks(self._handles)

    def _before(self, module: nn.Module, *_: Any) -> None:
        is_captured = bool(self._devices) and torch.cuda.is_current_stream_capturing()
        is_read = module.training and torch.is_grad_enabled() and not is_captured
        self._stack.append(self._state() if is_read else None)
        self._inside.append(False)

    def _after(self, module: nn.Module, *_: Any) -> None:
        if not self._stack:  # the call began before the hooks
            return
        before, is_inside = self._stack.pop(), self._inside.pop()
        if before is None:
            return
        has_drawn = is_inside or not self._state().is_equal(before)
        # meta-learning calls shallow copies, which share the hooks but have no name
        if (name := self._names.get(module)) is not None:
            self._called.add(name)
            self._reached[module] = None
            if has_drawn and not is_inside and not isinstance(module, nn.modules.dropout._DropoutNd):
                self._drew.add(name)
        if has_drawn and self._inside:
            self._inside[-1] = True

    def _state(self) -> GeneratorState:
        # reading an offset waits for no device
        offsets = tuple(torch.cuda.default_generators[device].get_offset() for device in self._devices)
        return GeneratorState(torch.default_generator.get_state(), offsets)
