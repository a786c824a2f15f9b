"""Build a small decoder-only transformer with normalization before each sublayer, as in GPT-2."""

# B = samples, T = positions, D = width, V = vocabulary, H = heads

from __future__ import annotations

import math
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradwatch.errors import GradwatchError
from gradwatch.models._layers import at_least_one, fraction
from gradwatch.records import DataSpec

INIT_STD = 0.02  # GPT-2's code, model.py, initializers of wte and conv1d
MLP_FACTOR = 4  # arXiv:1706.03762, section 3.3: 2048 = 4 x 512


@final
class Attention(nn.Module):
    """Causal self-attention.

    Args:
        width: Width of the vectors, D.
        heads: Number of heads, H, a divisor of the width.
        dropout: Fraction of attention weights set to zero in training.
    """

    def __init__(self, width: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.heads = heads
        self.dropout = dropout

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the attention output of each position over itself and earlier positions, shape (B, T, D)."""
        batch, positions, width = x_BTD.shape
        qkv = self.qkv(x_BTD).view(batch, positions, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D / H)
        dropout = self.dropout if self.training else 0.0  # the function does not know the module's mode
        y = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        gathered: Tensor = self.projection(y.transpose(1, 2).reshape(batch, positions, width))
        return gathered


@final
class Block(nn.Module):
    """Attention and a small network per position, each with a residual connection."""

    def __init__(self, width: int, *, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads=heads, dropout=dropout)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, MLP_FACTOR * width)
        self.act = nn.GELU()
        self.projection = nn.Linear(MLP_FACTOR * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the output, shape (B, T, D)."""
        x_BTD = x_BTD + self.dropout(self.attention(self.norm1(x_BTD)))
        y_BTD: Tensor = self.projection(self.act(self.expand(self.norm2(x_BTD))))
        output_BTD: Tensor = x_BTD + self.dropout(y_BTD)
        return output_BTD


@final
class GPT(nn.Module):
    """Token and position embeddings, blocks, a final normalization, and a head over the vocabulary."""

    def __init__(self, blocks: list[Block], *, width: int, context: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the logits of the next token at each position, shape (B, T, V)."""
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.dropout(self.token(tokens_BT) + self.position(places_T))
        logits_BTV: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits_BTV


def build(
    spec: DataSpec,
    *,
    layers: int = 4,
    heads: int = 4,
    width: int = 128,
    dropout: float = 0.0,
    tied: bool = True,
) -> nn.Module:
    """Return a small decoder that predicts the next token at each position.

    Args:
        spec: Description of the data; the context is the length of its samples.
        layers: Blocks of attention and a network of four times the width.
        heads: Attention heads of each block; a divisor of the width.
        width: Length of the vectors that stand for a position.
        dropout: Fraction set to zero in training: of embeddings, attention weights and sublayer outputs.
        tied: Use the token embedding as the weight of the output layer, too.
    """
    if spec.kind != "tokens":
        raise GradwatchError(f"model: gpt takes tokens, but the data has {spec.kind}; use mlp or cnn, or data: text")
    at_least_one(layers=layers, heads=heads, width=width)
    fraction(dropout=dropout)
    if width % heads:
        raise GradwatchError(f"model.heads: got {heads}, expected a divisor of the width {width}")
    (context,) = spec.input_shape
    blocks = [Block(width, heads=heads, dropout=dropout) for _ in range(layers)]
    model = GPT(blocks, width=width, context=context, vocabulary=spec.outputs, dropout=dropout)
    _initialise(model)
    if tied:  # after the initialization, so that the shared weight is drawn once as the embedding
        model.head.weight = model.token.weight
    return model


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    residuals = [m for name, m in model.named_modules() if name.endswith(".projection")]
    for module in residuals:
        # GPT-2 paper, section 2.3: residual layers are scaled by 1 / sqrt(number of residual layers)
        nn.init.normal_(module.weight, std=INIT_STD / math.sqrt(len(residuals)))
