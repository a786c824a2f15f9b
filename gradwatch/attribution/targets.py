"""Attribute samples of the data of a config or a run: one by its index, or those with the largest loss."""

# B = samples of a batch, N = samples of a dataset

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from gradwatch import build
from gradwatch.attribution.attribute import attribute
from gradwatch.attribution.drawing import MOST_BARS, picture
from gradwatch.attribution.methods import Method
from gradwatch.attribution.result import Attribution
from gradwatch.attribution.score import Target, evaluating
from gradwatch.config.load import load_config
from gradwatch.config.sections.root import Config
from gradwatch.data import Splits
from gradwatch.errors import GradwatchError, RunError
from gradwatch.history.disk import atomic
from gradwatch.paths import RUN_CONFIG
from gradwatch.render.report.attributions import NAME, attributions_page
from gradwatch.render.report.map_cards import MapCard, MapCards, png_text
from gradwatch.replay.restore.restored_session import isolated_process
from gradwatch.train import checkpoint
from gradwatch.train.reproducible import seed_all
from gradwatch.train.training_state import TrainingState

BATCH = 256
"""Samples whose losses are computed at once."""
MEAN_SAMPLES = 256
"""Training samples, evenly spaced, whose mean is the baseline."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMap:
    """The map of one sample of the data.

    Args:
        index: Index of the sample in its part of the data.
        label: The target of the sample, as text.
        predicted: The output that is explained: of a classifier, the predicted class.
        loss: Loss of the sample.
        attribution: The map with its evidence.
    """

    index: int
    label: str
    predicted: str
    loss: float
    attribution: Attribution

    @property
    def title(self) -> str:
        """Return the sample in one line."""
        return f"sample {self.index}: label {self.label}, explained {self.predicted}, loss {self.loss:.4g}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        own = {"sample": self.index, "label": self.label, "explained": self.predicted, "loss": self.loss}
        return own | self.attribution.to_json()

    def __str__(self) -> str:
        return f"{self.title}\n{self.attribution}"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SampleMaps:
    """Maps of samples of a config or a run. Their text is what `gradwatch attribute` prints.

    Args:
        model: The weights that were explained, in words.
        part: The part of the data, in words.
        maps: The maps.
    """

    model: str
    part: str
    maps: tuple[SampleMap, ...]

    @property
    def is_misleading(self) -> bool:
        """Return whether any map misleads."""
        return any(one.attribution.verdict == "misleads" for one in self.maps)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"model": self.model, "data": self.part, "maps": [one.to_json() for one in self.maps]}

    def __str__(self) -> str:
        return "\n\n".join([f"{self.model}; {self.part}", *map(str, self.maps)])

    def write_page(self, run: Path) -> Path:
        """Write the maps as one HTML file into a run directory, and return its path."""
        maps = MapCards(f"{self.model}; {self.part}", [_card(one) for one in self.maps])
        maps.write(run)  # for the report of the run
        atomic.replace(run / NAME, attributions_page(maps).encode("utf-8"))
        return run / NAME


def attribute_samples(
    target: Path,
    overrides: Sequence[str] = (),
    *,
    method: Method = "integrated",
    sample: int | None = None,
    worst: int | None = None,
) -> SampleMaps:
    """Attribute samples of a run with its newest checkpoint, or of a config with its initial weights.

    Args:
        target: The run directory or the config.
        overrides: Changed settings of a config, `key=value`.
        method: Method of the maps.
        sample: Index of a sample, or None for the ones with the largest loss.
        worst: Number of samples with the largest loss.

    Raises:
        RunError: The run has no config or no checkpoint.
    """
    if not target.is_dir():
        with _training(load_config(target, overrides, is_new=True)) as (training, splits):
            return _attribute(training, splits, f"{target}, untrained", method=method, sample=sample, worst=worst)
    if not (target / RUN_CONFIG).is_file():
        raise RunError(f"{target}: not a run of `gradwatch train`: it has no config.yaml")
    if not checkpoint.steps(target / "checkpoints"):
        raise RunError(f"{target}: it has no checkpoint, expected one with the weights to explain; train on")
    step, state = checkpoint.load(target / "checkpoints")
    with _training(load_config(target / RUN_CONFIG)) as (training, splits):
        training.load(state)
        return _attribute(training, splits, f"{target.name} at step {step}", method=method, sample=sample, worst=worst)


@contextlib.contextmanager
def _training(config: Config) -> Iterator[tuple[TrainingState, Splits]]:
    config = config.model_copy(update={"data": config.data.model_copy(update={"workers": 0})})
    with isolated_process(config, threads=None):
        seed_all(config.run.seed)
        splits = build.splits(config.data)
        if isinstance(splits.train, IterableDataset):
            raise GradwatchError("attribute: the data are a stream, whose samples have no index; expected a dataset")
        training = TrainingState.build(config, splits=splits)
        try:
            yield training, splits
        finally:
            training.end_workers()


def _attribute(
    training: TrainingState, splits: Splits, model: str, *, method: Method, sample: int | None, worst: int | None
) -> SampleMaps:
    dataset = splits.train if splits.val is None else splits.val
    part = "training data" if splits.val is None else "validation data"
    size = len(cast("Sized", dataset))
    if sample is not None and sample >= size:
        raise GradwatchError(f"--sample: got {sample}, expected 0 to {size - 1}: the {part} have {size} samples")
    if sample is not None:
        indices = [sample]
    else:
        losses_N = _losses(training, dataset, range(size))
        indices = losses_N.nan_to_num(nan=float("inf")).argsort(descending=True, stable=True)[:worst].tolist()
    data = _mean_samples(splits.train, training.device) if splits.spec.kind != "tokens" else None
    maps = tuple(_map(training, splits, dataset, index, data, method=method) for index in indices)
    return SampleMaps(model=model, part=part, maps=maps)


def _map(
    training: TrainingState, splits: Splits, dataset: Dataset[Any], index: int, data: Tensor | None, *, method: Method
) -> SampleMap:
    inputs, targets = _batch(dataset, [index], training.device)
    with evaluating(training.model, seed=0), torch.no_grad():
        outputs: Tensor = training.model(inputs)
    target, explained, label = _target(outputs, targets, splits)
    return SampleMap(
        index=index,
        label=label,
        predicted=explained,
        loss=float(_losses(training, dataset, [index])),
        attribution=attribute(
            training.model,
            inputs,
            target,
            method=method,
            data=None if data is None or not len(data) else data,
            names=_names(splits, inputs) or None,
        ),
    )


def _target(outputs: Tensor, targets: Tensor, splits: Splits) -> tuple[Target, str, str]:
    """Return the output to explain with its name, and the label: for a sequence, at the last position."""
    kind = splits.spec.kind
    if kind == "tokens":
        token, label = int(outputs[0, -1].argmax()), int(targets[0, -1])
        texts = [repr(splits.vocabulary[n]) if splits.vocabulary else f"token {n}" for n in (token, label)]
        return (outputs.shape[1] - 1, token), f"{texts[0]} at the end", texts[1]
    if kind == "values":
        values = ", ".join(f"{value:.4g}" for value in targets.flatten().tolist())
        return (0 if outputs.ndim > 1 else None), f"output 0 ({float(outputs.flatten()[0]):.4g})", values

    def name(number: int) -> str:
        return splits.classes[number] if splits.classes else str(number)

    found = int(outputs[0].argmax())
    return found, name(found), name(int(targets[0]))


def _losses(training: TrainingState, dataset: Dataset[Any], indices: Sequence[int]) -> Tensor:
    """Return the loss of each sample, shape (N,), float64."""
    losses = []
    with evaluating(training.model, seed=0), torch.no_grad():
        for first in range(0, len(indices), BATCH):
            inputs, targets = _batch(dataset, indices[first : first + BATCH], training.device)
            outputs = training.model(inputs)
            losses += [
                training.objective.loss(outputs[i : i + 1], targets[i : i + 1]).double() for i in range(len(targets))
            ]
    return torch.stack(losses).cpu()


def _batch(dataset: Dataset[Any], indices: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    inputs, targets = default_collate([dataset[index] for index in indices])
    if not isinstance(inputs, Tensor):
        raise GradwatchError(f"attribute: a sample is a {type(inputs).__name__}, expected one tensor of inputs")
    return inputs.to(device), targets.to(device)


def _mean_samples(dataset: Dataset[Any], device: torch.device) -> Tensor:
    size = len(cast("Sized", dataset))
    count = min(size, MEAN_SAMPLES)
    return _batch(dataset, [number * size // count for number in range(count)], device)[0]


def _card(one: SampleMap) -> MapCard:
    found = one.attribution
    png, size = "", (0, 0)
    if found.kind == "image":
        drawn, size = picture(found.totals, found.inputs[0].double().cpu().numpy(), is_signed=found.is_signed)
        png = png_text(drawn)
    features = list(zip(found.features, found.totals, strict=True))
    largest = sorted(features, key=lambda feature: -abs(feature[1]))[:MOST_BARS]
    return MapCard(
        title=one.title,
        verdict=found.verdict,
        headline=found.headline,
        png=png,
        size=size,
        tokens=features if found.kind == "tokens" else (),
        bars=largest if found.kind == "values" else (),
        evidence=list(found.experiments()),
        reasons=[reason.text for reason in found.reasons],
    )


def _names(splits: Splits, inputs: Tensor) -> tuple[str, ...]:
    """Return the names of a sample's tokens or columns, or nothing if the data have none."""
    if splits.vocabulary:
        return tuple(splits.vocabulary[number] for number in inputs.flatten().tolist())
    return splits.features
