"""A recurrence in double precision, trained by LBFGS with a closure."""

import numpy as np
import torch
from torch import nn, optim


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.linear = nn.LSTMCell(1, 8), nn.Linear(8, 1)

    def forward(self, input):
        h_t, c_t = (torch.zeros(input.size(0), 8, dtype=torch.double) for _ in range(2))
        outputs = []
        for input_t in input.split(1, dim=1):
            h_t, c_t = self.lstm1(input_t, (h_t, c_t))
            outputs.append(self.linear(h_t))
        return torch.cat(outputs, dim=1)


def main(watch):
    np.random.seed(0)
    torch.manual_seed(0)
    shifts = np.random.randint(-40, 40, 8).reshape(8, 1)
    data = torch.from_numpy(np.sin((np.arange(16) + shifts) / 4.0))
    input, target = data[2:, :-1], data[2:, 1:]
    seq = Sequence().double()
    criterion = nn.MSELoss()
    optimizer = optim.LBFGS(seq.parameters(), lr=0.8, max_iter=6)
    losses = []
    with watch(seq, optimizer) as monitor:
        for _ in range(8):

            def closure():
                optimizer.zero_grad()
                loss = criterion(seq(input), target)
                losses.append(loss.item())
                loss.backward()
                return loss

            loss = optimizer.step(closure)
            monitor.step(loss, batch=input)
            with torch.no_grad():
                losses.append(criterion(seq(data[:2, :-1]), data[:2, 1:]).item())
    return losses
