"""The data-parallel baseline against torch's DDP, and against the sharded run."""

import copy

import pytest
import torch
from models import relative_difference, same_bits, shard_blocks, tiny_gpt, tokens, world
from torch.nn.parallel import DistributedDataParallel

from minifsdp import MixedPrecision, ShardedAdam, Traffic, full_state_dict, fully_shard
from minifsdp.baselines.data_parallel import DataParallel
from minifsdp.models.gpt import Block


def train(model, steps=10):
    rank, _ = world()
    optimizer = ShardedAdam(model.parameters(), lr=1e-2)
    for step in range(steps):
        model(*tokens(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def against_ddp(dtype):
    _, n = world()
    start = tiny_gpt(dtype)
    ours = train(DataParallel(copy.deepcopy(start), {Block})).module.state_dict()
    theirs = train(DistributedDataParallel(copy.deepcopy(start))).module.state_dict()
    if n == 2:
        assert same_bits(ours, theirs)  # a sum of two has one order
    if dtype == torch.float64:
        assert relative_difference(ours, theirs) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_equal_to_ddp(ranks, n, dtype):
    ranks(n, against_ddp, dtype)


def against_sharded(low):
    policy = MixedPrecision(param_dtype=low, reduce_dtype=torch.float32 if low else None)
    ours = train(DataParallel(tiny_gpt(), {Block}, policy), 20).module.state_dict()
    sharded = full_state_dict(train(shard_blocks(tiny_gpt(), fully_shard, mp_policy=policy), 20))
    return max((ours[name] - sharded[name]).abs().max().item() for name in ours)


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_law_1_equal_to_the_sharded_run(ranks, n, low):
    assert max(ranks(n, against_sharded, low)) <= 1e-6


def one_all_reduce_a_unit():
    rank, n = world()
    torch.manual_seed(rank)  # all take rank 0's parameters
    model = DataParallel(tiny_gpt(seed=rank), {Block})
    with Traffic() as traffic:
        model(*tokens(0, rank)).backward()
    frame = traffic.frame()
    assert list(frame.name) == ["all_reduce"] * 4
    assert list(frame.sent_bytes) == [2 * (n - 1) * e * 4 // n for e in frame.elements]
    return model.module.state_dict()


def test_one_all_reduce_a_unit(ranks):
    first, *others = ranks(3, one_all_reduce_a_unit)
    assert all(same_bits(first, other) for other in others)
