"""Train one GPT twice, with data parallel and fully sharded, and compare:

torchrun --nproc-per-node 4 -m minifsdp.demo
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from minifsdp import plots
from minifsdp.baselines.data_parallel import DataParallel
from minifsdp.collectives import Communicator, Traffic
from minifsdp.data import batches, part_of, read_text
from minifsdp.fsdp import FullyShardedDataParallel, full_state_dict
from minifsdp.memory import CATEGORIES, Ledger, formula
from minifsdp.models.gpt import GPT, Block, GPTConfig
from minifsdp.optim import ShardedAdam, clip_grad_norm_
from minifsdp.precision import MixedPrecision, ShardedGradScaler
from minifsdp.strategy import ShardingStrategy

UNITS = {"block": {Block}, "layer": {nn.Linear, nn.LayerNorm}, "model": None}
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
TIME_LIMIT = timedelta(seconds=120)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The flags, with their defaults."""
    parser = argparse.ArgumentParser(prog="minifsdp.demo", description=__doc__)
    add = parser.add_argument
    add("--steps", type=int, default=50, help="optimizer steps of each run")
    add("--batch", type=int, default=8, help="sequences a rank and step")
    add("--seq", type=int, default=32, help="bytes a sequence")
    add("--layers", type=int, default=6)
    add("--width", type=int, default=384)
    add("--heads", type=int, default=6)
    add("--units", choices=UNITS, default="block", help="what is gathered together")
    add("--strategy", choices=[s.name.lower() for s in ShardingStrategy], default="full_shard")
    add("--precision", choices=["auto", *DTYPES], default="auto")
    add("--collectives", choices=["auto", "ring", "native"], default="auto")
    add("--lr", type=float, default=1e-3)
    add("--clip", type=float, default=1.0, help="largest norm of the gradient; 0: do not clip")
    add("--accumulate", type=int, default=1, help="batches a step")
    add("--seed", type=int, default=0)
    add("--text", type=Path, help="a file to train on; default: the standard library's source")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto")
    add("--backend", choices=["auto", "gloo", "nccl"], default="auto")
    add("--skip-baseline", action="store_true", help="do not run data parallel")
    add("--out", type=Path, default=Path("out"), help="folder for the figure")
    add("--json", type=Path, help="write the results to this file")
    options = parser.parse_args(arguments)
    for name in ("steps", "batch", "seq", "layers", "width", "heads", "accumulate"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1")
    if options.width % options.heads:
        parser.error(f"--width {options.width} does not split into --heads {options.heads}")
    return options


# --- Where it runs ------------------------------------------------------------------------------------------


@dataclass
class Place:
    """Device, backend and precision, and why."""

    device: torch.device
    backend: str
    precision: str = "fp32"
    why: str = ""


def choose_place(options: argparse.Namespace) -> Place:
    """CUDA and NCCL where every rank has a GPU of its own, else CPU and gloo, unless the flags say
    otherwise."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    gpus = torch.cuda.device_count()
    cuda = options.device == "cuda" or (options.device == "auto" and gpus >= ranks)
    if cuda and not gpus:
        raise SystemExit("--device cuda: this machine shows no GPU")
    backend = options.backend
    if backend == "auto":
        backend = "nccl" if cuda and gpus >= ranks else "gloo"
    if backend == "nccl" and (not cuda or gpus < ranks):
        raise SystemExit(f"--backend nccl needs a GPU for each of {ranks} ranks, and there are {gpus}")
    why = f"{gpus} GPU{'s' * (gpus != 1)} for {ranks} rank{'s' * (ranks != 1)}"
    if not cuda:
        return Place(torch.device("cpu"), backend, why=why)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % gpus)
    torch.cuda.set_device(device)
    return Place(device, backend, why=why)


def start_process_group(backend: str, device: torch.device) -> None:
    """Join the ranks that torchrun has started, or be the only one."""
    torch.set_num_threads(1)
    alone = {} if "RANK" in os.environ else {"rank": 0, "world_size": 1, "store": dist.HashStore()}
    bound = {"device_id": device} if backend == "nccl" else {}
    dist.init_process_group(backend, timeout=TIME_LIMIT, **alone, **bound)


def choose_precision(wish: str, place: Place) -> tuple[str, str]:
    """fp16 on a GPU; on a CPU bf16 if it multiplies matrices faster than fp32 there. With the reason."""
    if wish != "auto":
        return wish, "as asked"
    if place.device.type == "cuda":
        return "fp16", "the GPU has fast fp16"
    seconds = {dtype: _seconds_a_product(dtype) for dtype in (torch.float32, torch.bfloat16)}
    ratio = seconds[torch.bfloat16] / seconds[torch.float32]
    percent = Communicator().roll_call([round(100 * ratio)])[0][0]  # rank 0 decides
    return ("bf16" if percent < 70 else "fp32"), f"a bf16 product takes {percent} % of an fp32 one's time"


def _seconds_a_product(dtype: torch.dtype, size: int = 384) -> float:
    a = torch.ones(size, size, dtype=dtype)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return min(seconds)


# --- One run ------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """What one run of training left behind."""

    losses: list[float] = field(default_factory=list)  # nats a byte, the mean over ranks
    seconds: list[float] = field(default_factory=list)  # of each step
    peak_bytes: dict[str, int] = field(default_factory=dict)
    formula_bytes: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """The part that goes into the JSON file."""
        return {
            "losses": self.losses,
            "seconds_per_step": statistics.median(self.seconds),
            "peak_bytes": self.peak_bytes,
            "formula_bytes": self.formula_bytes,
            "sent_bytes": self.sent_bytes,
        }


def train(name: str, model: nn.Module, options: argparse.Namespace, place: Place, text: Tensor) -> Run:
    """Train ``model`` and measure it. Memory and traffic are those of the second step, which is not timed."""
    run, everyone = Run(formula_bytes=formula(model)), Communicator()
    optimizer = ShardedAdam(model.parameters(), lr=options.lr)
    scaler = ShardedGradScaler(enabled=place.precision == "fp16")
    data = batches(part_of(text, everyone.rank, everyone.size), options.batch, options.seq, options.seed)

    def step() -> Tensor:
        loss = torch.zeros((), device=place.device)
        for _ in range(options.accumulate):
            tokens, targets = (t.to(place.device) for t in next(data))
            part = model(tokens, targets) / options.accumulate
            scaler.scale(part).backward()
            loss += part.detach()
        if options.clip:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model, options.clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    for i in tqdm(range(options.steps), desc=name, disable=everyone.rank != 0, unit="step"):
        optimizer.param_groups[0]["lr"] = options.lr * min(1.0, (i + 1) / 10)  # warm-up
        start = time.perf_counter()
        if i == min(1, options.steps - 1):
            on_gpu = place.device.type == "cuda"
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
            with Traffic() as traffic, Ledger(model, optimizer) as ledger:
                loss = step()
            run.peak_bytes, run.sent_bytes = ledger.largest, traffic.sent_bytes()
            if on_gpu:
                run.peak_bytes["cuda allocator"] = torch.cuda.max_memory_allocated()
        else:
            loss = step()
        everyone.all_reduce(loss, "mean").wait()
        run.losses.append(loss.item())  # waits for the GPU, too
        if i != 1:
            run.seconds.append(time.perf_counter() - start)
    return run


def build(options: argparse.Namespace, place: Place) -> GPT:
    """The model, with the same start on every rank and in both runs."""
    torch.manual_seed(options.seed)
    config = GPTConfig(256, options.seq, options.layers, options.heads, options.width)
    return GPT(config).to(place.device)


def run_both(options: argparse.Namespace, place: Place, text: Tensor) -> tuple[Run | None, Run]:
    """Data parallel first, then fully sharded."""
    dtype = DTYPES[place.precision]
    policy = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32 if dtype else None)
    dp = None
    if not options.skip_baseline:
        communicator = Communicator(algorithm=options.collectives)
        model = DataParallel(build(options, place), UNITS[options.units], policy, communicator)
        dp = train("DP  ", model, options, place, text)
        dp.state = {name: p.detach().cpu().clone() for name, p in model.module.state_dict().items()}
        del model
    model = FullyShardedDataParallel(
        build(options, place),
        auto_wrap_policy=UNITS[options.units],
        mixed_precision=policy,
        sharding_strategy=ShardingStrategy[options.strategy.upper()],
        collectives=options.collectives,
    )
    fsdp = train("FSDP", model, options, place, text)
    fsdp.state = full_state_dict(model, rank0_only=True)
    return dp, fsdp


def continue_text(options: argparse.Namespace, state: dict[str, Tensor], text: Tensor) -> str:
    """What the trained model writes after the first bytes of the text, run whole on this one process."""
    model = build(options, Place(torch.device("cpu"), "gloo"))
    model.load_state_dict(state)
    prompt = text[: options.seq].long()[None]  # (1, T)
    written = model.generate(prompt, 120)[0, prompt.shape[1] :]
    return bytes(written.tolist()).decode(errors="replace")


# --- What it shows ------------------------------------------------------------------------------------------


def largest_difference(dp: Run, fsdp: Run) -> float:
    """Between any parameter of the two runs."""
    return max(float((dp.state[name] - fsdp.state[name]).abs().max()) for name in fsdp.state)


def memory_frame(runs: dict[str, Run]) -> pd.DataFrame:
    """One row a run and category: measured and formula bytes."""
    rows = [
        (name, category, run.peak_bytes[category], run.formula_bytes.get(category))
        for name, run in runs.items()
        for category in CATEGORIES
    ]
    return pd.DataFrame(rows, columns=["parallelism", "category", "measured_bytes", "formula_bytes"])


def results_table(runs: dict[str, Run]) -> pd.DataFrame:
    """The rows that the demo prints, one column a run."""
    table: dict[str, dict[str, str]] = {}
    for name, run in runs.items():
        column = {
            "loss at start": f"{run.losses[0]:.4f}",
            "loss at end": f"{run.losses[-1]:.4f}",
            "seconds a step": f"{statistics.median(run.seconds):.3f}",
        }
        for category in run.peak_bytes:
            by_formula = run.formula_bytes.get(category)
            predicted = "" if by_formula is None else f"  (formula {by_formula / 2**20:.2f})"
            column[f"{category}, MiB"] = f"{run.peak_bytes[category] / 2**20:.2f}{predicted}"
        for collective, sent in run.sent_bytes.items():
            column[f"sent by {collective}, MiB"] = f"{sent / 2**20:.4g}"
        table[name] = column
    return pd.DataFrame(table).fillna("")


def save_figure(runs: dict[str, Run], folder: Path) -> Path:
    """Draw memory and losses into ``folder``."""
    matplotlib.use("agg")
    losses = pd.DataFrame(
        [(name, step, loss) for name, run in runs.items() for step, loss in enumerate(run.losses)],
        columns=["parallelism", "step", "loss"],
    )
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / "demo.png").resolve()
    plots.overview(memory_frame(runs), losses).savefig(path, dpi=150)
    return path


def main(arguments: list[str] | None = None) -> None:
    """Run the demo on every rank; rank 0 reports."""
    options = parse_arguments(arguments)
    place = choose_place(options)
    start_process_group(place.backend, place.device)
    try:
        place.precision, reason = choose_precision(options.precision, place)
        world = dist.get_world_size()
        text = read_text(options.text)
        if dist.get_rank() == 0:
            print(
                f"{world} rank{'s' * (world != 1)} on {place.device.type} over {place.backend} "
                f"({place.why}), "
                f"{place.precision} ({reason})",
                flush=True,
            )
            if world == 1:
                print(
                    "One rank shards nothing. For four: torchrun --nproc-per-node 4 -m minifsdp.demo",
                    flush=True,
                )
        dp, fsdp = run_both(options, place, text)
        if dist.get_rank() == 0:
            report(options, place, dp, fsdp, continue_text(options, fsdp.state, text))
    finally:
        dist.destroy_process_group()


def report(options: argparse.Namespace, place: Place, dp: Run | None, fsdp: Run, written: str) -> None:
    """Print the table, save the figure, and write the JSON file."""
    runs = {"DP": dp, "FSDP": fsdp} if dp else {"FSDP": fsdp}
    params = sum(tensor.numel() for name, tensor in fsdp.state.items() if name != "head.weight")  # tied
    difference = largest_difference(dp, fsdp) if dp else None
    print(
        f"\n{params / 1e6:.1f} M parameters, {dist.get_world_size()} ranks; memory is the largest of one rank"
    )
    print(results_table(runs).to_string())
    if dp:
        print(f"largest difference between a parameter of the two runs: {difference:.1e}")
    print(f"\nThe sharded model goes on writing:\n{written}\n")
    print(f"figure: {save_figure(runs, options.out)}")
    if options.json:
        results = {
            "world_size": dist.get_world_size(),
            "device": place.device.type,
            "backend": place.backend,
            "precision": place.precision,
            "strategy": options.strategy,
            "params": params,
            "steps": options.steps,
            "dp": dp and dp.summary(),
            "fsdp": fsdp.summary(),
            "max_abs_param_diff": difference,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"results: {options.json.resolve()}")


if __name__ == "__main__":
    main()
