"""The trainer's own losses and norms are in the history, whatever it accumulates and clips."""

from pydoc_data.topics import topics

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gradwatch
from gradwatch.callbacks.transformers import Watch

STEPS, CONTEXT = 12, 32


class Text(Dataset):
    """Windows of real text, a token per byte."""

    def __init__(self, windows):
        text = "".join(topics.values()).encode("ascii", "replace")[: windows * CONTEXT]
        self.windows = torch.tensor(list(text)).split(CONTEXT)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


class Shared(GPT2LMHeadModel):
    """Returns a mean of its own for each micro-batch, as models do that know nothing of the others."""

    accepts_loss_kwargs = False


class OwnLoss(Trainer):
    """Computes its loss outside of the model from two passes, as preference losses do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        ids = inputs["input_ids"]
        with torch.no_grad():
            reference = model(input_ids=ids).logits
        outputs = model(input_ids=ids)
        margin = model(input_ids=ids.flip(1)).logits.logsumexp(-1).mean()
        loss = (outputs.logits - reference - 1.0).square().mean() + 0.1 * margin.square()
        return (loss, outputs) if return_outputs else loss


def train(folder, *, kind=GPT2LMHeadModel, lr=1e-3, trainer=Trainer, loss_func=None, **options):
    torch.manual_seed(0)
    size = {"n_positions": CONTEXT, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = kind(GPT2Config(vocab_size=128, bos_token_id=1, eos_token_id=1, **size))
    watch = Watch(run=folder / "run")
    args = TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=lr,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    data = {"train_dataset": Text(400), "eval_dataset": Text(8)}
    trained = trainer(model=model, args=args, callbacks=[watch], compute_loss_func=loss_func, **data)
    trained.train()
    return gradwatch.load_run(folder / "run"), watch, trained


@pytest.mark.parametrize(
    ("kind", "accumulate", "clip"),
    [(GPT2LMHeadModel, 1, 0.1), (GPT2LMHeadModel, 3, 0.0), (Shared, 1, 0.0), (Shared, 3, 0.1)],
)
def test_losses_and_norms_are_those_of_the_trainer(tmp_path, kind, accumulate, clip):
    run, watch, trainer = train(
        tmp_path,
        kind=kind,
        gradient_accumulation_steps=accumulate,
        max_grad_norm=clip,
        eval_strategy="steps",
        eval_steps=5,
    )

    logs = [log for log in trainer.state.log_history if "loss" in log]
    np.testing.assert_allclose(run["loss"], [log["loss"] for log in logs], rtol=1e-4)
    norms = [log["grad_norm"] for log in logs]
    np.testing.assert_allclose(run["grad_norm.before_clip"], norms, rtol=1e-4)
    np.testing.assert_allclose(run["grad_norm.after_clip"], np.minimum(norms, clip or np.inf), rtol=1e-3)
    assert [*np.flatnonzero(np.isfinite(run["val_loss"]))] == [5, 10]
    assert run.info.total_steps == STEPS
    assert not watch.monitor.findings()


def smooth(outputs, labels, num_items_in_batch=None):
    return outputs.logits.square().mean()


@pytest.mark.parametrize(
    ("own", "accumulate"), [({"trainer": OwnLoss}, 1), ({"trainer": OwnLoss}, 3), ({"loss_func": smooth}, 3)]
)
def test_a_loss_that_the_model_never_saw_is_the_trainer_s(tmp_path, own, accumulate):
    run, _, trainer = train(tmp_path, gradient_accumulation_steps=accumulate, max_grad_norm=0.1, **own)

    logs = [log for log in trainer.state.log_history if "loss" in log]
    np.testing.assert_allclose(run["loss"], [log["loss"] for log in logs], rtol=1e-4)
    np.testing.assert_allclose(run["grad_norm.before_clip"], [log["grad_norm"] for log in logs], rtol=1e-4)
    assert np.unique(run["batch_hash"]).size == STEPS, "the batch of each step is that of its first pass"


def test_a_trainer_within_the_training_of_another_keeps_its_losses_to_itself(tmp_path):
    class Nested(Trainer):
        def compute_loss(self, *args, **kwargs):
            if self.state.global_step == 5:
                train(tmp_path / "inner", lr=1e-5)
            return super().compute_loss(*args, **kwargs)

    run, _, trainer = train(tmp_path, trainer=Nested)

    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    np.testing.assert_allclose(run["loss"], losses, rtol=1e-4)
    assert len(gradwatch.load_run(tmp_path / "inner" / "run")["loss"]) == STEPS


def test_the_wrapper_of_backward_is_gone_after_the_training(tmp_path):
    before = Accelerator.backward

    train(tmp_path)

    assert Accelerator.backward is before


def test_a_training_that_is_ill_is_found_out(tmp_path):
    _, watch, _ = train(tmp_path, lr=1.0)

    assert "learning-rate-too-high" in {finding.kind for finding in watch.monitor.findings()}


def test_a_training_after_one_that_raised_is_watched_once(tmp_path):
    _, _, trainer = train(tmp_path)
    watch, hooks = Watch(), []

    for _ in range(2):  # nothing tells the callback that the first one raised
        watch.on_train_begin(
            trainer.args, trainer.state, trainer.control, model=trainer.model, optimizer=trainer.optimizer
        )
        hooks.append(
            len(
                [
                    hook
                    for hook in trainer.model._forward_hooks.values()
                    if getattr(hook, "_callback", None) == watch._after_forward
                ]
            )
        )

    assert hooks == [1, 1]
