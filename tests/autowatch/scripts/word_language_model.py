"""A recurrent language model whose weights the loop moves by hand."""

import torch
from torch import nn

ntoken, bptt, clip = 20, 12, 0.25


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(ntoken, 16)
        self.rnn = nn.LSTM(16, 16)
        self.decoder = nn.Linear(16, ntoken)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return self.decoder(output).view(-1, ntoken), hidden


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def main(watch):
    torch.manual_seed(1111)
    corpus = torch.arange(3000).mul(3).add(torch.randint(2, (3000,))).remainder(ntoken).view(8, -1).t().contiguous()
    model, criterion, lr = RNNModel(), nn.CrossEntropyLoss(), 20
    losses = []
    with watch(model, []) as monitor:
        model.train()
        hidden = (torch.zeros(1, 8, 16), torch.zeros(1, 8, 16))
        for i in range(0, corpus.size(0) - 1 - bptt, bptt // 2):
            data, targets = corpus[i : i + bptt], corpus[i + 1 : i + 1 + bptt].reshape(-1)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for p in model.parameters():
                p.data.add_(p.grad, alpha=-lr)
            monitor.step(loss, batch=data)
            losses.append(loss.item())
    return losses
