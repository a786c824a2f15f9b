"""Define the sections with a name: model, data, loss, optim, schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt, Strict, ValidationInfo, field_validator, model_validator

from gradwatch.config.names import registry
from gradwatch.config.names.checks import check_options, check_transforms
from gradwatch.config.names.vocabulary import Vocabulary
from gradwatch.config.problems import raise_problem, raise_problems
from gradwatch.config.sections.base import NamedSection, OptionsSection, TargetSection
from gradwatch.config.wording import Expected, show
from gradwatch.errors import Problem

Count = Annotated[int, Field(ge=0)]
Patterns = Annotated[tuple[str, ...], Strict(False), Field(min_length=1), Expected("a list of name patterns")]
Transforms = Annotated[tuple[str | dict[str, Any], ...], Strict(False)]


class ModelSection(TargetSection):
    """The model: a name, or a `target` of your own, with its keyword arguments."""

    vocabulary: ClassVar[Vocabulary] = registry.MODELS


class DataSection(TargetSection):
    """The data: a name, or a `target` of your own, with its keyword arguments, and how batches are made of it."""

    vocabulary: ClassVar[Vocabulary] = registry.DATA

    batch_size: PositiveInt = Field(default=64, description="Samples of a training batch.")
    eval_batch_size: PositiveInt | None = Field(
        default=None, description="Samples of a validation batch; null is batch_size."
    )
    workers: Count = Field(default=0, description="Processes that load samples; 0 loads them in the training process.")
    pin_memory: bool = Field(default=False, description="Load batches into page-locked memory, for a CUDA device.")
    shuffle: bool | None = Field(
        default=None,
        description="Draw training samples in a new random order in each epoch; null does so except with a stream, "
        "which keeps its own order.",
    )
    drop_last: bool = Field(default=False, description="Leave out an epoch's last batch where it is short.")
    transform: Transforms = Field(
        default=(),
        description="Transforms of every sample, in order: names of torchvision.transforms.v2, or {Name: {keywords}}.",
    )
    augment: Transforms = Field(
        default=(), description="The same for training samples only, before `transform`; may be random."
    )

    @field_validator("transform", "augment", mode="before")
    @classmethod
    def _check_transforms(cls, given: Any) -> Any:
        if not isinstance(given, list | tuple):
            raise_problem(f"got {show(given)}, expected a list of transforms, such as [RandomHorizontalFlip]")
        checked, found = check_transforms(given)
        raise_problems(found)
        return checked


class LossSection(TargetSection):
    """The loss: a name, or a `target` of your own; by default the usual one for the data."""

    vocabulary: ClassVar[Vocabulary] = registry.LOSSES
    name_is_optional: ClassVar[bool] = True


class GroupSection(OptionsSection):
    """Parameters that the optimizer treats differently: their names, and its keyword arguments for them."""

    match: Annotated[str | Patterns, Expected("a pattern of parameter names, or a list of such")] = Field(
        description="Pattern of parameter names, such as '*.bias', or a list; the first group that fits counts."
    )
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns as a tuple, also for a single pattern."""
        return (self.match,) if isinstance(self.match, str) else self.match


class OptimSection(NamedSection):
    """The optimizer: a name with its keyword arguments."""

    vocabulary: ClassVar[Vocabulary] = registry.OPTIMIZERS

    name: str = Field(default="", validate_default=True)
    groups: Annotated[tuple[GroupSection, ...], Strict(False)] = Field(
        default=(), description="Parameters with keyword arguments of their own."
    )

    @model_validator(mode="before")
    @classmethod
    def _drop_watched(cls, data: Any) -> Any:
        """Ignore `watched: false`, which configs of older runs contain, and refuse other values of `watched`."""
        if not isinstance(data, Mapping) or "watched" not in data:
            return data
        if data["watched"] is not False:
            text = "was removed with gradwatch's own optimizers"
            hint = "remove it, torch's are watched without it"
            raise_problems([Problem(("watched",), text, help=hint, is_about_key=True)])
        return {key: value for key, value in data.items() if key != "watched"}

    @field_validator("groups")
    @classmethod
    def _check_groups(cls, groups: tuple[GroupSection, ...], info: ValidationInfo) -> tuple[GroupSection, ...]:
        entry = cls.vocabulary.find(info.data["name"]) if "name" in info.data else None
        if entry is None:
            return groups  # the wrong name is already a problem
        checked: list[GroupSection] = []
        found: list[Problem] = []
        for i, group in enumerate(groups):
            # partial: the optimizer's own settings may have set what is required
            options, below = check_options(entry.read(), group.options, others=["match"], partial=True)
            found += [p.below(i) for p in below]
            checked.append(group.model_copy(update={"options": options}))
        raise_problems(found)
        return tuple(checked)


class ScheduleSection(NamedSection):
    """The learning-rate schedule: a name with its keyword arguments, a warm-up before it, either, or none."""

    vocabulary: ClassVar[Vocabulary] = registry.SCHEDULES
    name_is_optional: ClassVar[bool] = True

    warmup_steps: Count = Field(
        default=0, description="Steps (with per: epoch, epochs) in which the learning rate first climbs from near zero."
    )
    per: Literal["step", "epoch"] = Field(default="step", description="What the schedule and its warm-up count.")
