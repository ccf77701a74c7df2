"""Law 4, exact traffic: what training sends, measured, against the formula and against arithmetic."""

import pytest
import torch
from models import tiny_gpt, tokens, world
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from minifsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy, Traffic, fully_shard
from minifsdp.memory import traffic_formula
from minifsdp.models.gpt import Block

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def one_step(model):
    rank, _ = world()
    with Traffic() as traffic:
        model(*tokens(0, rank)).backward()
    return traffic


def formula_holds():
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        for policy in (None, BF16):
            model = FullyShardedDataParallel(
                tiny_gpt(),
                auto_wrap_policy={Block},
                mixed_precision=policy,
                sharding_strategy=ShardingStrategy[strategy],
            )
            sent = one_step(model).sent_bytes()
            sent.pop("roll_call", None)
            assert sent == traffic_formula(model), strategy


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_law_4_measured_equals_formula(ranks, n):
    ranks(n, formula_holds)


def by_arithmetic():
    _, n = world()
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    for layer in list(model)[:2]:
        fully_shard(layer)
    fully_shard(model)
    with Traffic() as traffic:
        model(torch.ones(1, 16)).sum().backward()
    frame = traffic.frame()
    frame = frame[frame.name != "roll_call"]
    assert list(zip(frame.name, frame.unit, strict=True)) == [
        ("all_gather", "root"),  # kept for backward
        ("all_gather", "0"),
        ("all_gather", "1"),
        ("all_gather", "1"),
        ("reduce_scatter", "1"),
        ("all_gather", "0"),
        ("reduce_scatter", "0"),
        ("reduce_scatter", "root"),
    ]
    padded = -(-(16 * 16 + 16) // (8 * n)) * 8 * n
    assert set(frame.sent_bytes) == {(n - 1) * padded * 4 // n}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_law_4_by_arithmetic_call_by_call(ranks, n):
    ranks(n, by_arithmetic)


def accumulation():
    rank, _ = world()
    model = FullyShardedDataParallel(tiny_gpt(), auto_wrap_policy={Block})
    predicted = traffic_formula(model)
    with Traffic() as traffic:
        with model.no_sync():
            for micro in range(2):
                model(*tokens(micro, rank)).backward()
        model(*tokens(2, rank)).backward()
    sent = traffic.sent_bytes()
    assert sent["all_gather"] == 3 * predicted["all_gather"]
    assert sent["reduce_scatter"] == predicted["reduce_scatter"]


def test_no_sync_reduces_once(ranks):
    ranks(2, accumulation)


def prefetch_order(prefetch):
    when = BackwardPrefetch[prefetch] if prefetch else None
    model = FullyShardedDataParallel(tiny_gpt(), auto_wrap_policy={Block}, backward_prefetch=when)
    frame = one_step(model).frame()
    frame = frame[frame.name != "roll_call"]
    calls = [
        f"{'G' if name == 'all_gather' else 'R'}{unit[-1]}"
        for name, unit in zip(frame.name, frame.unit, strict=True)
    ]
    return " ".join(calls[4:])  # after forward: the root is gathered already


@pytest.mark.parametrize(
    ("prefetch", "order"),
    [
        (None, "G2 R2 G1 R1 G0 R0 Rt"),
        ("BACKWARD_POST", "G2 R2 G1 R1 G0 R0 Rt"),
        ("BACKWARD_PRE", "G2 G1 R2 G0 R1 R0 Rt"),
    ],
)
def test_backward_prefetch_changes_the_order(ranks, prefetch, order):
    assert ranks(2, prefetch_order, prefetch) == [order] * 2
