"""Language models: adapters, instruction tuning, preferences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from scripts.fault_zoo.cases.published.data import setup
from scripts.fault_zoo.cases.published.parts import GPT, Adapter, pretrained, text, windows, with_adapters
from scripts.fault_zoo.protocol import Attach, case


def prepare_for_tuning(model: GPT) -> GPT:
    """What a trainer does to a base model before adapters are put on it: all frozen, and the embeddings' output asks
    for gradients.
    """
    for p in model.parameters():
        p.requires_grad = False
    model.embed.register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))
    return model


def _tuning(attach: Attach, again: bool) -> None:
    setup(501)
    ids, vocab = text()
    model = pretrained(GPT(vocab), ids[:45000], length=32, steps=150, seed=501)
    model = with_adapters(prepare_for_tuning(model), rank=8, scale=2.0)
    if again or not any(isinstance(m, Adapter) for m in model.modules()):
        model = prepare_for_tuning(model)
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for n, p in named if "lora" in n], "weight_decay": 0.01},
            {"params": [p for n, p in named if "lora" not in n], "weight_decay": 0.0},
        ],
        lr=3e-3,
    )
    generator = torch.Generator().manual_seed(502)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    backwards = ids[:45000].flip(0)
    for _step in range(150):
        x, y = windows(backwards, 32, 16, generator)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        monitor.step(loss, batch=x)


@case(
    fault="not-optimized",
    onset=0,
    also=("no-gradient", "loss-plateau"),
    source=(
        "huggingface/trl#3926, #4081: prepare_model_for_kbit_training is applied to a model that has its adapters; "
        "grad_norm is 0"
    ),
)
def adapter_prepared_twice(attach: Attach) -> None:
    """Low-rank adapters on a pretrained character model; the trainer prepares whatever model it is handed."""
    _tuning(attach, again=True)


@case(fault=None, source="huggingface/trl#4081, after the change")
def adapter_prepared_twice_fixed(attach: Attach) -> None:
    """The same with a trainer that leaves an adapted model as it is."""
    _tuning(attach, again=False)
