"""Law 3, at rest 1/N: what is held, measured; and the ledger against torch's own tracker and the formula."""

import warnings

import pytest
import torch
from models import world
from torch.distributed._tools.mem_tracker import MemTracker

from minifsdp import FullyShardedDataParallel, MixedPrecision, ShardedAdam, ShardingStrategy
from minifsdp.baselines.data_parallel import DataParallel
from minifsdp.fsdp import units
from minifsdp.memory import CATEGORIES, Ledger, formula, gathered_bytes
from minifsdp.models.gpt import GPT, Block, GPTConfig

SMALL = GPTConfig(vocab=200, seq=16, layers=4, heads=2, width=64)
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def build(kind):
    torch.manual_seed(0)
    model = GPT(SMALL)
    if kind == "DP":
        return DataParallel(model, {Block})
    if kind in ShardingStrategy.__members__:
        return FullyShardedDataParallel(
            model, auto_wrap_policy={Block}, sharding_strategy=ShardingStrategy[kind]
        )
    policy = LOW if kind == "bf16" else None
    prefetch = {"backward_prefetch": None} if kind == "no prefetch" else {}
    return FullyShardedDataParallel(model, auto_wrap_policy={Block}, mixed_precision=policy, **prefetch)


def step(model, optimizer):
    rank, _ = world()
    generator = torch.Generator().manual_seed(rank)
    data = torch.randint(SMALL.vocab, (2, SMALL.seq + 1), generator=generator)
    model(data[:, :-1], data[:, 1:]).backward()
    optimizer.step()


def second_step(kind):
    """The ledger of a step with gradients gone and moments there."""
    model = build(kind)
    optimizer = ShardedAdam(model.parameters())
    step(model, optimizer)
    optimizer.zero_grad()
    with Ledger(model, optimizer) as ledger:
        step(model, optimizer)
    return model, optimizer, ledger


def ledger_and_formula(kind):
    model, _, ledger = second_step(kind)
    predicted = formula(model)
    assert {name: ledger.largest[name] for name in predicted} == predicted
    assert list(ledger.frame().columns) == [*CATEGORIES, "total"]
    assert ledger.frame().total.max() == ledger.peak["total"] == ledger.largest["total"]
    assert ledger.history[-1]["gathered"] == 0  # freed, not merely dropped
    assert ledger.history[-1]["total"] < 1.2 * sum(
        predicted[c] for c in ("parameters", "gradients", "optimizer")
    )
    return predicted


KINDS = ["DP", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "no prefetch", "bf16"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_law_3_ledger_and_formula_agree_to_the_byte(ranks, n, kind):
    ranks(n, ledger_and_formula, kind)


def formulas():
    return {kind: formula(build(kind)) for kind in KINDS}


def test_law_3_by_arithmetic(ranks):
    """The formula itself, against numbers worked out here from the shapes of the model."""
    width, padded = SMALL.width, lambda numel: -(-numel // 8) * 8
    shapes = [
        3 * width * width,
        3 * width,
        width * width,
        width,
        *[4 * width * width] * 2,
        4 * width,
        width,
        *[width] * 4,
    ]
    block = sum(map(padded, shapes))  # a multiple of 8 x 4 already
    assert block % 32 == 0
    root = SMALL.vocab * width + SMALL.seq * width + 2 * width
    total = 4 * block + root
    for found in ranks(4, formulas):
        sharded = {
            "parameters": total,
            "gradients": total,
            "optimizer": 2 * total,
        }  # 4 bytes each, on 4 ranks
        assert found["FULL_SHARD"] == sharded | {
            "gathered": 4 * (root + 2 * block)
        }  # the root, one, the next
        assert found["no prefetch"] == sharded | {"gathered": 4 * (root + block)}
        assert found["bf16"] == sharded | {"gathered": 2 * (root + 2 * block)}
        assert found["SHARD_GRAD_OP"] == sharded | {"gathered": 4 * total}
        whole = {name: 4 * value for name, value in sharded.items()}
        assert found["DP"] == found["NO_SHARD"] == whole | {"gathered": 0}


class Tracker(MemTracker):
    """Without hooks on parameters, which a gathered one, no leaf, refuses; they only tell categories
    apart."""

    def _track_module_params_and_buffers(self, module, install_grad_hooks=True):
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)


def against_mem_tracker(kind):
    model, optimizer, ledger = second_step(kind)
    optimizer.zero_grad()
    tracker = Tracker()
    tracker.track_external(model, optimizer)
    with tracker, warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # the tracker asks gathered parameters, which are no leaves, for their .grad
        step(model, optimizer)
    theirs = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return ledger.peak["total"], theirs


@pytest.mark.parametrize("kind", ["DP", "FULL_SHARD"])
def test_the_ledger_agrees_with_torchs_memory_tracker(ranks, kind):
    for ours, theirs in ranks(2, against_mem_tracker, kind):
        assert ours == pytest.approx(theirs, rel=0.02)


def limits():
    """At most the root, the unit in use and the one that is prefetched are ever gathered."""
    model = build("FULL_SHARD")
    optimizer = ShardedAdam(model.parameters())
    found, most = units(model), 0
    for unit in found:
        original = unit._start_gather

        def counted(original=original):
            nonlocal most
            original()
            most = max(most, sum(u.gathered for u in found))

        unit._start_gather = counted
    step(model, optimizer)
    assert most == 3
    assert all(flat.storage.nbytes() == 0 for unit in found for flat in unit.flats)
    with torch.no_grad():
        model(torch.zeros(1, SMALL.seq, dtype=torch.long))
    assert all(flat.storage.nbytes() == 0 for unit in found for flat in unit.flats)
    return sum(
        p.untyped_storage().nbytes()
        for p in {p.untyped_storage().data_ptr(): p for p in model.parameters()}.values()
    ), [gathered_bytes(u) for u in found]


def test_law_3_no_more_is_gathered_than_named_and_nothing_stays(ranks):
    for at_rest, gathered in ranks(4, limits):
        assert at_rest == sum(gathered) / 4
