"""Measure how many faults of the zoo that a config can express are cured: train, diagnose, patch, train again."""

from __future__ import annotations

import argparse
import fnmatch
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch

from gradwatch.config.load import load_config
from gradwatch.data import digits
from gradwatch.diagnose.rank import diagnose
from gradwatch.history.disk import read
from gradwatch.records import Severity
from gradwatch.replay.attempt import Pair, attempt
from gradwatch.replay.change import config_of
from gradwatch.replay.cure import TOLERANCE, find_cure, hardly_learns, to_yaml
from gradwatch.replay.theatre import Theatre
from gradwatch.replay.verify import verify
from gradwatch.train.loop import train

QUIET = ["sinks.terminal.enabled=false", "sinks.tensorboard.enabled=false"]
SEEDS = 2
"""The run's own seed, and another."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ill:
    """A config that is ill as a case of the zoo is.

    Args:
        zoo: Name of the case whose mechanism it has.
        kinds: Findings of which one must be made: what the case is labelled with, or may be as well.
        text: The config; `FOLDER` stands for where the data files are.
        note: What makes it another one, where a case has more than one.
    """

    zoo: str
    kinds: tuple[str, ...]
    text: str
    note: str = ""

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{self.zoo}-{self.note}" if self.note else self.zoo


IN_CODE = (
    "activation_dictionary",
    "activity_windows",
    "cart_q_values",
    "digit_captions",
    "digits_accumulated",
    "digits_convnet",
    "digits_highway",
    "digits_resnet_validation",
    "heatmap_detector",
    "review_topics_bigru",
    "scanned_forms_cnn",
    "surface_fit_column",
    "topic_attention",
    "topics_empty_document",
    "wine_step_loop",
)
"""Cases whose fault no config expresses: it is a line of a loop, of a forward pass or of a loss, or a broken sample."""

ILL = (
    Ill(
        zoo="community_gcn",
        kinds=("exploding-gradient", "poor-initialization"),
        text="""
model: {name: mlp, depth: 12, width: 64, init: kaiming, gain: 5.0}
data: {name: digits}
optim: {name: adam, lr: 5e-3, weight_decay: 5e-4}
train: {steps: 100}
""",
    ),
    Ill(
        zoo="digits_mlp_sigmoid",
        kinds=("vanishing-gradient",),
        text="""
model: {name: mlp, depth: 8, width: 128, activation: sigmoid}
data: {name: digits, batch_size: 128}
optim: {name: sgd, lr: 0.1, momentum: 0.9}
train: {steps: 150}
""",
    ),
    Ill(
        zoo="surface_fit_tanh",
        kinds=("vanishing-gradient", "poor-initialization"),
        text="""
model: {name: mlp, depth: 10, width: 100, activation: tanh, init: normal, init_std: 0.01}
data: {name: synthetic, kind: values, samples: 6000, dims: 8, noise: 0.05, batch_size: 128}
optim: {name: sgd, lr: 0.05, momentum: 0.9}
train: {steps: 150}
""",
    ),
    Ill(
        zoo="digits_frozen_norms",
        kinds=("dead-layer", "no-gradient"),
        text="""
model: {name: resnet18, zero_init_residual: true}
data: {name: digits, batch_size: 32, transform: [RGB]}
optim: {name: sgd, lr: 0.01, momentum: 0.9, groups: [{match: ["*.bn2.*"], lr: 0.0}]}
train: {steps: 40}
""",
    ),
    Ill(
        zoo="digits_from_folders",
        kinds=("oscillating-gradient",),
        text="""
model: {name: cnn, channels: [24, 48], normalisation: none, activation: leaky_relu}
data: {name: npz, file: FOLDER/sorted.npz, batch_size: 15, shuffle: false}
optim: {name: sgd, lr: 0.1}
train: {steps: 350}
""",
    ),
    Ill(
        zoo="raw_pixels_mlp",
        kinds=("saturated-activation",),
        text="""
model: {name: mlp, depth: 3, width: 128, activation: sigmoid}
data: {name: digits, batch_size: 100, transform: [{Normalize: {mean: [0.0], std: [0.00392157]}}]}
optim: {name: sgd, lr: 0.02, momentum: 0.9}
train: {steps: 200}
""",
    ),
    Ill(
        zoo="raw_pixels_mlp",
        note="table",
        kinds=("saturated-activation",),
        text="""
model: {name: mlp, depth: 3, width: 128, activation: tanh}
data: {name: npz, file: FOLDER/raw.npz, standardise: false, batch_size: 100}
optim: {name: sgd, lr: 0.02, momentum: 0.9}
train: {steps: 200}
""",
    ),
    Ill(
        zoo="tumour_classifier",
        kinds=("no-gradient", "loss-plateau"),
        text="""
model: {name: mlp, depth: 3, width: 128}
data: {name: synthetic, kind: values, samples: 2000, noise: 0.1}
loss: {name: CrossEntropyLoss}
optim: {name: rmsprop, lr: 1e-3}
train: {steps: 150}
""",
    ),
    Ill(
        zoo="finetune_digits_resnet",
        kinds=("not-optimized",),
        text="""
model: {name: cnn, channels: [16, 32]}
data: {name: digits}
optim: {name: sgd, lr: 0.05, momentum: 0.9, groups: [{match: "head.*", lr: 1e-12}]}
train: {steps: 120}
""",
    ),
    Ill(
        zoo="chargpt_weight_decay_groups",
        kinds=("not-optimized",),
        text="""
model: {name: gpt, layers: 2, heads: 4, width: 48}
data: {name: text, context: 48, batch_size: 16}
optim: {name: adamw, lr: 1e-3, betas: [0.9, 0.95], groups: [{match: "*norm*", lr: 1e-12}]}
train: {steps: 120, clip: {norm: 1.0}, eval_every: 120}
""",
    ),
    Ill(
        zoo="tumour_log_likelihood",
        kinds=("non-finite",),
        text="""
model: {name: mlp, depth: 3, width: 256}
data: {name: digits}
optim: {name: sgd, lr: 1.0, momentum: 0.9}
loss: {target: "configs.clinic.formulas:likelihood_by_hand"}
train: {steps: 250}
""",
    ),
    Ill(
        zoo="digits_standardized",
        kinds=("non-finite",),
        text="""
model: {name: mlp, depth: 3, width: 256}
data: {name: digits, batch_size: 128, transform: [{Normalize: {mean: [0.3], std: [1e-40]}}]}
optim: {name: adam, lr: 1e-3}
train: {steps: 80}
""",
    ),
    Ill(
        zoo="count_rates",
        kinds=("non-finite",),
        text="""
model: {name: mlp, depth: 3, width: 96, activation: silu}
data: {name: npz, file: FOLDER/counts.npz, kind: values, batch_size: 128}
loss: {name: PoissonNLLLoss, log_input: false}
optim: {name: adam, lr: 4e-3}
train: {steps: 150}
""",
    ),
    Ill(
        zoo="frames_autoencoder_amp",
        kinds=("fp16-underflow",),
        text="""
model: {name: mlp, depth: 4, width: 96, activation: gelu}
data: {name: synthetic, kind: values, samples: 4000, dims: 8, noise: 0.05, batch_size: 128}
loss: {name: HuberLoss, delta: 1e-5}
optim: {name: adamw, lr: 2e-3}
train: {steps: 150, precision: fp16, scaler: {enabled: false}}
""",
    ),
    Ill(
        zoo="frames_autoencoder_amp",
        note="scale",
        kinds=("fp16-underflow",),
        text="""
model: {name: mlp, depth: 10, width: 64}
data: {name: digits, batch_size: 256}
optim: {name: adamw, lr: 2e-3}
train: {steps: 80, precision: fp16, scaler: {init_scale: 0.01}}
""",
    ),
    Ill(
        zoo="topic_reader_amp",
        kinds=("loss-scale-collapse", "non-finite"),
        text="""
model: {name: mlp, depth: 3, width: 96}
data: {name: npz, file: FOLDER/counts.npz, kind: values, batch_size: 128}
loss: {name: PoissonNLLLoss, log_input: false}
optim: {name: adam, lr: 2e-3}
train: {steps: 120, precision: fp16}
""",
    ),
    Ill(
        zoo="chargpt_adam",
        kinds=("learning-rate-too-high",),
        text="""
model: {name: gpt, layers: 2, heads: 4, width: 48}
data: {name: text, context: 48, batch_size: 16}
optim: {name: adam, lr: 0.1}
train: {steps: 120, eval_every: 120}
""",
    ),
    Ill(
        zoo="digits_resnet_steplr",
        kinds=("learning-rate-too-low",),
        text="""
model: {name: cnn, channels: [16, 16]}
data: {name: digits}
optim: {name: sgd, lr: 0.02, momentum: 0.9, weight_decay: 1e-4}
schedule: {name: step, step_size: 5, gamma: 0.5}
train: {steps: 200}
""",
    ),
    Ill(
        zoo="diabetes_progression",
        kinds=("learning-rate-too-low",),
        text="""
model: {name: mlp, depth: 3, width: 256}
data: {name: synthetic, kind: values, samples: 440, dims: 10, batch_size: 32}
optim: {name: adamw, lr: 1e-7, weight_decay: 0.01}
train: {steps: 200}
""",
    ),
    Ill(
        zoo="digits_mlp_normal",
        kinds=("poor-initialization", "exploding-gradient"),
        text="""
model: {name: mlp, depth: 3, width: 300, init: normal, init_std: 1.0}
data: {name: digits}
optim: {name: adam, lr: 1e-3}
train: {steps: 150}
""",
    ),
    Ill(
        zoo="movie_ratings_mf",
        kinds=("poor-initialization",),
        text="""
model: {name: mlp, depth: 4, width: 128, activation: identity, init: orthogonal, gain: 6.0}
data: {name: synthetic, kind: values, samples: 3000, batch_size: 256}
optim: {name: adam, lr: 5e-3}
train: {steps: 150}
""",
    ),
    Ill(
        zoo="house_prices_wide_deep",
        kinds=("layer-imbalance", "exploding-gradient"),  # there is one tower here, so that all of it gets raw columns
        text="""
model: {name: mlp, depth: 3, width: 128}
data: {name: npz, file: FOLDER/houses.npz, kind: values, standardise: false}
optim: {name: adam, lr: 1e-4}
train: {steps: 200}
""",
    ),
    Ill(
        zoo="tumour_small_sample",
        kinds=("overfitting",),
        text="""
model: {name: mlp, depth: 3, width: 512}
data: {name: npz, file: FOLDER/tumour.npz, val_inputs: u, val_targets: v, batch_size: 35}
optim: {name: adam, lr: 3e-4}
train: {steps: 400, eval_every: 10}
""",
    ),
    Ill(
        zoo="circles_deep",
        kinds=("loss-plateau",),
        text="""
model: {name: mlp, depth: 5, width: 128, activation: identity, normalisation: batch}
data: {name: npz, file: FOLDER/circles.npz, batch_size: 128}
optim: {name: sgd, lr: 0.02, momentum: 0.9, weight_decay: 1e-4}
train: {steps: 400}
""",
    ),
)


def main() -> None:
    """Train, diagnose and cure each config, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="names of configs, such as 'digits_*'")
    parser.add_argument("--within", type=float, default=600.0, help="seconds for the search of each cure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cured = counted = 0
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        for ill in ILL:
            if fnmatch.fnmatch(ill.name, options.only):
                verdict = shown(ill, Path(folder), within_s=options.within)
                counted += verdict is not None
                cured += bool(verdict)
    cases = len({ill.zoo for ill in ILL})
    print(f"\n{cured} of {counted} cured ({cured / max(counted, 1):.0%})")
    print(f"{len(ILL)} configs stand for {cases} cases of the zoo; the faults of {len(IN_CODE)} are in somebody's code")


def shown(ill: Ill, folder: Path, *, within_s: float) -> bool | None:
    """Return whether a config is cured, or None where it did not get ill; print everything on the way."""
    began = time.perf_counter()
    path = folder / f"{ill.name}.yaml"
    path.write_text(ill.text.replace("FOLDER", str(folder)))
    run = train(load_config(path, [*QUIET, f"run.out={folder}", "train.threads=1"]), log_format="plain").directory
    history = read(run)
    found = {f.kind for f in history.findings if f.severity >= Severity.WARNING}
    print(f"\n{ill.name}: {', '.join(sorted(found)) or 'no finding'}", flush=True)
    if not found & set(ill.kinds):
        print(f"  does not count: expected {' or '.join(ill.kinds)}")
        return None
    diagnoses = diagnose(history)
    print(*(f"  cause: {d.cause} ({d.findings[0].kind})" for d in diagnoses if d.severity > Severity.INFO), sep="\n")
    theatre = Theatre(run, history, deadline=time.perf_counter() + within_s)
    cure = find_cure(theatre, verify(theatre, diagnoses))
    if cure is None:
        print(f"  NOT CURED: no cure found, {time.perf_counter() - began:.0f} s")
        return False
    print(*(f"  | {line}" for line in to_yaml(cure, run=run).splitlines() if not line.startswith("#")), sep="\n")
    tried = attempt(config_of(run), config_of(run, cure.patch), steps=history.step + 1, seeds=SEEDS, threads=1)
    print(*(f"  {line}" for pair in tried.pairs for line in told(pair)), sep="\n")
    is_cured = all(is_healed(pair, ill, same_loss=tried.same_loss) for pair in tried.pairs)
    print(f"  {'cured' if is_cured else 'NOT CURED'}, {time.perf_counter() - began:.0f} s", flush=True)
    return is_cured


def told(pair: Pair) -> Iterator[str]:
    """Yield what became of a seed: findings, loss and accuracy, before and with the cure."""
    for name, made in (("ill", pair.old), ("cured", pair.new)):
        kinds = ", ".join(sorted({f.kind for f in made.alarms})) or "healthy"
        yield (
            f"seed {pair.seed}, {name:<5} loss {made.loss:8.4g}  validation loss {made.val_loss:8.4g}  "
            f"accuracy {made.val_accuracy:6.1%}  {kinds}"
        )


def is_healed(pair: Pair, ill: Ill, *, same_loss: bool) -> bool:
    """Say whether the cured training of a seed has no alarm and learns better than the ill one, or as well."""
    old, new = pair.old, pair.new
    if new.alarms or hardly_learns(new) or new.val_accuracy < old.val_accuracy - TOLERANCE:
        return False
    improved = new.val_accuracy > old.val_accuracy
    if same_loss:
        improved |= new.loss < old.loss or new.val_loss < old.val_loss
    return improved or not np.isfinite(old.loss) or not same_loss


def write_data(folder: Path) -> None:
    """Write the tables and images that the cases read."""
    draw = np.random.default_rng(0)
    with np.load(digits.FILE, allow_pickle=False) as arrays:
        images, labels = arrays["images"][:, None].astype(np.float32) / digits.DARKEST, arrays["labels"]
    order = np.argsort(labels, kind="stable")
    np.savez(folder / "sorted.npz", x=images[order], y=labels[order])
    np.savez(folder / "raw.npz", x=np.round(images.reshape(len(images), -1) * 255), y=labels)
    radius, angle = 1 + draw.integers(0, 2, 3000), draw.uniform(0, 2 * np.pi, 3000)
    circles = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1) + draw.normal(0, 0.1, (3000, 2))
    np.savez(folder / "circles.npz", x=circles.astype(np.float32), y=radius)
    x = draw.normal(size=(4000, 10)).astype(np.float32)
    mean = 4 + 3 * x[:, 0] + 2 * x[:, 1] ** 2 + x[:, 2]
    np.savez(folder / "counts.npz", x=x, y=draw.poisson(np.maximum(mean, 0.2)).astype(np.float32))
    scale, centre = np.array([60, 2, 1, 800, 12, 20]), np.array([140, 4, 2, 1500, 1970, 30])
    houses = draw.normal(size=(3000, 6))
    price = houses @ np.array([0.8, 0.2, 0.1, 0.3, 0.4, -0.3]) + 0.3 * draw.normal(size=3000)
    np.savez(folder / "houses.npz", x=(centre + scale * houses).astype(np.float32), y=price.astype(np.float32))
    sick = draw.integers(0, 2, 350)
    cells = draw.normal(size=(350, 30)) + 0.5 * sick[:, None]
    flipped = np.where(draw.random(70) < 0.12, 1 - sick[:70], sick[:70])  # a tenth of the labels is wrong
    np.savez(folder / "tumour.npz", x=cells[:70], y=flipped, u=cells[70:], v=sick[70:])


if __name__ == "__main__":
    main()
