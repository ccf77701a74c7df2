"""What the tests train, and the oracle that they compare with: the same model on one process."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from minifsdp import full_state_dict, fully_shard
from minifsdp.models.gpt import GPT, GPTConfig

TINY = GPTConfig(vocab=61, seq=12, layers=3, heads=2, width=24)  # sizes that no number of ranks divides


def tiny_gpt(dtype=torch.float32, seed=0) -> GPT:
    torch.manual_seed(seed)
    return GPT(TINY).to(dtype)


def shard_blocks(model: GPT, shard=fully_shard, **options) -> GPT:
    """Each block a unit, the rest to the root; by our ``fully_shard`` or torch's."""
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)
    return model


def torch_sharded(model: GPT, **options) -> GPT:
    return shard_blocks(model, torch_fully_shard, **options)


def tokens(step: int, rank: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of one rank at one step: (B, T) tokens and targets."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    windows = torch.randint(TINY.vocab, (batch, TINY.seq + 1), generator=generator)
    return windows[:, :-1], windows[:, 1:]


def joined(step: int, ranks: int, batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """The batches of all ranks, one after another, as one process would see them."""
    columns = zip(*(tokens(step, rank, batch) for rank in range(ranks)), strict=True)
    return tuple(torch.cat(column) for column in columns)


def sharded_copy(model: nn.Module, shard=shard_blocks, **options) -> nn.Module:
    return shard(copy.deepcopy(model), **options)


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every gradient, gathered: they take the parameters' places for a moment. Zero where there is none."""
    values = [p.data.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.copy_(p.grad) if p.grad is not None else p.data.zero_()
    gradients = full_state_dict(model)
    for p, value in zip(model.parameters(), values, strict=True):
        p.data.copy_(value)
    return gradients


def relative_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(
        ((ours[k] - theirs[k]).abs().max() / theirs[k].abs().max().clamp(min=1e-30)).item()
        for k in theirs
        if theirs[k].numel()
    )


def same_bits(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in theirs)


def torch_full(model: nn.Module, gradients: bool = False) -> dict[str, torch.Tensor]:
    """The full tensors of a model under torch's ``fully_shard``."""
    state = model.state_dict(keep_vars=True)
    return {name: (p.grad if gradients else p).full_tensor().detach() for name, p in state.items()}


def world() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()
