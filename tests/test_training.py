"""Law 1, same numbers: sharded training against one process, and against torch's own classes."""

import copy
import functools

import pytest
import torch
from models import (
    full_gradients,
    joined,
    relative_difference,
    same_bits,
    shard_blocks,
    sharded_copy,
    tiny_gpt,
    tokens,
    torch_full,
    torch_sharded,
    world,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from minifsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedAdam,
    ShardingStrategy,
    clip_grad_norm_,
    full_state_dict,
    fully_shard,
)
from minifsdp.models.gpt import Block

STEPS = 20


def train(model, optimizer, batches, clip=None, clip_with=None, accumulate=1, steps=STEPS):
    losses = []
    for step in range(steps):
        for micro in range(accumulate):
            loss = model(*batches(accumulate * step + micro)) / accumulate
            loss.backward()
        if clip:
            (clip_with or torch.nn.utils.clip_grad_norm_)(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


# --- against one process ------------------------------------------------------------------------------------


def against_one_process(dtype, clip, accumulate, decoupled):
    rank, n = world()
    reference = tiny_gpt(dtype)
    sharded = sharded_copy(reference)
    decay = (
        0.1 if decoupled else 0.0
    )  # L2 makes the key biases, whose true gradient is 0, grow from rounding noise
    ours = ShardedAdam(sharded.parameters(), lr=1e-2, weight_decay=decay, decoupled_weight_decay=decoupled)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = kind(reference.parameters(), lr=1e-2, weight_decay=decay)
    losses = train(sharded, ours, lambda i: tokens(i, rank), clip, clip_grad_norm_, accumulate)
    expected = train(reference, theirs, lambda i: joined(i, n), clip, None, accumulate)
    torch.distributed.all_reduce(losses)
    if dtype == torch.float64:
        assert relative_difference(full_state_dict(sharded), reference.state_dict()) < 1e-10
    torch.testing.assert_close(losses / n, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_law_1_twenty_steps_equal_one_process(ranks, n, dtype):
    ranks(n, against_one_process, dtype, None, 1, False)


@pytest.mark.parametrize(
    ("clip", "accumulate", "decoupled"), [(0.3, 1, False), (None, 3, False), (0.3, 2, True)]
)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_law_1_with_clipping_accumulation_and_weight_decay(ranks, n, clip, accumulate, decoupled):
    ranks(n, against_one_process, torch.float64, clip, accumulate, decoupled)


# --- against torch's fully_shard, to the bit ----------------------------------------------------------------


def precision_policy(low):
    if low is None:
        return {}
    return {"mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)}


def against_fully_shard(low, accumulate, clip, reduce_low):
    rank, _ = world()
    options = precision_policy(low)
    if reduce_low:
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)}
    start = tiny_gpt()
    ours, theirs = sharded_copy(start, **options), torch_sharded(copy.deepcopy(start), **options)
    optimizers = ShardedAdam(ours.parameters(), lr=1e-2), torch.optim.Adam(theirs.parameters(), lr=1e-2)
    for step in range(STEPS if low != torch.float16 else 5):
        for micro in range(accumulate):
            batch = tokens(accumulate * step + micro, rank)
            for model in (ours, theirs):
                model.set_requires_gradient_sync(micro == accumulate - 1)
            our_loss, their_loss = ours(*batch), theirs(*batch)
            assert torch.equal(our_loss, their_loss)
            our_loss.backward()
            their_loss.backward()
        assert same_bits(full_gradients(ours), torch_full(theirs, gradients=True))
        if clip:
            norm = clip_grad_norm_(ours.parameters(), clip)
            their_norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()]).full_tensor()
            torch.testing.assert_close(norm, their_norm, rtol=1e-6, atol=0)
            torch.nn.utils.clip_grads_with_norm_(theirs.parameters(), clip, norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert same_bits(full_state_dict(ours), torch_full(theirs))


@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("n", [1, 2])
def test_law_1_equal_bits_with_fully_shard(ranks, n, low):
    ranks(n, against_fully_shard, low, 1, None, False)


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_law_1_equal_bits_with_accumulation_without_sync(ranks, low):
    ranks(2, against_fully_shard, low, 3, None, False)


def test_law_1_equal_bits_with_clipping(ranks):
    """The two norms add the same squares in another order, so both runs clip by ours; see the bound on the
    norms."""
    ranks(2, against_fully_shard, None, 1, 0.3, False)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_law_1_equal_bits_when_reducing_in_low_precision(ranks, low):
    ranks(2, against_fully_shard, low, 1, None, True)


# --- what must not change a bit -----------------------------------------------------------------------------


def final_parameters(wrap):
    rank, _ = world()
    model = wrap(tiny_gpt())
    optimizer = ShardedAdam(model.parameters(), lr=1e-2)
    train(model, optimizer, lambda i: tokens(i, rank), steps=5)
    return full_state_dict(model)


def wrapped(policy, **options):
    return lambda model: FullyShardedDataParallel(model, auto_wrap_policy=policy, **options)


def variants_agree():
    reference = final_parameters(shard_blocks)
    blocks = ModuleWrapPolicy({Block})
    variants = {
        "a second run": shard_blocks,
        "the wrapper": wrapped({Block}),
        "BACKWARD_PRE": wrapped(blocks, backward_prefetch=BackwardPrefetch.BACKWARD_PRE),
        "BACKWARD_POST": wrapped(blocks, backward_prefetch=BackwardPrefetch.BACKWARD_POST),
        "no prefetch": wrapped(blocks, backward_prefetch=None),
        "SHARD_GRAD_OP": wrapped(blocks, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
        "NO_SHARD": wrapped(blocks, sharding_strategy=ShardingStrategy.NO_SHARD),
        "resharding the root": lambda model: shard_blocks(model, reshard_after_forward=True),
        "keeping everything": lambda model: shard_blocks(model, reshard_after_forward=False),
    }
    return {name: same_bits(final_parameters(wrap), reference) for name, wrap in variants.items()}


@pytest.mark.parametrize("n", [1, 3, 4])
def test_law_1_variants_with_the_same_arithmetic_agree_to_the_bit(ranks, n):
    for result in ranks(n, variants_agree):
        assert all(result.values()), result


def other_units_agree():
    """Other units cut the sums elsewhere, so only fp64 can tell that they are the same."""
    rank, n = world()
    reference = tiny_gpt(torch.float64)
    train(reference, torch.optim.Adam(reference.parameters(), lr=1e-2), lambda i: joined(i, n), steps=5)
    size = functools.partial(size_based_auto_wrap_policy, min_num_params=1000)
    for policy in (None, {nn.Linear, nn.LayerNorm}, {Block, nn.Linear}, size):
        model = FullyShardedDataParallel(tiny_gpt(torch.float64), auto_wrap_policy=policy)
        train(model, ShardedAdam(model.parameters(), lr=1e-2), lambda i: tokens(i, rank), steps=5)
        assert relative_difference(full_state_dict(model), reference.state_dict()) < 1e-10


@pytest.mark.parametrize("n", [2, 3])
def test_any_choice_of_units(ranks, n):
    ranks(n, other_units_agree)


# --- optimizers ---------------------------------------------------------------------------------------------


def any_optimizer(make):
    rank, n = world()
    reference = tiny_gpt(torch.float64)
    model = sharded_copy(reference)
    groups = lambda m: [  # noqa: E731
        {
            "params": [p for name, p in m.named_parameters() if "norm" in name or "bias" in name],
            "weight_decay": 0.0,
        },
        {"params": [p for name, p in m.named_parameters() if "norm" not in name and "bias" not in name]},
    ]
    train(model, make(groups(model)), lambda i: tokens(i, rank))
    train(reference, make(groups(reference)), lambda i: joined(i, n))
    assert relative_difference(full_state_dict(model), reference.state_dict()) < 1e-10


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
        functools.partial(torch.optim.Adagrad, lr=1e-2, eps=1e-6),
        functools.partial(ShardedAdam, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    ],
    ids=["SGD", "AdamW", "Adagrad", "ShardedAdam"],
)
def test_any_optimizer_with_groups_by_name(ranks, make):
    ranks(3, any_optimizer, make)


def optimizer_made_before_sharding():
    rank, n = world()
    model, reference = tiny_gpt(torch.float64), tiny_gpt(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    shard_blocks(model)
    train(model, optimizer, lambda i: tokens(i, rank))
    train(reference, torch.optim.Adam(reference.parameters(), lr=1e-2), lambda i: joined(i, n))
    assert relative_difference(full_state_dict(model), reference.state_dict()) < 1e-10


def test_an_optimizer_made_before_sharding_trains_the_shards(ranks):
    ranks(2, optimizer_made_before_sharding)


# --- the import line ----------------------------------------------------------------------------------------


def as_people_write_it():
    import torch.distributed.fsdp as theirs

    rank, _ = world()
    trained = []
    for names in (theirs, __import__("minifsdp")):
        model = FullyShardedDataParallel(
            tiny_gpt(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            mixed_precision=names.MixedPrecision(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32
            ),
            sharding_strategy=names.ShardingStrategy.FULL_SHARD,
            backward_prefetch=names.BackwardPrefetch.BACKWARD_PRE,
            device_id=torch.device("cpu"),
        )
        assert [name for name, _ in model.named_parameters()] == [
            name for name, _ in tiny_gpt().named_parameters()
        ]
        assert model.state_dict().keys() == tiny_gpt().state_dict().keys()
        assert all(p.ndim == 1 and p.dtype == torch.float32 for p in model.parameters())
        assert model.config.width == 24  # attributes of the wrapped module
        train(model, torch.optim.AdamW(model.parameters()), lambda i: tokens(i, rank))
        assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())
        trained.append(full_state_dict(model))
    assert same_bits(*trained)
    ours = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = FullyShardedDataParallel(tiny_gpt(), auto_wrap_policy={Block}, mixed_precision=ours)
    train(model, torch.optim.AdamW(model.parameters()), lambda i: tokens(i, rank))
    assert same_bits(full_state_dict(model), trained[0])


def test_torchs_own_arguments_and_policies_are_accepted(ranks):
    ranks(2, as_people_write_it)


def rank0_only():
    model = fully_shard(tiny_gpt())
    return list(full_state_dict(model, rank0_only=True)), list(model.state_dict())


def test_full_state_dict_on_rank_0_only(ranks):
    first, second = ranks(2, rank0_only)
    assert first[0] == first[1]
    assert second[0] == []
