"""Text in runs that look odd: stairs, a norm that grows, and words that never change."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import draws, excerpts, letters, mean_of_last
from scripts.fault_zoo.cases.threads.text import WordModel, sentences, utterances
from scripts.fault_zoo.cases.threads.upkeep import LetterModel
from scripts.fault_zoo.protocol import Attach, case


@case(source="https://github.com/hiyouga/LlamaFactory/issues/7485", tags=("transformer", "finetune", "odd"))
def stairs_from_epoch_to_epoch(attach: Attach) -> None:
    """A language model is tuned on 640 lines for six epochs. The loss falls in stairs, one at the start of each epoch.
    The answer was that this is normal: the model remembers lines that it has seen before.
    """
    torch.manual_seed(321)
    ids, words = sentences()
    ids = ids[torch.randperm(len(ids))]
    model = WordModel(words, width=96)
    first = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def loss_of(line: Tensor) -> Tensor:
        return F.cross_entropy(model(line[:, :-1]).flatten(0, 1), line[:, 1:].flatten(), ignore_index=0)

    for i in draws(len(ids) - 640, size=32, steps=150, seed=1):
        loss = loss_of(ids[640:][i])
        first.zero_grad()
        loss.backward()
        first.step()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    losses = []
    for i in draws(640, size=16, steps=240):
        loss = loss_of(ids[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=ids[i])
        losses.append(loss.item())
    epochs = [sum(losses[k : k + 40]) / 40 for k in range(0, 240, 40)]
    assert all(b < a - 0.1 for a, b in itertools.pairwise(epochs)), epochs


@case(source="https://github.com/allenai/OLMo/issues/596", tags=("transformer", "norm", "odd"))
def norm_that_grows_while_the_loss_falls(attach: Attach) -> None:
    """A language model learns, and the norm of its gradient is larger at the end than after a third of the steps. The
    answer was that this is seen at a rate that does not decay, and is no sign of a bad training.
    """
    torch.manual_seed(322)
    ids, alphabet = letters()
    generator = torch.Generator().manual_seed(3)
    model = LetterModel(alphabet, layers=2, norm_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    monitor = attach(model, optimizer)
    losses, norms = [], []
    for _ in range(400):
        text = excerpts(ids, length=33, count=24, generator=generator)
        loss = model.loss(text)
        optimizer.zero_grad()
        loss.backward()
        norms.append(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None) ** 0.5)
        optimizer.step()
        monitor.step(loss, batch=text)
        losses.append(loss.item())
    assert mean_of_last(losses) < 2.3, mean_of_last(losses)
    assert mean_of_last(norms, 50) > mean_of_last(norms[:150], 50), (norms[100:150:10], norms[-50::10])


@case(source="https://github.com/chainer/chainer/issues/3331", tags=("embedding", "vocabulary", "odd"))
def words_that_are_never_used(attach: Attach) -> None:
    """Word vectors of a vocabulary of 20,000 words, of which the lines use a sixth, are tuned by the task. The weights
    that are looked at never change. The answer was that this is no bug: only the words that are used are updated.
    """
    torch.manual_seed(323)
    ids, _ = utterances()
    question = (ids == ids.flatten().bincount()[1:].argsort(descending=True)[20] + 1).any(1).long()
    spread = torch.randperm(19_999)[: int(ids.max()) + 1] + 1
    spread[0] = 0
    ids = spread[ids]
    embedding = nn.Embedding.from_pretrained(0.1 * torch.randn(20_000, 32), freeze=False, padding_idx=0)
    lstm, head = nn.LSTM(32, 32, batch_first=True), nn.Linear(32, 2)
    model = nn.ModuleDict({"embedding": embedding, "lstm": lstm, "head": head})
    before = embedding.weight.detach().clone()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    cut = len(ids) * 4 // 5
    for i in draws(cut, size=32, steps=250):
        loss = criterion(head(lstm(embedding(ids[i]))[0].amax(1)), question[i])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=ids[i])
    with torch.no_grad():
        found = head(lstm(embedding(ids[cut:]))[0].amax(1)).argmax(1)
    moved = (embedding.weight != before).any(1).float().mean().item()
    right = (found == question[cut:]).float().mean().item()
    chance = 1 - question[cut:].float().mean().item()
    assert moved < 0.2, moved
    assert right > chance + 0.5 * (1 - chance), (right, chance)
