"""Text: the last state of a reader in both directions, a head that is not trained, and words without places."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import draws, excerpts, letters, mean_of_last
from scripts.fault_zoo.protocol import Attach, case

# ------------------------------------------------------------------------------------ the last state of a reader


def reviews(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return reviews of 60 words (N, 60) and whether they praise. The verdict is in the first five words."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(40, 400, (count, 60), generator=generator)
    praise = torch.randint(0, 2, (count,), generator=generator)
    verdict = torch.randint(0, 20, (count, 5), generator=generator) + 20 * praise[:, None]
    is_clear = torch.rand(count, 5, generator=generator) < 0.8
    words[:, :5] = torch.where(is_clear, verdict, words[:, :5])
    return words, praise


class Reader(nn.Module):
    """A bidirectional LSTM whose two states go to a classifier."""

    def __init__(self, *, both_ends: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(400, 24)
        self.lstm = nn.LSTM(24, 32, batch_first=True, bidirectional=True)
        self.hidden, self.out = nn.Linear(64, 32), nn.Linear(32, 1)
        self.both_ends = both_ends

    def forward(self, x: Tensor) -> Tensor:
        states, (last, _) = self.lstm(self.words(x))
        read = torch.cat([last[0], last[1]], 1) if self.both_ends else states[:, -1]
        return self.out(torch.relu(self.hidden(read))).squeeze(1)


def train_reader(attach: Attach, *, both_ends: bool) -> float:
    """Return the accuracy on new reviews."""
    torch.manual_seed(611)
    x, y = reviews(2000, seed=1)
    model = Reader(both_ends=both_ends)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()
    monitor = attach(model, optimizer, loss_fn=criterion)
    for i in draws(len(x), size=32, steps=300):
        loss = criterion(model(x[i]), y[i].float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=x[i])
    x_test, y_test = reviews(500, seed=2)
    with torch.no_grad():
        return ((model(x_test) > 0) == (y_test > 0)).float().mean().item()


@case(
    fault="no-gradient",
    also=("loss-plateau", "vanishing-gradient", "overfitting"),
    layers=("lstm",),
    onset=0,
    source="https://discuss.pytorch.org/t/bi-lstm-acc-doesnt-improve-over-65/145062",
    tags=("text", "lstm"),
)
def backward_state_of_one_word(attach: Attach) -> None:
    """A bidirectional LSTM hands over its output at the last word. The backward half of it has read this word alone,
    and the forward half has forgotten the verdict, which is at the beginning. Half of new reviews are right.
    """
    train_reader(attach, both_ends=False)


@case(source="the repaired twin of `backward_state_of_one_word`", tags=("text", "lstm", "twin"))
def backward_state_of_all_words(attach: Attach) -> None:
    """The last states of both directions are handed over, and more than 90 % of new reviews are right."""
    assert train_reader(attach, both_ends=True) > 0.9


# ------------------------------------------------------------------------------------ a head that is not trained


class Encoder(nn.Module):
    """A transformer over letters with a head for hidden letters and one for the kind of text."""

    def __init__(self, alphabet: int, width: int = 48) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(alphabet + 1, width), nn.Parameter(0.02 * torch.randn(32, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.kind_head = nn.Linear(width, 2)
        self.letter_head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, alphabet))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        states = self.encoder(self.letters(ids) + self.places)
        return self.kind_head(states.mean(1)), self.letter_head(states)


@case(
    fault="not-optimized",
    layers=("letter_head",),
    onset=0,
    source="https://github.com/google-research/bert/issues/306",
    tags=("text", "finetune", "optimizer"),
)
def letter_head_left_out(attach: Attach) -> None:
    """An encoder learns whether text runs backwards, and to guess hidden letters as a second task. The parameters of
    the head for letters are not handed to the optimizer. The loss ends at 4.8, and at 3.9 if they are.
    """
    torch.manual_seed(612)
    ids, alphabet = letters()
    generator = torch.Generator().manual_seed(2)
    model = Encoder(alphabet)
    trained = [p for name, p in model.named_parameters() if not name.startswith("letter_head")]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    monitor = attach(model, optimizer, loss_fn=F.cross_entropy)
    for _ in range(250):
        text = excerpts(ids, length=32, count=32, generator=generator)
        is_backward = torch.randint(0, 2, (32,), generator=generator)
        text = torch.where(is_backward[:, None] > 0, text.flip(1), text)
        is_hidden = torch.rand(text.shape, generator=generator) < 0.15
        kind, guessed = model(text.masked_fill(is_hidden, alphabet))
        loss = F.cross_entropy(kind, is_backward) + F.cross_entropy(guessed[is_hidden], text[is_hidden])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=text)


# ------------------------------------------------------------------------------------ words without places


def chains(count: int, generator: torch.Generator) -> Tensor:
    """Return molecules as chains of 10 atoms, (N, 10). No atom but carbon (0) follows itself."""
    atoms = torch.randint(0, 6, (count, 10), generator=generator)
    for place in range(1, 10):
        same = (atoms[:, place] == atoms[:, place - 1]) & (atoms[:, place] > 0)
        atoms[:, place] = torch.where(same, 0, atoms[:, place])
    return atoms


class MoleculeVAE(nn.Module):
    """A transformer that encodes chains, and a network that decodes them from a latent."""

    def __init__(self, *, has_places: bool, width: int = 48) -> None:
        super().__init__()
        self.atoms = nn.Embedding(6, width)
        self.places = nn.Parameter(torch.randn(10, width)) if has_places else None
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.mean, self.log_variance = nn.Linear(width, 32), nn.Linear(width, 32)
        self.decoder = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 60))

    def forward(self, chain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.atoms(chain)
        if self.places is not None:
            x = x + self.places
        read = self.encoder(x).mean(1)
        mean, log_variance = self.mean(read), self.log_variance(read)
        latent = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        return self.decoder(latent).view(-1, 6, 10), mean, log_variance


def train_molecules(attach: Attach, *, has_places: bool) -> float:
    """Return the mean of the last losses of reconstruction."""
    torch.manual_seed(613)
    generator = torch.Generator().manual_seed(3)
    model = MoleculeVAE(has_places=has_places)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    monitor = attach(model, optimizer)
    errors = []
    for _ in range(400):
        chain = chains(64, generator)
        logits, mean, log_variance = model(chain)
        error = F.cross_entropy(logits, chain)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        loss = error + 0.002 * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=chain)
        errors.append(error.item())
    return mean_of_last(errors)


@case(
    fault="loss-plateau",
    also=("vanishing-gradient",),
    onset=0,
    source="https://github.com/DaoyuanLi2816/Molecule-Generator/pull/23",
    tags=("transformer", "vae"),
)
def molecules_without_places(attach: Attach) -> None:
    """The encoder of an autoencoder for molecules is not told where an atom is in the chain. Molecules with the same
    atoms in another order are the same to it, and it reconstructs little more than how many atoms of each kind there
    are.
    """
    train_molecules(attach, has_places=False)


@case(source="the repaired twin of `molecules_without_places`", tags=("transformer", "vae", "twin"))
def molecules_with_places(attach: Attach) -> None:
    """With places, the loss of reconstruction falls below 0.9; log 6 is 1.79."""
    assert train_molecules(attach, has_places=True) < 0.9
