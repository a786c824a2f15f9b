"""Lightning's own numbers are in the history, whatever it accumulates, clips or optimizes by hand."""

import subprocess

import numpy as np
import pytest
import torch
import warm_python
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import gradwatch
from gradwatch.callbacks.lightning import Watch
from gradwatch.history.disk import writer

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*number of training batches"),
]
STEPS, SAMPLES = 12, 16


class Classifier(LightningModule):
    def __init__(self, *, is_ill=False, by_hand=False):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
        self.automatic_optimization, self.is_ill = not by_hand, is_ill

    def training_step(self, batch, index):
        x, y = batch
        scores = self.net(x)
        loss = F.cross_entropy(scores.softmax(1) if self.is_ill else scores, y)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch, index):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self.net(x), y))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Witness(Callback):
    """Notes what Lightning itself says of each batch and update."""

    def __init__(self):
        self.losses, self.norms = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.norms.append(float(nn.utils.get_total_norm([p.grad for p in pl_module.parameters()])))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(trainer.accumulate_grad_batches * outputs["loss"]) if outputs else float("nan"))


def fit(folder, module, **options):
    torch.manual_seed(0)
    x, y = torch.randn(STEPS * SAMPLES, 6), torch.randint(0, 3, (STEPS * SAMPLES,))
    watch, witness = Watch(run=folder / "run"), Witness()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[watch, witness],
        default_root_dir=folder,
        **options,
    )
    loader = DataLoader(TensorDataset(x, y), SAMPLES)
    trainer.fit(module, loader, DataLoader(TensorDataset(x, y), 2 * SAMPLES))
    return gradwatch.load_run(folder / "run"), watch, witness


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_losses_and_norms_are_those_of_lightning(tmp_path, accumulate, clip):
    run, watch, witness = fit(
        tmp_path, Classifier(), accumulate_grad_batches=accumulate, gradient_clip_val=clip, val_check_interval=6
    )

    losses = np.reshape(witness.losses, (-1, accumulate)).mean(axis=1)
    np.testing.assert_allclose(run["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(run["grad_norm.before_clip"], witness.norms, rtol=1e-5)
    np.testing.assert_allclose(run["grad_norm.after_clip"], [clip] * len(losses) if clip else witness.norms, rtol=1e-3)
    assert np.isfinite(run["val_loss"]).sum() == 1, "the one after the last step has no step to stand in"
    assert run.info.total_steps == STEPS // accumulate
    assert writer.status(tmp_path / "run") == "finished"
    assert not watch.monitor.findings()


def test_the_formula_of_the_loss_is_read(tmp_path):
    _, watch, _ = fit(tmp_path, Classifier(is_ill=True))

    assert [(f.kind, f.step) for f in watch.monitor.findings()] == [("probabilities-into-loss", 0)]


def test_a_module_may_optimize_by_hand(tmp_path):
    run, _, witness = fit(tmp_path, Classifier(by_hand=True))

    assert np.isfinite(run["loss"]).all()
    np.testing.assert_allclose(run["grad_norm.before_clip"], witness.norms, rtol=1e-5)


def test_a_fit_that_raises_ends_as_failed(tmp_path):
    module = Classifier()
    module.on_train_batch_end = lambda outputs, batch, index: 1 / (index - 5)

    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, module)

    assert writer.status(tmp_path / "run") == "failed"


OLDER_NAME = """
import sys
sys.modules["lightning"] = None  # as if it were not installed
import pytorch_lightning as pl
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from gradwatch.callbacks.lightning import Watch

class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(6, 3)

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]).softmax(1), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

watch = Watch()
data = TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
pl.Trainer(max_epochs=3, callbacks=[watch], **quiet).fit(Classifier(), DataLoader(data, 16))
assert len(watch.monitor.history["loss"]) == 12
assert [f.kind for f in watch.monitor.findings()] == ["probabilities-into-loss"], watch.monitor.findings()
"""


def test_it_works_in_trainers_of_the_older_name():
    done = subprocess.run([*warm_python.command(), "-c", OLDER_NAME], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
