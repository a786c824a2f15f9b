"""A graph network that trains on its whole graph at every step, and whose evaluation has no no_grad."""

import torch
from torch import nn
from torch.nn import functional as F


class GraphConv(nn.Module):
    def __init__(self, input_dim, output_dim):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(input_dim, output_dim))
        nn.init.xavier_normal_(self.kernel)

    def forward(self, features, adj):
        return torch.sparse.mm(adj, features @ self.kernel)


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.gc1, self.gc2, self.dropout = GraphConv(12, 16), GraphConv(16, 3), nn.Dropout(0.3)

    def forward(self, inputs):
        x, adj = inputs
        x = self.dropout(F.relu(self.gc1(x, adj)))
        return F.log_softmax(self.gc2(x, adj), dim=1)


def main(watch):
    torch.manual_seed(13)
    labels = torch.arange(60) % 3
    features = F.one_hot(labels, 12).float() + torch.rand(60, 12)
    edges = ((labels[:, None] == labels) & (torch.rand(60, 60) < 0.2)).float() + torch.eye(60)
    adj = (edges / edges.sum(1, keepdim=True)).to_sparse()
    gcn, criterion = GCN(), nn.NLLLoss()
    optimizer = torch.optim.Adam(gcn.parameters(), lr=1e-2, weight_decay=5e-4)
    losses = []
    with watch(gcn, optimizer) as monitor:
        for _ in range(30):
            gcn.train()
            optimizer.zero_grad()
            loss = criterion(gcn((features, adj))[:40], labels[:40])
            loss.backward()
            optimizer.step()
            monitor.step(loss, batch=(features, adj))
            gcn.eval()
            losses += [loss.item(), (gcn((features, adj))[40:].argmax(1) == labels[40:]).float().mean().item()]
    return losses
