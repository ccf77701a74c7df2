"""ShardedAdam against torch.optim.Adam on the same pieces, to the bit; the norm against the unsharded one."""

import copy

import pytest
import torch
from models import full_gradients, same_bits, sharded_copy, tiny_gpt, tokens, world
from torch import nn

from minifsdp import ShardedAdam, clip_grad_norm_, full_state_dict, fully_shard
from minifsdp import optim as optim_module
from minifsdp.optim import adam
from minifsdp.shard import neighbours


def equal_bits(weight_decay, decoupled):
    rank, _ = world()
    start = tiny_gpt()
    trained = []
    for kind in (ShardedAdam, torch.optim.Adam):
        model = sharded_copy(start)
        groups = [
            {"params": [p for p in model.parameters() if p.numel() % 2], "lr": 3e-3},
            {"params": [p for p in model.parameters() if not p.numel() % 2]},
        ]
        optimizer = kind(
            groups, lr=1e-2, betas=(0.8, 0.99), weight_decay=weight_decay, decoupled_weight_decay=decoupled
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for step in range(6):
            model(*tokens(step, rank)).backward()
            if step == 2:
                next(model.blocks[1].parameters()).grad = None  # ages apart
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        trained.append(full_state_dict(model))
    assert same_bits(*trained)


@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.0, False), (0.1, False), (0.1, True)])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_equal_bits_with_torchs_adam(ranks, n, weight_decay, decoupled):
    ranks(n, equal_bits, weight_decay, decoupled)


def kernels():
    rank, _ = world()
    model = sharded_copy(tiny_gpt())
    optimizer = ShardedAdam(model.parameters())
    calls = []
    optim_module.adam = lambda *args, **kwargs: (calls.append(args[0].numel()), adam(*args, **kwargs))
    try:
        for step in range(2):
            model(*tokens(step, rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        optim_module.adam = adam
    return calls


def test_one_call_a_unit(ranks):
    for calls in ranks(2, kernels):
        assert len(calls) == 2 * 4  # three blocks and the root, two steps


def closure_state_and_resume():
    rank, _ = world()
    model = sharded_copy(tiny_gpt())
    optimizer = ShardedAdam(model.parameters(), lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = model(*tokens(0, rank))
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert optimizer.step(closure) < first
    saved, at = (
        copy.deepcopy(optimizer.state_dict()),
        {name: p.detach().clone() for name, p in model.named_parameters()},
    )
    optimizer.step(closure)
    expected = full_state_dict(model)
    for name, p in model.named_parameters():
        p.data.copy_(at[name])
    resumed = ShardedAdam(model.parameters(), lr=1.0)
    resumed.load_state_dict(saved)
    optimizer = resumed
    resumed.step(closure)
    moments = [resumed.state[p]["exp_avg"] for p in model.blocks[0].parameters() if p.numel()]
    assert list(neighbours([moments])) == [(0, len(moments))]
    assert same_bits(full_state_dict(model), expected)


def test_closure_and_state_dict(ranks):
    ranks(2, closure_state_and_resume)


def norms():
    rank, n = world()
    reference = tiny_gpt(torch.float64)
    model = sharded_copy(reference)
    found = []
    for norm_type in (2.0, 1.0, float("inf"), 3.0):
        model.zero_grad()
        reference.zero_grad()
        model(*tokens(0, rank)).backward()
        (sum(reference(*tokens(0, r)) for r in range(n)) / n).backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, norm_type)
        norm = clip_grad_norm_(model, 0.01, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-10, atol=0)
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(
                gradient,
                dict(reference.named_parameters(remove_duplicate=False))[name].grad,
                rtol=1e-9,
                atol=1e-14,
            )
        found.append(norm.item())
    model.zero_grad()
    assert clip_grad_norm_(model.parameters(), 1.0).item() == 0.0  # no gradient yet
    return found


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_norm_is_the_unsharded_one_on_every_rank(ranks, n):
    assert len(set(map(tuple, ranks(n, norms)))) == 1


def hooks_and_pieces():
    """Autograd itself delivers the pieces: hooks fire, ``autograd.grad`` works and leaves .grad alone."""
    rank, _ = world()
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4))
    fired = []
    model.weight.register_post_accumulate_grad_hook(lambda p: fired.append(p.grad.shape == p.shape))
    x = torch.full((2, 4), 1.0 + rank, requires_grad=True)
    (gradient,) = torch.autograd.grad(model(x).sum(), x)
    assert gradient.shape == x.shape
    assert model.weight.grad is None
    pieces = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert model.weight.grad is None
    model(x).sum().backward()
    assert fired == [True]
    for piece, p in zip(pieces, model.parameters(), strict=True):
        assert torch.equal(piece, p.grad)


def test_hooks_fire_and_autograd_grad_works(ranks):
    ranks(2, hooks_and_pieces)
