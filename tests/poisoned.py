"""A small training whose data hold one sample that makes the loss infinite, for the tests of what is done about it."""

import numpy as np

from gradwatch.config.load import load_config

CONFIG = """
run: {{name: poisoned, seed: 3, out: {out}}}
model: {{name: cnn, channels: [4, 8], dropout: 0.2}}
data:
  name: npz
  file: {file}
  kind: values
  val_inputs: vx
  val_targets: vy
  batch_size: 16
  shuffle: false
  augment: [{{RandomRotation: {{degrees: 9}}}}]
optim: {{name: adamw, lr: 2.0e-3}}
schedule: {{name: OneCycleLR, max_lr: 4.0e-3}}
train: {{steps: 40, eval_every: 10, clip: {{norm: 1.0}}, checkpoint: {{every: 10, best: false}}}}
watch: {{updates_every: 3, activations_every: 4, record: {{every: 8}}}}
sinks: {{tensorboard: {{enabled: false}}}}
"""
SAMPLES, BATCH = 480, 16
STEP = 21
"""The first step whose batch holds the sick sample."""


def poisoned(folder, *overrides, step=STEP, value=3e38):
    """Return the config of the training, its data written beside it; without a sick sample where `step` is None."""
    random = np.random.default_rng(0)
    x = random.normal(size=(SAMPLES, 1, 8, 8)).astype(np.float32)
    y = x[:, 0, 2:6, 2:6].mean(axis=(1, 2))[:, None]
    if step is not None:
        y[step * BATCH + 5] = value  # its squared error is beyond float32
    np.savez(folder / "data.npz", x=x, y=y, vx=x[:64], vy=y[:64])
    path = folder / "poisoned.yaml"
    path.write_text(CONFIG.format(out=folder / "runs", file=folder / "data.npz"))
    return load_config(path, list(overrides))
