"""What the training loop costs against the same loop written by hand: alone, and with everything on at its defaults.

    python scripts/benchmarks/loop.py [--rounds 40] [--only tiny,quickstart] [--threads 1]

The loop alone has no watching, no terminal and no TensorBoard, and still writes losses to disk. Everything on means all
statistics, detectors, history, terminal and TensorBoard. Each round runs a stretch of steps of every arm, in an order
that changes from round to round, so that what else the machine does hits all arms alike. Shown is the median over
rounds of the ratio to the hand-written loop in the same round, with the quartiles.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from harness import Seconds, interleaved, parse, parser, ratio, warm_up
from torch import nn

from gradwatch import build
from gradwatch.config.load import load_config
from gradwatch.config.sections.root import Config
from gradwatch.train.loop import run
from gradwatch.train.session import Session

WARM_UP_S = 3.0
"""Until allocators are warm, and TensorBoard has had what it takes ahead of its share for the sake of short runs."""


@dataclass(frozen=True)
class Workload:
    """A config, as overrides of nothing, and how many steps one stretch of it takes."""

    title: str
    config: str
    stretch: int


CONFIGS = {
    "tiny": Workload(
        "784-128-10, batch 32",
        """
        model: {name: mlp, depth: 2, width: 128}
        data: {name: synthetic, samples: 20000, dims: 784, outputs: 10, batch_size: 32}
        """,
        400,
    ),
    "quickstart": Workload(
        "quickstart: CNN on digits, batch 64",
        """
        model: {name: cnn}
        data: {name: digits, batch_size: 64, drop_last: true}
        """,
        60,
    ),
    "resnet18": Workload(
        "ResNet-18, 32 x 32, batch 64",
        """
        model: {name: resnet18}
        data: {name: npz, file: images.npz, kind: classes, standardize: false, batch_size: 64}
        """,
        3,
    ),
    "gpt": Workload(
        "GPT 6 x 256, sequence 128, batch 8",
        """
        model: {name: gpt, layers: 6, heads: 8, width: 256}
        data: {name: text, context: 128, batch_size: 8, drop_last: true}
        """,
        3,
    ),
}
COMMON = """
run: {{name: bench, seed: 0, out: {out}}}
optim: {{name: adamw, lr: 1.0e-4}}
train: {{steps: 1000000000, eval_every: 1000000000, checkpoint: {{every: 1000000000}}}}
watch: {{enabled: {watched}}}
sinks: {{terminal: {{enabled: {watched}}}, tensorboard: {{enabled: {watched}}}}}
"""


class AfterSteps:
    """Asks the loop to end after so many steps, as Ctrl-C would."""

    def __init__(self, session: Session, steps: int) -> None:
        self.session = session
        self.last = session.progress.step + steps

    @property
    def requested(self) -> bool:
        return self.session.progress.step >= self.last


def config_of(workload: Workload, *, watched: bool, out: Path) -> Config:
    """Return the config of a workload: with everything on at its defaults, or the loop alone."""
    images = out / "images.npz"
    if not images.exists():
        random = np.random.default_rng(0)
        pictures = random.standard_normal((1024, 3, 32, 32), dtype=np.float32)
        np.savez(images, x=pictures, y=random.integers(0, 10, len(pictures)))
    path = out / f"{watched}.yaml"
    lines = "\n".join(line.strip() for line in workload.config.strip().splitlines())
    lines = lines.replace("images.npz", str(images))
    path.write_text(lines + COMMON.format(out=out, watched=str(watched).lower()))
    return load_config(path)


@contextlib.contextmanager
def harness(workload: Workload, *, watched: bool, out: Path) -> Iterator[Callable[[], None]]:
    """Yield a function that trains one stretch of steps with gradwatch's loop."""
    config = config_of(workload, watched=watched, out=out)
    directory = out / f"run-{watched}"
    directory.mkdir()
    with contextlib.ExitStack() as stack:
        torch.manual_seed(0)
        session = Session(config, directory, resume=False, log_format="plain", stack=stack)
        yield lambda: stretch_of(session, workload.stretch)


def stretch_of(session: Session, steps: int) -> None:
    """Make so many steps of a session."""
    run(session, AfterSteps(session, steps))


def by_hand(workload: Workload, *, out: Path) -> Callable[[], None]:
    """Return a function that trains one stretch of steps as one writes it in bare PyTorch."""
    config = config_of(workload, watched=False, out=out)
    torch.manual_seed(0)
    splits = build.splits(config.data)
    model = build.model(config, splits.spec).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss_fn = nn.CrossEntropyLoss()
    xs, ys = zip(*(splits.train[i] for i in range(len(splits.train))), strict=True)  # type: ignore[arg-type]
    x, y = torch.stack([torch.as_tensor(v) for v in xs]), torch.stack([torch.as_tensor(v) for v in ys])
    batches = itertools.chain.from_iterable(
        torch.randperm(len(x)).split(config.data.batch_size)[:-1] for _ in itertools.count()
    )

    def stretch() -> None:
        for index in itertools.islice(batches, workload.stretch):
            logits = model(x[index])
            loss = loss_fn(logits.flatten(0, -2), y[index].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss.item()

    return stretch


def measure(workload: Workload, rounds: int) -> Seconds:
    """Return the seconds of each arm's stretches, round by round."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        out = Path(folder)
        arms = {
            "by hand": by_hand(workload, out=out),
            "alone": stack.enter_context(harness(workload, watched=False, out=out)),
            "all on": stack.enter_context(harness(workload, watched=True, out=out)),
        }
        warm_up(arms.values(), seconds=WARM_UP_S)
        return interleaved(arms, rounds=rounds)


def main() -> None:
    """Measure and print the table."""
    options = parse(parser(__doc__, CONFIGS, rounds=40))
    print("| step | by hand, ms | the loop alone | everything on |")
    print("|---|---|---|---|")
    for name in options.only:
        workload = CONFIGS[name]
        seconds = measure(workload, options.rounds)
        hand = seconds["by hand"]
        cells = [workload.title, f"{1e3 * statistics.median(hand) / workload.stretch:.2f}"]
        for arm in ("alone", "all on"):
            cells.append(ratio(seconds[arm], hand))
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
