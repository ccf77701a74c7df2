"""Time one training step under several systems side by side, their rounds interleaved:

torchrun --nproc-per-node 4 -m minifsdp.bench

A machine's speed drifts, so only the ratio of two times from the same round means something.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minifsdp.baselines.data_parallel import DataParallel
from minifsdp.fsdp import fully_shard
from minifsdp.models.gpt import GPT, Block, GPTConfig
from minifsdp.optim import ShardedAdam

BASE = "torch fully_shard"


def systems(model: GPT) -> dict[str, Callable[[], tuple[nn.Module, torch.optim.Optimizer]]]:
    """A way to build the model and its optimizer under each system."""

    def sharded(shard: Callable[..., nn.Module], optimizer: type) -> tuple[nn.Module, torch.optim.Optimizer]:
        ours = copy.deepcopy(model)
        for block in ours.blocks:
            shard(block)
        shard(ours)
        return ours, optimizer(ours.parameters())

    def data_parallel(
        wrap: Callable[[nn.Module], nn.Module], optimizer: type
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        ours = wrap(copy.deepcopy(model))
        return ours, optimizer(ours.parameters())

    return {
        BASE: lambda: sharded(torch.distributed.fsdp.fully_shard, torch.optim.Adam),
        "minifsdp fully_shard": lambda: sharded(fully_shard, ShardedAdam),
        "torch DDP": lambda: data_parallel(DistributedDataParallel, torch.optim.Adam),
        "minifsdp DP": lambda: data_parallel(lambda m: DataParallel(m, {Block}), ShardedAdam),
    }


def main() -> None:
    """Measure and, on rank 0, print each system's median time and its ratio to torch's ``fully_shard``."""
    parser = argparse.ArgumentParser(prog="minifsdp.bench", description=__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2, help="sequences a rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--csv", type=Path, help="write the times here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.manual_seed(0)
    config = GPTConfig(256, options.seq, options.layers, options.heads, options.width)
    built = {name: build() for name, build in systems(GPT(config)).items()}
    data = torch.randint(256, (options.batch, options.seq + 1))
    rows = []
    for round in range(-1, options.rounds):  # the first warms up
        for name, (model, optimizer) in built.items():
            dist.barrier()
            start = time.perf_counter()
            model(data[:, :-1], data[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if round >= 0:
                rows.append((round, name, time.perf_counter() - start))
    if dist.get_rank() == 0:
        report(pd.DataFrame(rows, columns=["round", "system", "seconds"]), options)
    dist.destroy_process_group()


def report(frame: pd.DataFrame, options: argparse.Namespace) -> None:
    """Print median seconds and the median, smallest and largest ratio of a round."""
    seconds = frame.pivot(index="round", columns="system", values="seconds")
    ratios = seconds.div(seconds[BASE], axis=0)
    table = pd.DataFrame(
        {
            "seconds": seconds.median(),
            "ratio": ratios.median(),
            "lowest": ratios.min(),
            "highest": ratios.max(),
        }
    )
    print(f"{dist.get_world_size()} ranks, gloo, torch {torch.__version__}, {options.rounds} rounds")
    print(table.round(3).to_string())
    if options.csv:
        frame.to_csv(options.csv, index=False)


if __name__ == "__main__":
    main()
