"""The same promises on a GPU. Collected with ``-m gpu``; skipped where there is none."""

import copy

import pytest
import torch
import torch.distributed as dist
from models import TINY, joined, relative_difference, shard_blocks, tiny_gpt, tokens, torch_full, world
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from minifsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardedAdam,
    ShardedGradScaler,
    full_state_dict,
    fully_shard,
)
from minifsdp.collectives import Communicator
from minifsdp.memory import Ledger, formula
from minifsdp.models.gpt import GPT, Block, GPTConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]


def on_gpu(batch):
    return [t.cuda() for t in batch]


def parity():
    """Several ranks on one GPU over gloo, which stages through pinned memory: equal to one process in
    fp64."""
    rank, n = world()
    reference = tiny_gpt(torch.float64).cuda()
    model = shard_blocks(copy.deepcopy(reference))
    optimizers = ShardedAdam(model.parameters(), lr=1e-2), torch.optim.Adam(reference.parameters(), lr=1e-2)
    for step in range(20):
        model(*on_gpu(tokens(step, rank))).backward()
        reference(*on_gpu(joined(step, n))).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = {name: p.cpu() for name, p in reference.state_dict().items()}
    assert relative_difference(full_state_dict(model), expected) < 1e-10


@pytest.mark.parametrize("n", [1, 2, 4])
def test_law_1_several_ranks_on_one_gpu_over_gloo(ranks, n):
    ranks(n, parity)


def rings():
    rank, n = world()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        comm = Communicator(algorithm="ring")
        gathered = torch.empty(n * 5, dtype=dtype, device="cuda")
        comm.all_gather(gathered, torch.full((5,), float(rank), dtype=dtype, device="cuda")).wait()
        assert gathered.view(n, 5)[:, 0].tolist() == list(range(n))
        chunk = torch.empty(5, dtype=dtype, device="cuda")
        comm.reduce_scatter(chunk, torch.full((n * 5,), float(rank), dtype=dtype, device="cuda")).wait()
        assert set(chunk.tolist()) == {sum(range(n))}


@pytest.mark.parametrize("n", [2, 3])
def test_rings_stage_gpu_tensors(ranks, n):
    ranks(n, rings)


def memory():
    torch.manual_seed(0)
    model = GPT(GPTConfig(seq=64, layers=4, heads=4, width=256)).cuda()
    model = FullyShardedDataParallel(model, auto_wrap_policy={Block})
    optimizer = ShardedAdam(model.parameters())
    data = torch.randint(256, (2, 65), device="cuda")

    def step():
        model(data[:, :-1], data[:, 1:]).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with Ledger(model, optimizer) as ledger:
        step()
    predicted = formula(model)
    assert {name: ledger.largest[name] for name in predicted} == predicted
    return ledger.peak["total"], torch.cuda.max_memory_allocated()


def test_law_3_the_ledger_beside_the_allocator(ranks):
    for ledger, allocator in ranks(2, memory):
        assert ledger <= allocator  # which rounds up, and counts what libraries take for themselves


def test_nccl_with_one_rank():
    """fp16 with a scaler on NCCL: equal to torch's ``fully_shard`` to the bit."""
    store = dist.HashStore()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, store=store, device_id=torch.device("cuda", 0))
    try:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
        torch.manual_seed(0)
        start = GPT(TINY).cuda()
        ours = shard_blocks(copy.deepcopy(start), fully_shard, mp_policy=policy)
        theirs = shard_blocks(copy.deepcopy(start), torch_fully_shard, mp_policy=policy)
        assert MixedPrecision(param_dtype=torch.float16).param_dtype == policy.param_dtype
        optimizers = torch.optim.Adam(ours.parameters()), torch.optim.Adam(theirs.parameters())
        for step in range(5):
            for model, optimizer in zip((ours, theirs), optimizers, strict=True):
                scaler = ShardedGradScaler(init_scale=256.0)
                scaler.scale(model(*on_gpu(tokens(step, 0)))).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        expected = {name: p.cpu() for name, p in torch_full(theirs).items()}
        assert relative_difference(full_state_dict(ours), expected) < 1e-6
    finally:
        dist.destroy_process_group()
