"""Define the section `train`: length, device, precision, and the handling of gradients, memory and failures."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationInfo

from gradwatch.config.problems import raise_problem
from gradwatch.config.sections.base import Section
from gradwatch.config.sections.named import Patterns
from gradwatch.config.wording import Expected

Size = Annotated[
    str,
    Field(pattern=r"^(0*[1-9][0-9]*([.][0-9]+)?|0+[.]0*[1-9][0-9]*) ?([kKMGT]i?)?B$"),
    Expected("a size above 0 such as 8GB or 512MiB"),
]
Device = Annotated[
    str, Field(pattern=r"^(auto|(cpu|cuda|mps|xpu)(:\d+)?)$"), Expected("auto, cpu, cuda, cuda:1, mps or xpu")
]


def exactly_one_with(*others: str) -> AfterValidator:
    """Return a validator that requires exactly one of this setting and some others, which are declared before it."""

    # all fields default to None, so the last one needs validate_default: the check must run if none is set
    def check(value: Any, info: ValidationInfo) -> Any:
        # another setting is not in info.data if its own value was wrong, which is already a problem
        if not all(other in info.data for other in others):
            return value
        names = [*others, str(info.field_name)]
        given = [name for name in names if (value if name == info.field_name else info.data[name]) is not None]
        if len(given) != 1:
            first, last = (given or names)[:-1], (given or names)[-1]
            got = f"both {', '.join(first)} and {last}" if given else f"neither {', '.join(first)} nor {last}"
            raise_problem(f"has {got}, expected exactly one of them", in_parent=True)
        return value

    return AfterValidator(check)


def _not_with_budget(value: Any, info: ValidationInfo) -> Any:
    if value != "nothing" and info.data.get("budget"):
        raise_problem(f"got '{value}' with a budget, for which the plan chooses; set one of them")
    return value


def _not_while_planned(value: bool, info: ValidationInfo) -> bool:
    choice = info.data.get("activation_checkpointing")
    if value and isinstance(choice, BlocksSection) and choice.budget:
        raise_problem(
            "got true with activation_checkpointing: {budget: ...}, which chooses what to recompute instead; set one "
            "of them"
        )
    return value


class ClipSection(Section):
    """Limit of the gradient, applied once it is unscaled and observed."""

    norm: PositiveFloat | None = Field(default=None, description="Largest total L2 norm; a larger one is scaled down.")
    value: Annotated[PositiveFloat | None, exactly_one_with("norm")] = Field(
        default=None, validate_default=True, description="Largest magnitude of an element; larger ones are cut off."
    )


class BlocksSection(Section):
    """Which parts of the model keep no activations and compute them again in the backward pass."""

    every: PositiveInt | None = Field(
        default=None, description="Blocks of a segment; all segments but the last are recomputed."
    )
    modules: Patterns | None = Field(default=None, description="Patterns of module names, such as ['blocks.*'].")
    budget: Annotated[Size | None, exactly_one_with("every", "modules")] = Field(
        default=None,
        validate_default=True,
        description="Memory that a step may take, such as 4GB: the plan chooses what to recompute at the least cost, "
        "and the config of the run holds its choice.",
    )
    save: Annotated[Literal["nothing", "matmuls"], AfterValidator(_not_with_budget)] = Field(
        default="nothing",
        description="What recomputed modules keep nevertheless: matmuls keeps the outputs of matrix products, "
        "convolutions and attention, so that only the cheap operations between them are recomputed.",
    )


class CompileSection(Section):
    """Keyword arguments of torch.compile."""

    backend: str = Field(default="inductor", description="Name of the compiler backend.")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = Field(
        default=None, description="What to optimize for."
    )
    fullgraph: bool = Field(default=False, description="Refuse a model that does not compile into a single graph.")
    dynamic: bool | None = Field(default=None, description="Compile for any shape; null decides by itself.")


class CheckpointSection(Section):
    """Run checkpoints: all that an exact resume needs."""

    every: PositiveInt | None = Field(default=None, description="Optimizer steps between two; null is each evaluation.")
    keep: PositiveInt = Field(default=2, description="How many of the newest are kept.")
    best: bool | None = Field(
        default=None,
        description="Keep the one with the lowest validation loss as well; null does so where there is validation.",
    )


class EarlyStopSection(Section):
    """When to end before the planned end, since nothing improves."""

    metric: Literal["val_loss", "val_accuracy", "loss"] = Field(
        default="val_loss", description="What has to improve, judged at each evaluation."
    )
    patience: PositiveInt = Field(default=5, description="Evaluations without improvement after which training ends.")
    min_delta: NonNegativeFloat = Field(default=0.0, description="Least change that counts as an improvement.")


class RewindSection(Section):
    """What is done differently after the training went back, and how often it may; for on_critical: rewind."""

    limit: PositiveInt = Field(default=3, description="Rewinds of a run; what comes after them ends it.")
    remedy: Literal["skip", "lower_lr"] = Field(
        default="skip", description="Leave out the batches of the critical step, or lower the learning rate."
    )
    lr_factor: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.5, description="Factor of the learning rate at each rewind, with remedy: lower_lr."
    )


class ScalerSection(Section):
    """The GradScaler of fp16: keeps small gradients above what half precision flushes to zero."""

    enabled: bool = Field(default=True, description="Scale the loss at all.")
    init_scale: PositiveFloat = Field(default=65536.0, description="Scale at the start.")
    growth_factor: Annotated[float, Field(gt=1)] = Field(
        default=2.0, description="Factor of the scale after growth_interval clean updates."
    )
    backoff_factor: Annotated[float, Field(gt=0, lt=1)] = Field(
        default=0.5, description="Factor of the scale after an update that overflowed and was skipped."
    )
    growth_interval: PositiveInt = Field(
        default=2000, description="Clean updates in a row after which the scale grows."
    )


class TrainSection(Section):
    """The training itself."""

    steps: PositiveInt | None = Field(default=None, description="Optimizer steps to make; excludes epochs.")
    epochs: Annotated[PositiveInt | None, exactly_one_with("steps")] = Field(
        default=None, validate_default=True, description="Passes over the training samples; excludes steps."
    )
    device: Device = Field(default="auto", description="Where to train; auto is CUDA where there is one, else the CPU.")
    parallel: Literal["none", "ddp", "fsdp2", "hsdp"] = Field(
        default="none",
        description="How several ranks share the training: ddp copies the model, fsdp2 shards it, hsdp shards it "
        "within groups of ranks and copies it between them. With one process it changes nothing.",
    )
    shard_ranks: PositiveInt | None = Field(
        default=None,
        description="Ranks over which hsdp shards one copy of the model; null is the ranks of a machine.",
    )
    sync_batchnorm: bool = Field(
        default=False,
        description="Replace BatchNorm by SyncBatchNorm, which normalizes over the batches of all ranks; needs a GPU.",
    )
    threads: PositiveInt | None = Field(
        default=None,
        description="Threads on the CPU; null is torch's choice, 1 suits small models.",
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="Format of the forward pass, by autocast; weights and optimizer stay in fp32."
    )
    accumulate: PositiveInt = Field(default=1, description="Batches whose gradients make up one optimizer step.")
    clip: ClipSection | None = Field(default=None, description="Limit of the gradient: {norm: 1.0} or {value: 0.5}.")
    activation_checkpointing: Literal["none", "sqrt"] | BlocksSection = Field(
        default="none",
        description="Save memory by computing activations twice: none, sqrt, {every: k}, {modules: []} or "
        "{budget: 4GB}.",
    )
    activation_offloading: Annotated[bool, AfterValidator(_not_while_planned)] = Field(
        default=False,
        description="Save device memory by keeping the activations in host memory until the backward pass; with "
        "activation_checkpointing, those that are not computed again.",
    )
    compile: bool | CompileSection = Field(
        default=False, description="Use torch.compile, with these keyword arguments."
    )
    eval_every: PositiveInt | None = Field(
        default=None, description="Optimizer steps between two evaluations; null is once per epoch."
    )
    checkpoint: CheckpointSection = Field(default=CheckpointSection(), description="When to save, and what to keep.")
    early_stop: EarlyStopSection | None = Field(default=None, description="When to end early; null is never.")
    on_nonfinite: Literal["skip", "stop", "continue"] = Field(
        default="skip",
        description="What to do with an update whose loss or gradient is NaN or Inf. It comes first, within the step: "
        "stop ends the run before on_critical acts.",
    )
    on_critical: Literal["continue", "stop", "skip", "rewind"] = Field(
        default="continue",
        description="What to do after a critical finding, once the step is over and on_nonfinite has acted: skip "
        "leaves the step's batches out from then on, rewind goes back to the last good state.",
    )
    rewind: RewindSection = Field(default=RewindSection(), description="How on_critical: rewind goes on.")
    scaler: ScalerSection = Field(default=ScalerSection(), description="Loss scaling; only fp16 needs it.")

    @property
    def compile_options(self) -> dict[str, Any] | None:
        """Keyword arguments for torch.compile, or None if nothing is compiled."""
        if isinstance(self.compile, CompileSection):
            return self.compile.model_dump(exclude_none=True)
        return {} if self.compile else None
