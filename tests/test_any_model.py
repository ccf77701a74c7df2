"""What people's models and loops do, each against the same model on one process."""

from __future__ import annotations

import copy
import dataclasses
from collections import namedtuple

import pytest
import torch
import torch.nn.functional as F
from models import full_gradients, relative_difference, world
from torch import nn
from torch.utils.checkpoint import checkpoint

from minifsdp import FullyShardedDataParallel, full_state_dict, fully_shard
from minifsdp.fsdp import units


def inputs(step, rank, shape=(4, 6)):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def gradients_of(model):
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def equal_to_one_process(make, loss_of, shard, steps=3):
    """Train both with SGD for a few steps; compare gradients each time, parameters and buffers at the end."""
    rank, n = world()
    torch.manual_seed(0)
    reference = make().double()
    model = shard(copy.deepcopy(reference))
    for step in range(steps):
        loss_of(model, step, rank).backward()
        (sum(loss_of(reference, step, r) for r in range(n)) / n).backward()
        ours = dict(model.named_parameters())
        for name, p in reference.named_parameters():
            assert (p.grad is None) == (ours[name].grad is None), name
        assert (
            relative_difference(
                full_gradients(model) | dict(model.named_buffers()),
                gradients_of(reference) | dict(reference.named_buffers()),
            )
            < 1e-9
        )
        for m in (model, reference):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
            m.zero_grad()
    assert all(not unit.gathered for unit in units(model))
    assert relative_difference(full_state_dict(model), reference.state_dict()) < 1e-9


def each_child(model):
    for child in model.children():
        if not isinstance(child, (nn.ModuleList, nn.ParameterList, nn.ParameterDict)):
            fully_shard(child)
    return fully_shard(model)


def wrapper(model):
    return FullyShardedDataParallel(model, auto_wrap_policy={nn.Linear})


SHARD = {"root only": fully_shard, "each child": each_child, "wrapper": wrapper}


# --- models -------------------------------------------------------------------------------------------------


class Scalar(nn.Module):
    """0-dimensional, empty, tiny and non-contiguous parameters, mixed dtypes, lists and dictionaries of
    them."""

    def __init__(self):
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(1))
        self.turned = nn.Parameter(torch.randn(5, 6).t())
        self.list = nn.ParameterList([torch.randn(5), torch.randn(2, 5)])
        self.dictionary = nn.ParameterDict({"a": torch.randn(5), "b": torch.randn(1)})
        self.counts = nn.Parameter(torch.arange(5), requires_grad=False)

    def forward(self, x):
        x = x @ self.turned * self.logit_scale.exp() + self.list[0] + self.list[1].sum(0)
        return (x * self.dictionary["a"] + self.dictionary["b"] + self.empty.sum() + self.counts) * self.one


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.GroupNorm(2, 8)
        self.out = nn.utils.parametrizations.weight_norm(nn.Linear(8, 2))

    def forward(self, x):
        x = x.view(-1, 3, 2, 1).expand(-1, 3, 2, 4)
        return self.out(self.norm(self.conv(x)).relu().mean((2, 3)))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x):
        x = x[None]
        x, _ = self.attention(x, x, x)
        return self.layer(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(10, 3, batch_first=True)

    def forward(self, x):
        y, _ = self.lstm(x[None])
        return self.gru(y)[0]


class Tied(nn.Module):
    """The first and the last layer share a weight, of a size that no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(self.middle(self.first(x)).tanh())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.layer(self.other(self.layer(x).tanh()) + self.layer(x))


class KeywordsOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, *, x):
        return self.layer(input=x)


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    hidden: list
    note: str = "not a tensor"
    nothing: None = None


Pair = namedtuple("Pair", ["a", "b"])


class Structured(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        output = self.inner(x)
        a, b = output.hidden[0].a, output.hidden[1]["b"]
        a += 1  # outputs may be edited in place
        return self.last(output.logits + a + b)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = self.one(x)
        return Output(
            self.two(y).relu(),
            [Pair(y * 1, None), {"b": y.chunk(2, 0)[0].repeat(2, 1), "c": y.detach(), "d": self.unused(x)}],
        )


class Frozen(nn.Module):
    """As LoRA does: a frozen base and small trained adapters, in one unit; and a unit that is all frozen."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 6).requires_grad_(False)
        self.block = nn.Sequential(
            nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 2), nn.Linear(2, 6).requires_grad_(False)
        )
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.frozen(x + self.block(self.base(x))).tanh())


class Checkpointed(nn.Module):
    """Activation checkpointing around units and inside them; None: not there."""

    def __init__(self, around, inside):
        super().__init__()
        self.first, self.block, self.last = nn.Linear(6, 6), CheckpointsInside(inside), nn.Linear(6, 6)
        self.around = around

    def forward(self, x):
        x = self.first(x)
        for module in (self.block, self.last):
            x = maybe_checkpoint(module, x, self.around)
        return x


class CheckpointsInside(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.attention = nn.Linear(6, 6)
        self.mlp = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.inside = inside

    def forward(self, x):
        x = x + self.attention(x).tanh()
        return x + maybe_checkpoint(self.mlp, x, self.inside)


def maybe_checkpoint(module, x, reentrant):
    return module(x) if reentrant is None else checkpoint(module, x, use_reentrant=reentrant)


class BatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.register_buffer("scale", torch.linspace(1, 2, 6))
        self.register_buffer("temporary", torch.ones(6), persistent=False)

    def forward(self, x):
        return self.last(self.norm(self.layer(x)) * self.scale * self.temporary)


MODELS = {
    "odd parameters": Scalar,
    "channels-last and weight_norm": Images,
    "attention": Attends,
    "recurrent": Recurrent,
    "a unit called several times": Twice,
    "keywords only": KeywordsOnly,
    "structured outputs": Structured,
    "frozen": Frozen,
    "buffers": BatchNorm,
    "checkpoint around units": lambda: Checkpointed(False, None),
    "checkpoint inside a unit": lambda: Checkpointed(None, False),
    "checkpoint around and inside": lambda: Checkpointed(False, False),
    "reentrant checkpoint around units": lambda: Checkpointed(True, None),
    "reentrant checkpoint inside a unit": lambda: Checkpointed(None, True),
}


def plain_loss(model, step, rank):
    x = inputs(step, rank)
    return (
        (model(x=x) if "KeywordsOnly" in type(getattr(model, "module", model)).__name__ else model(x))
        .square()
        .mean()
    )


def model_case(name, how):
    equal_to_one_process(MODELS[name], plain_loss, SHARD[how])


@pytest.mark.parametrize("how", SHARD)
@pytest.mark.parametrize("name", MODELS)
def test_models(ranks, name, how):
    ranks(3, model_case, name, how)


def tied_case(how):
    equal_to_one_process(Tied, plain_loss, SHARD[how])
    torch.manual_seed(0)
    model = SHARD[how](Tied().double())
    assert {"first.weight", "last.weight"} <= full_state_dict(model).keys()


@pytest.mark.parametrize("how", ["root only", "wrapper"])
@pytest.mark.parametrize("n", [2, 3])
def test_tied_weights_also_across_units(ranks, n, how):
    ranks(n, tied_case, how)


# --- loops --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.inner = None

    def forward(self, x):
        x = self.a(x).tanh()
        self.inner = x
        return self.c(self.b(x).tanh())

    def encode(self, x):
        return self.b(self.a(x).tanh())


def evaluated_between(model, step, rank):
    with torch.no_grad():
        model(inputs(9, rank))
    with torch.inference_mode():
        model(inputs(8, rank))
    model.eval()
    model(inputs(7, rank))  # forward without backward
    model.train()
    return model(inputs(step, rank)).square().mean()


def two_forwards_one_backward(model, step, rank):
    return (model(inputs(step, rank)) * model(inputs(step + 50, rank))).mean()


def gradient_of_inputs_first(model, step, rank):
    x = inputs(step, rank).requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().mean(), x)
    return (model(x.detach() + gradient.detach()) ** 2).mean()


def tensor_from_between_units(model, step, rank):
    return model(inputs(step, rank)).mean() + model.inner.square().mean()


class Aside(nn.Module):
    """Keeps a tensor from inside a unit that leads to no output of it, as a router does with its loss."""

    def __init__(self):
        super().__init__()
        self.layers, self.aside = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)), nn.Linear(6, 6)
        self.kept = None

    def forward(self, x):
        h = self.layers(x)
        self.kept = F.linear(F.linear(h, self.aside.weight).tanh(), self.aside.weight)
        return h


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), Aside(), nn.Linear(6, 6)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


def only_the_tensor_from_inside(model, step, rank):
    model(inputs(step, rank))
    return model.inner.kept.square().mean()


def also_the_tensor_from_inside(model, step, rank):
    return model(inputs(step, rank)).square().mean() + model.inner.kept.square().mean()


def checkpointed_whole(model, step, rank):
    return checkpoint(model, inputs(step, rank), use_reentrant=False).square().mean()


LOOPS = {
    "eval, no_grad and inference_mode between": evaluated_between,
    "two forwards, one backward": two_forwards_one_backward,
    "autograd.grad on inputs": gradient_of_inputs_first,
    "a tensor from between units": tensor_from_between_units,
    "the whole model checkpointed": checkpointed_whole,
}


def loop_case(name, how):
    equal_to_one_process(Net, LOOPS[name], SHARD[how])


@pytest.mark.parametrize("how", SHARD)
@pytest.mark.parametrize("name", LOOPS)
def test_loops(ranks, name, how):
    ranks(3, loop_case, name, how)


class Forces(nn.Module):
    """Asks for gradients inside its forward, and uses torch.func and a sparse matrix there."""

    def __init__(self):
        super().__init__()
        self.energy, self.last = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6)

    def forward(self, x):
        at = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(at).sum(), at)
        scaled = torch.vmap(lambda row: row * self.last.weight.sum())(x)
        slope = torch.func.grad(lambda y: (y @ self.last.weight).square().sum())(x)
        mixed = torch.sparse.mm(torch.eye(6).to(x).to_sparse(), self.last.weight)[:4]
        return self.last(self.energy(x) + force + scaled + slope + mixed)


def energy_only(model):
    fully_shard(model.energy)
    return fully_shard(model)


@pytest.mark.parametrize("shard", [fully_shard, energy_only])
def test_gradients_inside_a_forward(ranks, shard):
    ranks(3, equal_to_one_process, Forces, plain_loss, shard)


@pytest.mark.parametrize("loss_of", [only_the_tensor_from_inside, also_the_tensor_from_inside])
@pytest.mark.parametrize("how", ["root only", "each child"])
def test_a_loss_of_a_tensor_from_inside_a_unit(ranks, how, loss_of):
    ranks(3, equal_to_one_process, Keeps, loss_of, SHARD[how])


def two_losses(retain):
    rank, n = world()
    torch.manual_seed(0)
    reference = Net().double()
    model = each_child(copy.deepcopy(reference))
    for m, members in ((model, [rank]), (reference, range(n))):
        for r in members:
            scale = 1 if m is model else 1 / n
            first, second = m(inputs(0, r)).square().mean() * scale, m(inputs(1, r)).square().mean() * scale
            first.backward(retain_graph=retain)
            if retain:
                first.backward()
            second.backward()
    assert relative_difference(full_gradients(model), gradients_of(reference)) < 1e-9


@pytest.mark.parametrize("retain", [False, True])
def test_two_losses_before_either_backward_and_retain_graph(ranks, retain):
    ranks(2, two_losses, retain)


def unfrozen_later():
    rank, n = world()
    torch.manual_seed(0)
    reference = Frozen().double()
    model = each_child(copy.deepcopy(reference))
    for thaw in ("frozen.", "block.0.weight"):
        for m in (model, reference):
            m.zero_grad()
            for name, p in m.named_parameters():
                if name.startswith(thaw):
                    p.requires_grad_()
        plain_loss(model, 0, rank).backward()
        (sum(plain_loss(reference, 0, r) for r in range(n)) / n).backward()
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
        assert relative_difference(full_gradients(model), gradients_of(reference)) < 1e-9


def test_unfreezing_later(ranks):
    ranks(3, unfrozen_later)


def accumulation(no_sync):
    rank, n = world()
    torch.manual_seed(0)
    reference = Net().double()
    model = each_child(copy.deepcopy(reference))
    for step in range(3):
        model.set_requires_gradient_sync(not no_sync or step == 2)
        plain_loss(model, step, rank).backward()
        (sum(plain_loss(reference, step, r) for r in range(n)) / n).backward()
    assert relative_difference(full_gradients(model), gradients_of(reference)) < 1e-9


@pytest.mark.parametrize("no_sync", [False, True])
def test_accumulation(ranks, no_sync):
    ranks(3, accumulation, no_sync)


def last_backward_skips_a_unit():
    """What no_sync left behind in a unit is reduced even if the last backward does not reach it."""
    rank, n = world()
    torch.manual_seed(0)
    reference = Net().double()
    model = each_child(copy.deepcopy(reference))
    with model.no_sync():
        plain_loss(model, 0, rank).backward()
    model(inputs(1, rank))
    model.inner.sum().backward()
    (sum(plain_loss(reference, 0, r) for r in range(n)) / n).backward()
    for r in range(n):
        reference(inputs(1, r))
        (reference.inner.sum() / n).backward()
    assert relative_difference(full_gradients(model), gradients_of(reference)) < 1e-9


def test_no_sync_then_a_backward_that_skips_a_unit(ranks):
    ranks(3, last_backward_skips_a_unit)


def token_weighted():
    """Ranks with different numbers of tokens: sum / (global count / ranks) gives the unsharded gradient."""
    rank, n = world()
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 9)).double()
    model = each_child(copy.deepcopy(reference))
    ids = [torch.arange(1 + 3 * r) % 9 for r in range(n)]
    count = sum(map(len, ids))
    (F.cross_entropy(model(ids[rank]), ids[rank], reduction="sum") * n / count).backward()
    F.cross_entropy(reference(torch.cat(ids)), torch.cat(ids)).backward()
    assert relative_difference(full_gradients(model), gradients_of(reference)) < 1e-9


def test_losses_weighted_by_tokens_and_padding_idx(ranks):
    ranks(3, token_weighted)


def dropout_masks():
    """Recomputation sees the same dropout masks as the first forward."""
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)).double()
    results = []
    for wrapped in (False, True):
        model = fully_shard(copy.deepcopy(layer))
        torch.manual_seed(1)
        run = (lambda x, m=model: checkpoint(m, x, use_reentrant=False)) if wrapped else model
        run(inputs(0, 0)).square().sum().backward()
        results.append(full_gradients(model))
    assert all(torch.equal(results[0][k], results[1][k]) for k in results[0])


def test_dropout_under_checkpointing(ranks):
    ranks(2, dropout_masks)


def autocast():
    torch.manual_seed(0)
    reference = Net()
    model = each_child(copy.deepcopy(reference))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(inputs(0, 0).float())
        expected = reference(inputs(0, 0).float())
    assert torch.equal(out, expected)
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    expected.float().square().mean().backward()
    for name, gradient in full_gradients(model).items():
        assert torch.equal(gradient, dict(reference.named_parameters())[name].grad)


def test_autocast_around_a_sharded_model(ranks):
    ranks(2, autocast)


def synchronised_states():
    rank, _ = world()
    torch.manual_seed(rank)
    start = Images()
    model = FullyShardedDataParallel(
        copy.deepcopy(start), auto_wrap_policy={nn.Linear}, sync_module_states=True
    )
    return full_state_dict(model), start.state_dict()


def test_sync_module_states(ranks):
    results = ranks(3, synchronised_states)
    expected = results[0][1]
    for full, _ in results:
        assert all(torch.equal(full[name], expected[name]) for name in expected)
