"""Define the records of a run, its findings and its diagnoses, as frozen data with JSON input and output."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, final

Item_co = TypeVar("Item_co", covariant=True)

MAX_NAMES = 3
"""Maximum number of layers that a sentence about a finding names."""


@final
class Lines(tuple[Item_co, ...]):
    """A tuple that prints as one line per item, or as `none`."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "none"


def plain(value: Any) -> Any:
    """Return records, containers and numbers as plain data for JSON. A number that is not finite becomes None."""
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return plain_fields(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as `plain` data. A field `place` is replaced by its file and line."""
    data = {field.name: plain(getattr(record, field.name)) for field in fields(record)}
    return data | data.pop("place") if isinstance(data.get("place"), dict) else data


class Severity(enum.IntEnum):
    """The harm of a finding to the training. `str()` returns the name in lower case."""

    INFO = 0
    WARNING = 1
    CRITICAL = 2

    def __str__(self) -> str:
        return self.name.lower()

    @classmethod
    def parse(cls, name: str) -> Severity:
        """Return the severity of a name, in upper or lower case."""
        return cls[name.upper()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One number of evidence.

    Args:
        key: Stable name that code compares, such as `backward.gain_decades`. A statistic keeps its catalogue name.
        value: The number.
        unit: Its unit, empty for a pure number.
        label: Description for people; empty if the key is clear. Code never compares it.
    """

    key: str
    value: float
    unit: str = ""
    label: str = ""

    @property
    def name(self) -> str:
        """The label, or the key if there is no label."""
        return self.label or self.key

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return {"key": self.key, "name": self.name, "value": self.value, "unit": self.unit}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Quantity:
        """Return the quantity from the result of `to_json`."""
        # JSON has the shown name, which is the key if there is no label
        label = "" if data["name"] == data["key"] else data["name"]
        return cls(key=data["key"], value=data["value"], unit=data["unit"], label=label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem that a detector found in the history.

    A finding is open until later steps show that the symptom is over. Its detector then withdraws it.

    Args:
        code: Number of the kind, such as `GW101`.
        kind: Name of the kind, such as `vanishing-gradient`.
        layer: Module or parameter name, or None for the whole run. The first of `layers` if there are several.
        step: Optimizer step of the first report, from 0.
        severity: Harm to the training.
        evidence: Named numbers with units.
        message: One sentence.
        onset: First step with the symptom, or None if the detector cannot tell.
        layers: All affected layers if several share the cause, otherwise empty.
        withdrawn: Step of the withdrawal, or None while the finding is open.
        ended: First step without the symptom, or None while the finding is open.
        reason: Reason why the symptom ended, such as `it got a gradient`; empty while the finding is open.
    """

    code: str
    kind: str
    layer: str | None
    step: int
    severity: Severity
    message: str
    evidence: tuple[Quantity, ...] = ()
    onset: int | None = None
    layers: tuple[str, ...] = ()
    withdrawn: int | None = None
    ended: int | None = None
    reason: str = ""

    @property
    def since(self) -> int:
        """The onset, or the step of the report if the onset is unknown."""
        return self.step if self.onset is None else self.onset

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all affected layers; empty for the whole run."""
        return self.layers or (() if self.layer is None else (self.layer,))

    @property
    def place(self) -> str:
        """The affected layers for a sentence: `the whole run`, or up to `MAX_NAMES` names and the number of others."""
        names = ", ".join(self.names[:MAX_NAMES]) or "the whole run"
        return names + (f" and {len(self.names) - MAX_NAMES:,} more" if len(self.names) > MAX_NAMES else "")

    @property
    def when(self) -> str:
        """The onset and the report, such as `since step 60 (found at step 65)`, or the onset and the end."""
        if self.ended is not None:
            return f"from step {self.since:,} to {max(self.since, self.ended - 1):,}"
        found = f"step {self.step:,}"
        return found if self.since == self.step else f"since step {self.since:,} (found at {found})"

    @property
    def life(self) -> str:
        """Kind, place, onset and end: `no-gradient in encoder, from step 10 to 59; then it got a gradient`."""
        where = f" in {self.place}" if self.names else ""
        return f"{self.kind}{where}, {self.when}" + (f"; then {self.reason}" if self.reason else "")

    def __str__(self) -> str:
        where = f" in {self.place}" if self.names else ""
        text = f"{self.when}: {self.severity} {self.kind} ({self.code}){where}: {self.message}"
        return f"{text}; then {self.reason}" if self.reason else text

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return asdict(self) | {"severity": str(self.severity), "evidence": [q.to_json() for q in self.evidence]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Finding:
        """Return the finding from the result of `to_json`."""
        # JSON has lists and names, while equal findings need tuples and severities
        evidence = tuple(Quantity.from_json(q) for q in data["evidence"])
        # older runs have no `layers`
        tuples = {"evidence": evidence, "layers": tuple(data.get("layers", ()))}
        return cls(**data | tuples | {"severity": Severity.parse(data["severity"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """An observation that is not a statistic, such as a cut graph, a wrong mode, a rewind or an incident.

    `events.py` lists all kinds.

    Args:
        kind: Name of the kind, such as `graph-probabilities`.
        step: Optimizer step of the event.
        layer: Module or parameter name, or None for the whole run.
        text: One sentence for people.
        values: Named numbers.
    """

    kind: str
    step: int
    layer: str | None = None
    text: str = ""
    values: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Event:
        """Return the event from the result of `to_json`."""
        return cls(**data)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change that cures a cause.

    Args:
        text: One sentence.
        patch: Dotted config keys with their new values, for a training from a config.
        code: Lines of Python with the names of the model, if the change is made in code.
        cures: Whether a training with the change no longer had the finding; None if it was not tested.
    """

    text: str
    patch: dict[str, Any] = field(default_factory=dict)
    code: str = ""
    cures: bool | None = None

    def __str__(self) -> str:
        # several lines of code do not fit into a sentence; `gradwatch diagnose` shows them
        return f"{self.text}: {self.code}" if self.code and "\n" not in self.code else self.text


SURENESS = ((0.85, "almost certain"), (0.6, "likely"), (0.4, "one of two"), (0.0, "possible"))
"""Words for certainties, each with its lower limit: 0.4 is a cause with one rival of equal odds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A cause and the findings that it explains, the strongest evidence first.

    Args:
        cause: Description of the cause, such as `saturating activations in a deep network`. Code compares `cause_id`.
        certainty: Confidence in the cause, from 0 to 1; `sureness` gives it in words.
        findings: Findings that the cause explains, never empty.
        because: One or two sentences that connect the evidence to the cause.
        confirm: Instructions to confirm the cause.
        confirm_code: Command for a shell, or Python for the user's script, that confirms the cause in this run; empty
            if there is none.
        remedies: Changes that cure the cause, the most effective first.
        source: Reference for the mechanism.
        cause_id: Stable name of the cause, such as `saturating-stack`; empty if no cause is known.
    """

    cause: str
    certainty: float
    findings: tuple[Finding, ...]
    because: str
    confirm: str
    remedies: tuple[Remedy, ...]
    source: str = ""
    cause_id: str = ""
    confirm_code: str = ""

    @property
    def sureness(self) -> str:
        """The certainty in words: the underlying odds are too coarse for digits."""
        return next(word for least, word in SURENESS if self.certainty >= least)

    @property
    def severity(self) -> Severity:
        """The highest severity of the findings."""
        return max(f.severity for f in self.findings)

    def __str__(self) -> str:
        fix = f"; fix: {self.remedies[0]}" if self.remedies else ""
        return f"{self.cause} ({self.sureness}){fix}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        # `asdict` would write severities as numbers
        return asdict(self) | {"severity": str(self.severity), "findings": [f.to_json() for f in self.findings]}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """The shape and kind of the data that a model trains on.

    Args:
        input_shape: Shape of one sample's input, without the batch.
        outputs: Number of classes, size of the vocabulary, or width of the target.
        kind: `classes` (one label per sample), `tokens` (one label per position) or `values` (regression).
    """

    input_shape: tuple[int, ...]
    outputs: int
    kind: Literal["classes", "tokens", "values"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataInfo:
    """The data of a training from a config.

    Args:
        name: Name of the dataset, such as `csv`, or the user's target.
        samples: Number of training samples; None for a stream.
        held_out: Number of validation samples; 0 without validation, None for a stream.
        kind: As in `DataSpec`.
        outputs: As in `DataSpec`.
        guess: Evidence for a guessed kind, such as `whole numbers in column 'age'`; empty if the user chose the kind.
    """

    name: str
    samples: int | None
    held_out: int | None
    kind: Literal["classes", "tokens", "values"]
    outputs: int
    guess: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInfo:
    """One parameter tensor when the monitor was attached.

    Args:
        name: Parameter name, such as `blocks.3.fc.weight`.
        module: Name of the module that owns the tensor, such as `blocks.3.fc`; empty for the root.
        module_type: Class name of the module, such as `Linear`.
        shape: Shape of the tensor.
        dtype: Dtype of the tensor, such as `float32`.
        trainable: Whether the tensor required a gradient.
        group: Index of its optimizer group, or None if it is in no optimizer.
    """

    name: str
    module: str
    module_type: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    group: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationInfo:
    """One watched activation module: its name and class name, such as `blocks.3.act` and `ReLU`."""

    name: str
    module_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardInfo:
    """Parameter tensors that several ranks hold in parts, as in FSDP2 and tensor parallelism.

    Args:
        ranks: The ranks, in increasing order.
        layers: Indices of the tensors in `RunInfo.layers`.
        numels: Number of elements of each tensor on the rank of this run.
        is_split: Whether the ranks hold different elements. Otherwise, each holds all of them.
    """

    ranks: tuple[int, ...]
    layers: tuple[int, ...]
    numels: tuple[int, ...]
    is_split: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """The description of a run.

    Args:
        name: Name of the run.
        created: Start of the run, ISO 8601 with time zone.
        layers: The parameter tensors in the order of the model (input side first).
        activations: The watched activation modules in the order of the model.
        precision: `fp32`, `bf16` or `fp16`: the format of the forward pass.
        loss_scaling: Whether a GradScaler scales the loss.
        accumulate: Micro-batches per optimizer step.
        optimizer: Class name of the optimizer, such as `AdamW`; several are joined by `+`.
        loss: Name of the loss function, such as `CrossEntropyLoss`; empty if unknown.
        device: Device of the first parameter, such as `cpu` or `cuda:0`.
        total_steps: Planned optimizer steps, or None if unknown.
        versions: Versions by package name: python, torch, gradwatch.
        data: The data, or None in a user's own loop.
        steps_per_epoch: Optimizer steps per epoch, or None if unknown.
        settings: Settings of the config by dotted key, with the defaults of model, data, optimizer and schedule; None
            for a run of your own training loop.
        models: Names of the models; the name of a single model is empty.
        script: Path of the script that called `watch`, relative if it is below the working directory; empty if there is
            none.
        keeps_steps: Whether `watch` was called with `record`, so that a step with a critical finding is saved.
        rank: Rank of the process in a distributed training.
        world_size: Number of ranks; 1 if the training is not distributed.
        initial_rates: Learning rate that a scheduler multiplies, for each group of the optimizers; None for a group
            without a scheduler when `watch` was called.
        initial_decays: Weight decay of each group of the optimizers when `watch` was called; None for a group without
            this setting.
        shards: The parameter tensors that ranks hold together; empty if every rank has whole tensors.
    """

    name: str
    created: str
    layers: tuple[LayerInfo, ...]
    activations: tuple[ActivationInfo, ...] = ()
    precision: str = "fp32"
    loss_scaling: bool = False
    accumulate: int = 1
    optimizer: str = ""
    loss: str = ""
    device: str = "cpu"
    total_steps: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    data: DataInfo | None = None
    steps_per_epoch: int | None = None
    settings: dict[str, Any] | None = None
    models: tuple[str, ...] = ("",)
    script: str = ""
    keeps_steps: bool = False
    rank: int = 0
    world_size: int = 1
    initial_rates: tuple[float | None, ...] = ()
    initial_decays: tuple[float | None, ...] = ()
    shards: tuple[ShardInfo, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RunInfo:
        """Return the run info from the result of `to_json`, also after a conversion to JSON text and back."""
        # JSON has lists, while equal records need equal types
        layers = tuple(LayerInfo(**layer | {"shape": tuple(layer["shape"])}) for layer in data["layers"])
        activations = tuple(ActivationInfo(**a) for a in data["activations"])
        trained_on = DataInfo(**data["data"]) if data.get("data") else None
        models = tuple(data.get("models", ("",)))  # older runs do not have them
        shards = tuple(
            ShardInfo(**shard | {name: tuple(shard[name]) for name in ("ranks", "layers", "numels")})
            for shard in data.get("shards", ())
        )
        rates = tuple(data.get("initial_rates", ()))
        decays = tuple(data.get("initial_decays", ()))
        tuples = {
            "layers": layers,
            "activations": activations,
            "models": models,
            "initial_rates": rates,
            "initial_decays": decays,
            "shards": shards,
        }
        return cls(**data | tuples | {"data": trained_on})
