"""Digits in a row, read by a network that says nothing at first."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.fault_zoo.cases.mailing.material import digits
from scripts.fault_zoo.protocol import Attach, case


class CaptchaReader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.columns = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d((2, 1)), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU()
        )
        self.gru = nn.GRU(96, 48, bidirectional=True)
        self.head = nn.Linear(96, 11)

    def forward(self, x: Tensor) -> Tensor:
        columns = F.max_pool2d(self.columns(x), (1, 2)).flatten(1, 2).permute(2, 0, 1)
        return self.head(self.gru(columns)[0]).log_softmax(2)


@case(source="https://github.com/cyprienruffino/CTCModel/issues/12", tags=("ctc", "plateau", "odd"))
def reader_that_says_nothing_at_first(attach: Attach) -> None:
    """A network reads rows of 3 to 5 digits with the CTC loss. For many steps the loss hardly falls and all answers are
    blank. The answer was that this is a property of the loss: it plateaus at the start, and falls later.
    """
    torch.manual_seed(291)
    x, y, x_test, y_test = digits()
    model = CaptchaReader()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = nn.CTCLoss(blank=10)
    monitor = attach(model, optimizer)

    def rows(pictures: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        picked = torch.randint(0, len(pictures), (count, 5))
        length = torch.randint(3, 6, (count,))
        shown = pictures[picked] * (torch.arange(5) < length[:, None])[:, :, None, None, None]
        return shown.permute(0, 2, 3, 1, 4).flatten(3), labels[picked], length

    def read(picture: Tensor) -> list[list[int]]:
        with torch.no_grad():
            best = model(picture).argmax(2).T
        return [[int(k) for k in torch.unique_consecutive(row) if k < 10] for row in best]

    silent = 0
    for step in range(400):
        picture, label, length = rows(x, y, 32)
        log_probs = model(picture)
        loss = criterion(log_probs, label, torch.full((32,), len(log_probs)), length)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.step(loss, batch=picture)
        if not any(read(picture)):
            silent = step
    picture, label, length = rows(x_test, y_test, 200)
    right = [answer == wanted[:n].tolist() for answer, wanted, n in zip(read(picture), label, length, strict=True)]
    assert silent > 20, silent
    assert sum(right) > 100, sum(right)
