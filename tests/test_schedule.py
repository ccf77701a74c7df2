"""Law 2, same schedule on every rank: whatever one rank skips or breaks, the numbers are right or every rank
raises."""

import copy
import time

import pytest
import torch
from models import full_gradients, relative_difference, sharded_copy, tiny_gpt, tokens, world
from torch import nn

from minifsdp import Traffic, fully_shard
from minifsdp.fsdp import units
from minifsdp.schedule import RanksDisagree


class Experts(nn.Module):
    """Four equal experts, so that nothing but the schedule can tell one's weights from another's."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 3)

    def forward(self, x, route):
        x = self.first(x).relu()
        for i in route:
            x = x + self.experts[i](x).tanh()
        return self.last(x)


def experts(shard=True):
    torch.manual_seed(0)
    model = Experts().double()
    if shard:
        for expert in model.experts:
            fully_shard(expert)
        fully_shard(model)
    return model


ROUTES = {
    "skipped on one rank": [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2, 3]],
    "other experts everywhere": [[0], [1], [3]],
    "other orders": [[0, 1, 2], [2, 1, 0], [1, 0, 2]],
    "used twice on one rank": [[0, 0], [0], [1]],
    "none on one rank": [[], [1, 2], [3]],
}


def routed(routes):
    rank, n = world()
    model, reference = experts(), experts(shard=False)
    for step in range(3):
        inputs = [
            torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(n * step + r))
            for r in range(n)
        ]
        model(inputs[rank], routes[rank]).square().mean().backward()
        (sum(reference(inputs[r], routes[r]).square().mean() for r in range(n)) / n).backward()
        unused = {name for name, p in reference.named_parameters() if p.grad is None}
        assert {name for name, p in model.named_parameters() if p.grad is None} == unused
        expected = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in reference.named_parameters()
        }
        assert relative_difference(full_gradients(model), expected) < 1e-10
        for m in (model, reference):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
            m.zero_grad()
    assert not any(unit.gathered for unit in units(model))


@pytest.mark.parametrize("case", ROUTES)
@pytest.mark.parametrize("n", [2, 3])
def test_law_2_experts_that_only_some_ranks_reach(ranks, n, case):
    ranks(n, routed, ROUTES[case])


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x, extra):
        x = self.frozen(self.used(x))
        return self.sometimes(x) if extra else x


def unused_parameters(shard_each):
    """Unused on all ranks: no gradient, so that old momentum cannot move it. Unused on one rank: the mean
    with 0."""
    rank, n = world()
    torch.manual_seed(0)
    reference = Branches().double()
    model = copy.deepcopy(reference)
    if shard_each:
        for child in model.children():
            fully_shard(child)
    fully_shard(model)
    inputs = [torch.full((2, 4), 1.0 + r, dtype=torch.float64) for r in range(n)]
    model(inputs[rank], rank == 0).sum().backward()
    (sum(reference(inputs[r], r == 0).sum() for r in range(n)) / n).backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
    expected = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in reference.named_parameters()}
    assert relative_difference(full_gradients(model), expected) < 1e-12


@pytest.mark.parametrize("shard_each", [True, False])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_law_2_unused_and_frozen_parameters(ranks, n, shard_each):
    ranks(n, unused_parameters, shard_each)


class Breaks(nn.Module):
    """Fails on one rank, when told to, in forward or in backward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, where=""):
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if where == "forward" and i == 1:
                raise KeyError("no such token")
            if where == "backward" and i == 1:
                x.register_hook(self._fail)
        return x

    def _fail(self, gradient):
        raise KeyError("no such gradient")


def exception(where, on_ranks):
    rank, _ = world()
    torch.manual_seed(0)
    reference = Breaks()
    model = copy.deepcopy(reference)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(2, 4)
    started = time.monotonic()
    failing = rank in on_ranks
    kind = KeyError if failing else RanksDisagree
    with pytest.raises(kind, match="no such" if where == "forward" or failing else "different steps"):
        model(x, where if failing else "").sum().backward()
    if failing and where == "backward":  # it goes on with the next step, and the others learn of it then
        with (
            pytest.raises(RanksDisagree, match="different steps")
            if len(on_ranks) == 1
            else pytest.raises(ZeroDivisionError)
        ):
            model(x).sum().backward()
            raise ZeroDivisionError
        model.zero_grad()
    assert time.monotonic() - started < 5
    model.zero_grad()
    for m in (model, reference):
        m(x).sum().backward()
    expected = {name: p.grad for name, p in reference.named_parameters()}
    assert relative_difference(full_gradients(model), expected) < 1e-6


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("n", "on_ranks"), [(2, [1]), (3, [0]), (3, [0, 1, 2])])
def test_law_2_an_exception_reaches_every_rank_and_the_next_step_is_right(ranks, n, on_ranks, where):
    ranks(n, exception, where, on_ranks)


def one_rank_evaluates_alone():
    rank, _ = world()
    model = sharded_copy(tiny_gpt())
    if rank == 0:
        with torch.no_grad():
            model(*tokens(0, rank))  # meets the others' training step
    with pytest.raises(RanksDisagree, match="rank 0: gather unit 'root' in forward of pass 2"):
        model(*tokens(0, rank)).backward()


def test_law_2_a_model_called_more_often_on_one_rank(ranks):
    ranks(2, one_rank_evaluates_alone)


def cost_of_the_roll_call():
    rank, n = world()
    model = sharded_copy(tiny_gpt())
    with Traffic() as traffic:
        model(*tokens(0, rank)).backward()
    frame = traffic.frame()
    calls = frame[frame.name == "roll_call"]
    return len(calls), calls.sent_bytes.max(), len(frame) - len(calls), n


def test_the_roll_call_is_one_small_message_to_each_rank_a_collective(ranks):
    for calls, largest, collectives, n in ranks(3, cost_of_the_roll_call):
        assert calls == collectives + 1  # and one at the end of backward
        assert largest == (n - 1) * 4 * 8  # four words
