"""A training that goes on from a checkpoint goes on with its run, in the trainers of all three libraries."""

import json

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

import gradwatch
from gradwatch.callbacks import accelerate, lightning, transformers
from gradwatch.callbacks.recording import Recording

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*number of training batches"),
]
STEPS, HALF, SAMPLES = 20, 10, 8


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    nn.init.constant_(model[0].bias[:4], -100.0)  # four units that never fire
    return model


def data():
    torch.manual_seed(1)
    return torch.randn(STEPS * SAMPLES, 6), torch.randint(0, 3, (STEPS * SAMPLES,))


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = network()

    def training_step(self, batch, index):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit_lightning(folder, name, *, steps, resume=False):
    watch = lightning.Watch(run=folder / name)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = LightningTrainer(
        accelerator="cpu", max_epochs=steps // HALF, callbacks=[watch], enable_checkpointing=False, **quiet
    )
    # the checkpoint ends an epoch: Lightning does not skip batches in the middle of one
    loader = DataLoader(TensorDataset(*(part[: HALF * SAMPLES] for part in data())), SAMPLES)
    trainer.fit(Classifier(), loader, ckpt_path=folder / "half.ckpt" if resume else None, weights_only=True)
    trainer.save_checkpoint(folder / "half.ckpt")


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, labels):
        return {"loss": F.cross_entropy(self.net(x), labels)}


def fit_transformers(folder, name, *, steps, resume=False):
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=steps,
        save_steps=HALF,
        per_device_train_batch_size=SAMPLES,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{"x": x, "labels": y} for x, y in zip(*data(), strict=True)]
    watch = transformers.Watch(run=str(folder / name))
    trainer = Trainer(model=Regressor(), args=args, train_dataset=rows, callbacks=[watch])
    trainer.train(resume_from_checkpoint=str(folder / "out" / f"checkpoint-{HALF}") if resume else None)


def fit_accelerate(folder, name, *, steps, resume=False):
    accelerator, model = Accelerator(cpu=True), network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    watch = accelerate.Watch(run=folder / name)
    accelerator.register_for_checkpointing(watch)
    if resume:
        accelerator.load_state(folder / "state")
    x, y = (part.split(SAMPLES) for part in data())
    with watch.start(model, optimizer) as monitor:
        for step in range(monitor.next_step, steps):
            loss = F.cross_entropy(model(x[step]), y[step])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            monitor.step(loss)
        accelerator.save_state(folder / "state")


@pytest.mark.parametrize("fit", [fit_lightning, fit_transformers, fit_accelerate])
def test_a_resumed_training_has_the_history_of_an_uninterrupted_one(fit, tmp_path):
    fit(tmp_path, "whole", steps=STEPS)
    fit(tmp_path, "parts", steps=HALF)
    fit(tmp_path, "parts", steps=STEPS, resume=True)

    whole, parts = (gradwatch.load_run(tmp_path / name) for name in ("whole", "parts"))
    assert parts.steps("loss").tolist() == list(range(STEPS))
    assert not (tmp_path / "parts-2").exists()
    for statistic in ("loss", "grad.l2"):
        np.testing.assert_array_equal(parts[statistic], whole[statistic])
    assert parts["act.silent_since"][-1] == whole["act.silent_since"][-1] == 0, "units stay silent over the resume"


def made():
    model = network()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(recording, steps):
    model, optimizer = made()
    with recording.start(model, optimizer) as monitor:
        for _ in range(steps):
            loss = model(torch.randn(4, 6)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.step(loss)
    return monitor


def test_a_state_is_json_and_leads_back_to_the_directory_in_use(tmp_path):
    train(Recording({"run": tmp_path / "mine"}), 3)
    second = Recording({"run": tmp_path / "mine"})
    train(second, 3)  # in mine-2

    third = Recording({"run": tmp_path / "mine"})
    third.load(json.loads(json.dumps(second.state())))
    monitor = train(third, 2)

    assert monitor.run_dir == tmp_path / "mine-2"
    assert monitor.history.steps("loss").tolist() == [0, 1, 2, 3, 4]


def test_another_run_of_the_options_begins_at_the_step_of_the_state(tmp_path):
    first = Recording({"run": tmp_path / "mine"})
    train(first, 3)

    other = Recording({"run": tmp_path / "other"})
    other.load(first.state())

    assert train(other, 2).history.steps("loss").tolist() == [3, 4]
    assert gradwatch.load_run(tmp_path / "mine").steps("loss").tolist() == [0, 1, 2]


def test_a_state_serves_one_start_and_an_empty_state_none(tmp_path):
    recording = Recording({})
    assert recording.state() == {}
    train(recording, 3)
    recording.load(recording.state())

    assert train(recording, 1).history.steps("loss").tolist() == [3]
    assert train(recording, 1).history.steps("loss").tolist() == [0]
