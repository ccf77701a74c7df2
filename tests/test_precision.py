"""Law 5, fp32 truth: the 16-bit policy against one process that does the same casts, and overflow on one
rank."""

import copy

import pytest
import torch
from models import same_bits, world
from torch import nn

from minifsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedAdam,
    ShardedGradScaler,
    full_state_dict,
    fully_shard,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("shift", torch.linspace(-1, 1, 8))
        self.seen = {}

    def forward(self, ids, x):
        self.seen = {
            "x": x.dtype,
            "ids": ids.dtype,
            "weight": self.embed.weight.dtype,
            "shift": self.shift.dtype,
        }
        h = self.embed(ids) + x + self.shift.to(x.dtype)
        return self.out(self.hidden(h).relu())


def net():
    torch.manual_seed(0)
    return Net()


def inputs(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(7, (4,), generator=generator), torch.randn(4, 8, generator=generator)


def one_process(model, master, optimizer, low, ranks, step):
    """Casts by hand: compute every rank's gradient in ``low``, sum in fp32 in the order of ranks, step in
    fp32."""
    total = None
    for rank in range(ranks):
        for p, m in zip(model.parameters(), master, strict=True):
            p.data, p.grad = m.detach().to(low), None
        ids, x = inputs(step, rank)
        model(ids, x.to(low)).float().square().mean().backward()
        grads = [p.grad.float() for p in model.parameters()]
        total = grads if total is None else [a + b for a, b in zip(total, grads, strict=True)]
    for m, g in zip(master, total, strict=True):
        m.grad = g / ranks
    optimizer.step()


def casts_equal_one_process(low):
    rank, n = world()
    reference = net()
    policy = MixedPrecision(param_dtype=low, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    model = FullyShardedDataParallel(net(), auto_wrap_policy={nn.Linear}, mixed_precision=policy)
    optimizer = ShardedAdam(model.parameters(), lr=1e-2)
    master = [p.detach().clone().requires_grad_() for p in reference.parameters()]
    reference_optimizer = torch.optim.Adam(master, lr=1e-2)
    for step in range(10):
        model(*inputs(step, rank)).float().square().mean().backward()
        assert model.seen == {"x": low, "ids": torch.int64, "weight": low, "shift": torch.float32}
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        one_process(reference, master, reference_optimizer, low, n, step)
    assert all(
        t.dtype == torch.float32
        for s in optimizer.state.values()
        for t in s.values()
        if isinstance(t, torch.Tensor)
    )
    expected = dict(zip([name for name, _ in reference.named_parameters()], master, strict=True))
    ours = full_state_dict(model)
    if n == 2:
        assert all(torch.equal(ours[name], p) for name, p in expected.items())
    for name, p in expected.items():
        torch.testing.assert_close(ours[name], p.detach(), rtol=1e-3, atol=1e-3)
    assert ours["shift"].dtype == torch.float32


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_law_5_the_policy_equals_casts_by_hand(ranks, n, low):
    ranks(n, casts_equal_one_process, low)


def overflow_on_one_rank(kind):
    rank, n = world()
    model = fully_shard(
        net(), mp_policy=MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32)
    )
    optimizer = kind(model.parameters(), lr=1e-2)
    scaler = ShardedGradScaler(init_scale=1024.0, growth_interval=2)
    scales, moved = [], []
    for step in range(4):
        before = full_state_dict(model)
        loss = model(*inputs(step, rank)).float().square().mean()
        if step == 1 and rank == n - 1:
            loss = loss * 1e30  # its fp16 gradients overflow
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        moved.append(not same_bits(full_state_dict(model), before))
        scales.append(scaler.get_scale())
    assert moved == [True, False, True, True]
    assert scales == [1024.0, 512.0, 512.0, 1024.0]
    return scaler.state_dict()


@pytest.mark.parametrize("kind", [ShardedAdam, torch.optim.SGD])
def test_law_5_an_overflow_on_one_rank_skips_the_step_on_all(ranks, kind):
    first, *others = ranks(3, overflow_on_one_rank, kind)
    assert all(other == first for other in others)


def like_torchs_scaler():
    """The same calls on ours and on torch's, with and without an overflow: the same scales and parameters."""
    torch.manual_seed(0)
    start = nn.Linear(4, 4)
    trained = []
    for scaler in (
        ShardedGradScaler(init_scale=8.0, growth_interval=2),
        torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2),
    ):
        model = copy.deepcopy(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        history = []
        for step in range(7):
            loss = model(torch.ones(2, 4)).sum() * (float("inf") if step == 3 else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            history.append(scaler.get_scale())
        trained.append((history, scaler.state_dict(), model.state_dict()))
    (ours, our_state, our_model), (theirs, their_state, their_model) = trained
    assert ours == theirs
    assert our_state == their_state
    assert same_bits(our_model, their_model)
    fresh = ShardedGradScaler()
    fresh.load_state_dict(their_state)
    assert fresh.state_dict() == their_state


def test_the_scaler_behaves_as_torchs(ranks):
    ranks(1, like_torchs_scaler)


def scaler_misuse():
    model = fully_shard(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler()
    with pytest.raises(RuntimeError, match="before it"):
        scaler.update()
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="already"):
        scaler.step(optimizer)
    off = ShardedGradScaler(enabled=False)
    assert off.scale(torch.tensor(2.0)).item() == 2.0
    assert off.state_dict() == {}
    with pytest.raises(ValueError, match="growth_factor"):
        ShardedGradScaler(growth_factor=0.5)


def test_the_scaler_refuses_misuse(ranks):
    ranks(2, scaler_misuse)
