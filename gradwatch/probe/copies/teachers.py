"""Detect a frozen teacher that drops features at random, as its dropout is in training mode."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwatch.events import MODE_TEACHER, Observation
from gradwatch.probe.copies.unheld import Unheld, holds
from gradwatch.probe.inert_hook import inert_hook, remove_hooks, takes_hooks
from gradwatch.probe.nested import tensors_of
from gradwatch.probe.parameters import Models, hookable_modules

MIN_CALLS = 8
"""Minimum number of calls of a teacher to report, each with the inputs of a student."""

MAX_TEACHERS = 4
"""Maximum number of teachers to follow."""

MAX_STUDENTS = 16
"""Maximum number of modules that may be the student: the outermost ones come first."""


@final
class TeacherModes:
    """Compare the calls of a frozen module with those of the trained ones.

    A teacher and its student get the same tensor and return outputs of one shape. The features of a frozen backbone go
    into the trained part instead, and may be dropped on purpose. So may the outputs of a module that is called several
    times with the same inputs. Weights that move are those of an average, whose noise is a part of some methods.

    Args:
        teacher: A module that no optimizer holds.
        students: Trained modules.
    """

    def __init__(self, teacher: Unheld, students: Iterable[nn.Module]) -> None:
        self._name, self._type = teacher.name, type(teacher.module).__name__
        self._params = [weakref.ref(param) for param in teacher.module.parameters()]
        self._versions = self._read_versions()
        self._dropouts = sum(_drops(part) for part in teacher.module.modules())
        self._calls = self._matches = 0
        self._is_other = False
        self._last: dict[bool, tuple[weakref.ref[Tensor], torch.Size]] = {}  # by whether the teacher was called
        dropping = next(part for part in teacher.module.modules() if _drops(part))
        hooks = [(module, False) for module in students] + [(teacher.module, True)]
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(inert_hook(partial(self._after_call, is_teacher)), with_kwargs=True)
            for module, is_teacher in hooks
        ]
        # the mode at each call: a loop may change it after the search
        self._handles.append(dropping.register_forward_pre_hook(inert_hook(self._before_dropout)))

    def find(self) -> Iterator[Observation]:
        """Yield an observation if each call dropped features of the inputs of the student, and end the comparison."""
        is_frozen = not self._is_other and self._versions == self._read_versions()
        if is_frozen and self._calls >= MIN_CALLS and self._calls == self._matches:
            what = f"`{self._name}`" if self._name else f"a frozen module ({self._type})"
            values = {"dropouts": self._dropouts, "calls": self._calls}
            yield MODE_TEACHER.observe(self._name, values=values, what=what)
        self.close()

    def close(self) -> None:
        """Remove all hooks."""
        remove_hooks(self._handles)

    def _before_dropout(self, module: nn.Module, *_: object) -> None:
        self._is_other |= not module.training or torch.is_grad_enabled()

    def _after_call(self, is_teacher: bool, module: nn.Module, *inputs_and_output: Any) -> None:
        if not is_teacher and not torch.is_grad_enabled():
            return  # an evaluation of the student
        given = next(tensors_of(inputs_and_output[:-1]), None)
        made = next(tensors_of(inputs_and_output[-1]), None)
        self._calls += is_teacher
        if given is None or made is None:
            return
        other = self._last.get(not is_teacher)
        if other and other[0]() is given and other[1] == made.shape:
            self._matches += 1
            self._last.clear()
        elif is_teacher or not other or other[0]() is not given:
            self._last[is_teacher] = (weakref.ref(given), made.shape)

    def _read_versions(self) -> list[int | None]:
        return [None if (param := ref()) is None else param._version for ref in self._params]


def find_teachers(models: Models, held: Collection[int], unheld: Iterable[Unheld]) -> list[TeacherModes]:
    """Return the frozen modules with active dropout, outermost first, each with hooks on its possible students.

    Args:
        models: A model, or several by name.
        held: `id` of each parameter of the watched optimizers.
        unheld: Modules that no optimizer holds, the largest first.
    """
    found, covered = list[Unheld](), set[nn.Module]()
    for it in unheld:
        if it.module not in covered and takes_hooks(it.module) and any(map(_drops, it.module.modules())):
            covered.update(it.module.modules())
            found.append(it)
    students = [module for module in hookable_modules(models) if holds(module, held)] if found else []
    followed = []
    for it in found[:MAX_TEACHERS]:
        # a model with a frozen backbone gets the same inputs as the backbone
        apart = [student for student in students if it.module not in set(student.modules())]
        followed.append(TeacherModes(it, apart[:MAX_STUDENTS]))
    return followed


def _drops(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.training and 0 < module.p <= 1
