"""Define the whole config: its sections, with the type, default and meaning of every setting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt, Strict, ValidationInfo, field_validator, model_validator

from gradwatch.config import yaml12
from gradwatch.config.names import registry
from gradwatch.config.names.checks import check_switches
from gradwatch.config.problems import raise_problem, raise_problems
from gradwatch.config.sections.base import Section
from gradwatch.config.sections.named import Count, DataSection, LossSection, ModelSection, OptimSection, ScheduleSection
from gradwatch.config.sections.train import TrainSection
from gradwatch.config.wording import Expected
from gradwatch.errors import GradwatchError
from gradwatch.paths import user_path

# part of the name of a folder, so no separators and no zero bytes; `..` reads like the folder above
Name = Annotated[
    str,
    Field(pattern=r"^[^/\\\x00]*[^/\\\x00.][^/\\\x00]*$"),
    Expected("text without slashes, and not only dots"),
]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # the range of NumPy's generator
Switches = dict[str, dict[str, Any]]


class RunSection(Section):
    """What the run is called, where it goes, and where its random numbers start."""

    name: Name = Field(default="run", description="Name of the run; by default that of the config's file.")
    seed: Seed = Field(default=0, description="Start of every random generator.")
    deterministic: bool = Field(
        default=False, description="Pin Python, NumPy, torch, CUDA and the choice of algorithms, for equal results."
    )
    out: Annotated[Path, Strict(False)] = Field(default=Path("runs"), description="Folder for the run directory.")
    worst_samples: Count = Field(
        default=0,
        description="Samples with the largest validation loss at the end, whose maps by `gradwatch attribute` stand in "
        "report.html; needs the package captum.",
    )

    @field_validator("out")
    @classmethod
    def _expand_out(cls, out: Path) -> Path:
        try:
            return user_path(out)
        except GradwatchError as error:
            raise_problem(str(error))


class RecordSection(Section):
    """What is kept in memory so that a recent step can be run again, and written when something critical is found."""

    enabled: bool = Field(default=True, description="Keep a recent state, and write incidents.")
    every: PositiveInt = Field(
        default=50, description="Steps between two copies of model and optimizer in host memory; only one is kept."
    )
    memory_mb: PositiveInt = Field(
        default=2048, description="Host memory that this copy may take, in MB; a larger training is not copied."
    )
    incidents: PositiveInt = Field(default=5, description="How many incidents of a run are written at most.")


class WatchSection(Section):
    """What is measured besides the gradients of every step, and how often."""

    enabled: bool = Field(default=True, description="Watch at all.")
    updates_every: Count = Field(
        default=10, description="Steps between two measurements of weight norms and update/weight ratios; 0 is never."
    )
    activations_every: Count = Field(
        default=10, description="Steps between two measurements of activations; 0 is never."
    )
    activation_elements: PositiveInt = Field(
        default=65536, description="Values of one activation that are read at most; of a larger one, a part."
    )
    histograms_every: Count = Field(
        default=200,
        description="Steps between two histograms of a parameter's gradient and weights, which take turns at sampled "
        "steps; 0 is never.",
    )
    budget: float = Field(
        ge=0,
        lt=1,
        default=0.02,
        description="Part of the time that watching may take. Where it takes more, updates, activations and histograms "
        "are measured less often; 0 keeps to the schedule at any cost, as run.deterministic does.",
    )
    record: RecordSection = Field(
        default=RecordSection(), description="What it takes to run a step again at which something critical was found."
    )


class Config(Section):
    """A training run: model, data, loss, optimizer, schedule, and how it is trained, watched and shown."""

    run: RunSection = Field(default=RunSection(), description="Name, seed and place of the run.")
    model: Annotated[ModelSection, Expected("a mapping such as {name: mlp, depth: 3}")] = Field(
        description="The model."
    )
    data: Annotated[DataSection, Expected("a mapping such as {name: digits, batch_size: 64}")] = Field(
        description="The data and its batches."
    )
    loss: LossSection = Field(default=LossSection(), description="The loss; by default the usual one for the data.")
    optim: Annotated[OptimSection, Expected("a mapping such as {name: adamw, lr: 1e-3}")] = Field(
        description="The optimizer."
    )
    schedule: ScheduleSection = Field(default=ScheduleSection(), description="The learning-rate schedule; null: none.")
    train: Annotated[TrainSection, Expected("a mapping such as {epochs: 10}")] = Field(description="The training.")
    watch: WatchSection = Field(default=WatchSection(), description="What is measured.")
    detect: Switches = Field(default_factory=dict, description="Thresholds by kind of finding, or {enabled: false}.")
    sinks: Switches = Field(default_factory=dict, description="Settings of what shows the run, or {enabled: false}.")

    @model_validator(mode="before")
    @classmethod
    def _fill_empty_sections(cls, data: Any) -> Any:
        """Read `watch:` with nothing below it, and `schedule: null`, as a section without settings."""
        if not isinstance(data, Mapping):
            return data
        return {key: {} if value is None and key in cls.model_fields else value for key, value in data.items()}

    @field_validator("detect", "sinks", mode="before")
    @classmethod
    def _check_switches(cls, given: Any, info: ValidationInfo) -> Switches:
        vocabulary = registry.DETECTORS if info.field_name == "detect" else registry.SINKS
        checked, found = check_switches(vocabulary, given)
        raise_problems(found)
        return checked

    def to_yaml(self, *, defaults: bool = True) -> str:
        """Convert the config to YAML that loads back equal.

        Args:
            defaults: Whether to write the settings that have their default value too.
        """
        return yaml12.write(self.model_dump(mode="json", exclude_defaults=not defaults))
