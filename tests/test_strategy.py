"""Every sharding strategy against one process, with its traffic, also at the edges of its meshes."""

import pytest
import torch
from models import joined, relative_difference, same_bits, shard_blocks, tiny_gpt, tokens, world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import ShardingStrategy as TorchStrategy

from minifsdp import (
    FullyShardedDataParallel,
    ShardedAdam,
    ShardingStrategy,
    Traffic,
    clip_grad_norm_,
    full_state_dict,
)
from minifsdp.memory import traffic_formula
from minifsdp.models.gpt import Block


def mesh_of(shape):
    names = ("replicate", "shard") if len(shape) == 2 else ("shard",)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def wrap(model, strategy, shape):
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy={Block},
        sharding_strategy=ShardingStrategy[strategy],
        device_mesh=mesh_of(shape) if shape else None,
    )


def train(model, optimizer, batch, clip):
    for step in range(5):
        model(*batch(step)).backward()
        clip(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()


def trains_as_one_process(model):
    rank, n = world()
    reference = tiny_gpt(torch.float64)
    train(model, ShardedAdam(model.parameters(), lr=1e-2), lambda i: tokens(i, rank), clip_grad_norm_)
    train(
        reference,
        torch.optim.Adam(reference.parameters(), lr=1e-2),
        lambda i: joined(i, n),
        torch.nn.utils.clip_grad_norm_,
    )
    assert relative_difference(full_state_dict(model), reference.state_dict()) < 1e-10


def against_one_process(strategy, shape):
    rank, _ = world()
    model = wrap(tiny_gpt(torch.float64), strategy, shape)
    predicted = traffic_formula(model)
    with Traffic() as traffic:
        model(*tokens(0, rank)).backward()
    model.zero_grad()
    sent = traffic.sent_bytes()
    sent.pop("roll_call", None)
    assert sent == predicted
    trains_as_one_process(model)
    return sent


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "FULL_SHARD"])
@pytest.mark.parametrize(
    ("n", "shape"),
    [(4, (2, 2)), (4, (4, 1)), (4, (1, 4)), (4, (4,)), (3, (3, 1)), (2, (1, 2)), (1, (1, 1)), (1, None)],
)
def test_strategies_on_meshes(ranks, n, shape, strategy):
    for sent in ranks(n, against_one_process, strategy, shape):
        if shape and len(shape) == 2 and shape[1] == 1:
            assert sent["all_gather"] == sent["reduce_scatter"] == 0  # a mesh of N x 1 gathers nothing
        if n == 1:
            assert set(sent.values()) == {0}


def by_bits():
    """SHARD_GRAD_OP and NO_SHARD add in the order of FULL_SHARD; hybrids that keep or release do so among
    themselves."""
    rank, _ = world()
    results = {}
    for strategy, shape in [
        ("HYBRID_SHARD", (2, 2)),
        ("_HYBRID_SHARD_ZERO2", (2, 2)),
        ("FULL_SHARD", None),
        ("HYBRID_SHARD", (4, 1)),
        ("NO_SHARD", None),
    ]:
        model = wrap(tiny_gpt(), strategy, shape)
        train(model, ShardedAdam(model.parameters(), lr=1e-2), lambda i: tokens(i, rank), lambda *_: None)
        results[strategy, shape] = full_state_dict(model)
    assert same_bits(results["HYBRID_SHARD", (2, 2)], results["_HYBRID_SHARD_ZERO2", (2, 2)])
    assert same_bits(results["FULL_SHARD", None], results["NO_SHARD", None])
    assert same_bits(results["FULL_SHARD", None], results["HYBRID_SHARD", (4, 1)])


def test_strategies_with_the_same_arithmetic_agree_to_the_bit(ranks):
    ranks(4, by_bits)


def composable_on_a_mesh():
    model = shard_blocks(tiny_gpt(torch.float64), mesh=mesh_of((2, 2)))
    trains_as_one_process(model)


def test_fully_shard_on_a_two_dimensional_mesh(ranks):
    ranks(4, composable_on_a_mesh)


def refusals():
    with pytest.raises(ValueError, match="3 dimensions"):
        FullyShardedDataParallel(
            tiny_gpt(), device_mesh=init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
        )


def test_meshes_that_cannot_be(ranks):
    ranks(2, refusals)


def test_the_names_are_torchs():
    assert {s.name for s in ShardingStrategy} == {s.name for s in TorchStrategy}
