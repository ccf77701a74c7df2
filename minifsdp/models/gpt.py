"""GPT: a decoder-only transformer (Radford et al., 2019), in the shapes (B, T, C) = batch, time, channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class GPTConfig:
    """The size of a model."""

    vocab: int = 256  # bytes
    seq: int = 128  # the longest sequence, T
    layers: int = 6
    heads: int = 6
    width: int = 384  # C


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.proj = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C) -> (B, T, C)
        B, T, C = x.shape
        heads = self.qkv(x).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, C / H)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class MLP(nn.Module):
    """Two linear layers, four times wider between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))  # (B, T, C) -> (B, T, 4 C) -> (B, T, C)


class Block(nn.Module):
    """The usual unit of sharding: a model is mostly a stack of these."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """The head shares its weight with the token embedding (Press and Wolf, 2017)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ValueError(f"width {config.width} does not split into {config.heads} heads")
        self.config = config
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.seq, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.tokens.weight
        self._init()

    def _init(self) -> None:
        """GPT-2's start, but for the tokens: as a head, their weight should give logits of variance 1."""
        for name, parameter in self.named_parameters():
            if name == "tokens.weight":
                nn.init.normal_(parameter, std=self.config.width**-0.5)
            elif name.endswith(
                ("proj.weight", "down.weight")
            ):  # summed over all 2 L branches of the residual
                nn.init.normal_(parameter, std=0.02 * (2 * self.config.layers) ** -0.5)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) for ``tokens`` (B, T); with ``targets`` (B, T), their mean cross entropy in nats
        instead."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]  # (B, T, C)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))  # (B, T, V)
        if targets is None:
            return logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # 16 bits are too few for a loss
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, tokens: Tensor, count: int, temperature: float = 0.8) -> Tensor:
        """``tokens`` (B, T) continued by ``count`` sampled ones, (B, T + count)."""
        for _ in range(count):
            logits = self(tokens[:, -self.config.seq :])[:, -1].float()  # (B, V)
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1)  # (B, 1)
            tokens = torch.cat([tokens, chosen], dim=1)
        return tokens
