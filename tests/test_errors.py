"""Law 6, errors speak: wrong use raises where it is wrong, on every rank, and names what and what to do."""

import copy

import pytest
import torch
import torch.distributed.fsdp
from models import full_gradients, relative_difference, sharded_copy, tiny_gpt, tokens, world
from torch import nn

from minifsdp import FullyShardedDataParallel, MixedPrecision, ShardedAdam, fully_shard
from minifsdp.data import batches, part_of, read_text


def refused(match, make, kind=ValueError):
    with pytest.raises(kind, match=match):
        make()


def wrong_models():
    rank, n = world()
    refused("sharded already", lambda: fully_shard(fully_shard(nn.Linear(2, 2))))
    refused("sharded already", lambda: FullyShardedDataParallel(FullyShardedDataParallel(nn.Linear(2, 2))))
    mixed = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    refused("'1.weight' has no values yet", lambda: fully_shard(mixed))
    refused(
        "param_dtype must be a floating dtype",
        lambda: fully_shard(nn.Linear(2, 2), mp_policy=MixedPrecision(param_dtype=torch.int8)),
    )
    other_sizes = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 if rank == n - 1 else 2))
    refused(rf"parameter 2 is '1.weight \(2, 2\).*on rank {n - 1}", lambda: fully_shard(other_sizes))
    fewer = nn.Sequential(*[nn.Linear(2, 2, bias=False)] * 1, *([nn.Linear(2, 2)] if rank else []))
    refused("missing", lambda: fully_shard(fewer))
    torch.manual_seed(rank)
    refused("'weight' has other values on rank 1 than on rank 0", lambda: fully_shard(nn.Linear(2, 2)))
    tied = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    torch.nn.init.ones_(tied[0].weight)
    tied[1].weight = tied[0].weight
    fully_shard(tied[0])
    refused("'1.weight' is tied to one that unit 'root' has taken", lambda: fully_shard(tied))


@pytest.mark.parametrize("n", [2, 3])
def test_law_6_models_that_cannot_be_sharded(ranks, n):
    ranks(n, wrong_models)


def mixed_devices():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = nn.Parameter(torch.empty(2, 2, device="meta"))
    refused("no values|one device", lambda: fully_shard(model))


def test_law_6_parameters_on_mixed_devices(ranks):
    ranks(2, mixed_devices)


def moved_or_copied():
    model = sharded_copy(tiny_gpt())
    refused("move or convert the model before sharding", lambda: model.to(torch.float16), RuntimeError)
    refused("'tokens.weight' is sharded", lambda: model.double(), RuntimeError)
    assert model.to("cpu") is model  # nothing to do
    refused("copy it before sharding", lambda: copy.deepcopy(model), TypeError)
    stack = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert type(stack[:1]) is nn.Sequential


def test_law_6_moving_or_copying_a_sharded_model(ranks):
    ranks(2, moved_or_copied)


def backward_twice():
    rank, n = world()
    reference = tiny_gpt()
    model = sharded_copy(reference)
    loss = model(*tokens(0, rank))
    loss.backward()
    refused("second time", loss.backward, RuntimeError)
    model.zero_grad()
    model(*tokens(1, rank)).backward()  # nothing is lost: the next step is right
    (sum(reference(*tokens(1, r)) for r in range(n)) / n).backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    ours = full_gradients(model)
    assert all(torch.allclose(ours[name], g, atol=1e-6) for name, g in expected.items())


def test_law_6_calling_backward_twice(ranks):
    ranks(2, backward_twice)


def changed_between_forward_and_backward():
    rank, _ = world()
    model = sharded_copy(tiny_gpt())
    optimizer = ShardedAdam(model.parameters())
    first = model(*tokens(0, rank))
    model(*tokens(1, rank)).backward()
    optimizer.step()
    refused("'root' were changed between the forward and its backward", first.backward, RuntimeError)


def test_law_6_a_step_between_forward_and_backward(ranks):
    ranks(2, changed_between_forward_and_backward)


def double_backward():
    model = fully_shard(nn.Linear(4, 4))
    x = torch.ones(2, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    refused(
        "once_differentiable|differentiate twice", lambda: gradient.square().sum().backward(), RuntimeError
    )


def test_law_6_double_backward_is_refused(ranks):
    ranks(2, double_backward)


def unserved():
    model = nn.Linear(2, 2)
    for name, value in {
        "cpu_offload": torch.distributed.fsdp.CPUOffload(offload_params=True),
        "param_init_fn": lambda module: None,
        "forward_prefetch": True,
        "ignored_modules": [model],
        "use_orig_params": False,
    }.items():
        with pytest.raises(NotImplementedError, match=name):
            FullyShardedDataParallel(nn.Linear(2, 2), **{name: value})


def test_law_6_what_is_not_served_says_so(ranks):
    ranks(1, unserved)


def test_law_6_data():
    text = read_text()
    assert len(text) > 1_000_000
    for match, make in (
        ("does not exist", lambda: part_of(text, 0, 0)),
        ("does not exist", lambda: part_of(text, 4, 4)),
        ("no token in it", lambda: next(batches(text, 0, 8, 0))),
        ("too short", lambda: next(batches(text[:8], 1, 8, 0))),
        ("there is no file", lambda: read_text("/nowhere")),
    ):
        refused(match, make)
    for lr in (-1.0,):
        refused("lr=-1.0 is out of range", lambda lr=lr: ShardedAdam([nn.Parameter(torch.ones(1))], lr=lr))


def test_each_rank_reads_its_own_part():
    text = torch.arange(103, dtype=torch.uint8)
    parts = [part_of(text, rank, 4) for rank in range(4)]
    assert torch.cat(parts).tolist() == list(range(100))
    tokens, targets = next(batches(text, 3, 8, seed=1))
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert relative_difference({"x": tokens[:, 0] + 1.0}, {"x": targets[:, 0].double()}) == 0
