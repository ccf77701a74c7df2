"""Random trees of modules, units, frozen and tied parameters, unused branches and worlds: equal to one
process.

``MINIFSDP_EXAMPLES=5000 pytest tests/test_random_models.py`` looks further.
"""

import copy
import os

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import full_gradients, relative_difference, world
from torch import nn

from minifsdp import full_state_dict, fully_shard
from minifsdp.fsdp import units

WIDTH = 3


class Tree(nn.Module):
    """A node has a layer of its own and children; each rank may skip some of them, in each step others."""

    def __init__(self, plan, number):
        super().__init__()
        self.number = next(number)
        self.own = nn.Linear(WIDTH, WIDTH, bias=plan["bias"])
        self.children_ = nn.ModuleList(Tree(child, number) for child in plan["children"])
        self.again = plan["again"]

    def forward(self, x, skipped):
        y = self.own(x).tanh()
        for child in self.children_:
            if child.number not in skipped:
                y = y + child(y, skipped)
        return self.own(y) if self.again else y


def node(children):
    return st.fixed_dictionaries(
        {
            "bias": st.booleans(),
            "again": st.booleans(),
            "unit": st.booleans(),
            "frozen": st.booleans(),
            "children": children,
        }
    )


trees = st.recursive(node(st.just([])), lambda inner: node(st.lists(inner, max_size=3)), max_leaves=6)


def build(plan, tied):
    torch.manual_seed(0)
    model = Tree(plan, iter(range(100))).double()
    nodes = [m for m in model.modules() if isinstance(m, Tree)]
    for module, its in zip(nodes, flatten(plan), strict=True):
        if its["frozen"]:
            module.own.requires_grad_(False)
    owners = [m for m, its in zip(nodes, flatten(plan), strict=True) if not its["unit"]]
    if tied and owners and owners[-1] in outside_units(model, nodes, plan):
        owners[-1].own.weight = model.own.weight
    return model, nodes


def outside_units(model, nodes, plan):
    """The nodes whose parameters go to the root: a tied weight has to stay within one unit."""
    inside = {
        m
        for u, its in zip(nodes, flatten(plan), strict=True)
        if its["unit"] and u is not model
        for m in u.modules()
    }
    return [m for m in nodes if m not in inside]


def flatten(plan):
    return [plan, *(inner for child in plan["children"] for inner in flatten(child))]


def compare(plan, tied, skips, reshard):
    rank, n = world()
    reference, _ = build(plan, tied)
    model, nodes = build(plan, tied)
    for module, its in reversed(list(zip(nodes, flatten(plan), strict=True))):
        if its["unit"] and module is not model:
            fully_shard(module, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    for step in range(2):
        x = [
            torch.full((2, WIDTH), 0.1 + r + step, dtype=torch.float64, requires_grad=True) for r in range(n)
        ]
        model(x[rank], skips[step][rank]).square().mean().backward()
        (
            sum(reference(x[r].detach().requires_grad_(), skips[step][r]).square().mean() for r in range(n))
            / n
        ).backward()
        theirs = dict(reference.named_parameters())
        for name, p in model.named_parameters():
            assert (p.grad is None) == (theirs[name].grad is None), name
        expected = {
            k: torch.zeros_like(p) if p.grad is None else p.grad
            for k, p in reference.named_parameters(remove_duplicate=False)
        }
        assert relative_difference(full_gradients(model), expected) < 1e-9
        for m in (model, reference):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
            m.zero_grad()
    assert relative_difference(full_state_dict(model), copy.deepcopy(reference).state_dict()) < 1e-9
    assert not any(unit.gathered for unit in units(model))


@settings(
    max_examples=int(os.environ.get("MINIFSDP_EXAMPLES", 200)),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    n=st.integers(1, 4),
    plan=trees,
    tied=st.booleans(),
    reshard=st.sampled_from([None, True, False]),
    data=st.data(),
)
def test_random_models(ranks, n, plan, tied, reshard, data):
    numbers = st.sets(st.integers(1, len(flatten(plan))), max_size=2)
    skips = data.draw(st.lists(st.lists(numbers, min_size=n, max_size=n), min_size=2, max_size=2))
    ranks(n, compare, plan, tied, skips, reshard)
