"""Collectives: how ranks exchange tensors. No other file of the package talks to other ranks.

Three collectives carry all of sharded training. Each is written here as a *ring* that can be followed step by
step: in every step each rank sends one chunk to the rank on its right and receives one from that on its left.

    all-gather       every rank has 1 chunk, at the end every rank has all N         N - 1 steps
    reduce-scatter   every rank has N chunks, at the end rank r has the sum of r's   N - 1 steps
    all-reduce       a reduce-scatter, then an all-gather                            2 (N - 1) steps

A rank sends (N - 1) / N of the buffer in each of the first two, which no algorithm can beat (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). The backend's own
collectives are the other choice, with the same signature: "native" is the right one on NCCL, and on gloo the
ring is the faster one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar

import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor

# --- Traffic: every byte that leaves this rank --------------------------------------------------------------


@dataclass
class Call:
    """One collective as this rank saw it."""

    name: str  # all_gather, reduce_scatter, all_reduce, broadcast or roll_call
    unit: str  # the unit it was for
    dtype: str
    elements: int  # of the whole buffer, all ranks' chunks together
    sent_bytes: int = 0  # what this rank sent


class Traffic:
    """Records each collective that this rank takes part in.

    >>> with Traffic() as traffic:
    ...     loss.backward()
    >>> traffic.frame().groupby("name").sent_bytes.sum()

    A ring counts what it hands to ``isend``; for a native collective the bytes are those of the
    bandwidth-optimal algorithm, since a backend does not tell.
    """

    # Not thread-local: on a GPU, autograd runs backward on threads of its own.
    _open: ClassVar[list[Traffic]] = []

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.rank = -1

    def __enter__(self) -> Traffic:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        Traffic._open.append(self)
        return self

    def __exit__(self, *exc: object) -> None:
        Traffic._open.remove(self)

    @classmethod
    def record(cls, call: Call) -> Call:
        for traffic in cls._open:
            if traffic.rank == dist.get_rank():  # ranks can also be threads of one process
                traffic.calls.append(call)
        return call

    def frame(self) -> pd.DataFrame:
        """One row a call, in order; columns name, unit, dtype, elements, sent_bytes."""
        columns = ["name", "unit", "dtype", "elements", "sent_bytes"]
        return pd.DataFrame([asdict(call) for call in self.calls], columns=columns)

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that this rank sent, by collective."""
        sent = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
        for call in self.calls:
            sent[call.name] = sent.get(call.name, 0) + call.sent_bytes
        return sent


# --- The rings ----------------------------------------------------------------------------------------------
# Each is a generator that yields the messages under way: whoever drives it decides when to wait for them.

Messages = list[dist.Work]
Combine = Callable[..., Tensor]  # torch.add or torch.maximum


@dataclass
class Ring:
    """The neighbours of one rank, and the count of what it sends."""

    group: dist.ProcessGroup
    rank: int
    size: int
    call: Call

    def exchange(self, send: Tensor, receive: Tensor) -> Messages:
        """Start to send one chunk to the right and receive one from the left; nothing for an empty one."""
        right, left = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        messages = []
        if send.numel():
            self.call.sent_bytes += send.nbytes
            messages.append(dist.isend(send, group=self.group, group_dst=right))
        if receive.numel():
            messages.append(dist.irecv(receive, group=self.group, group_src=left))
        return messages


def ring_all_gather(ring: Ring, chunks: Sequence[Tensor]) -> Iterator[Messages]:
    """``chunks[rank]`` is ours; fill in the others. Each step passes on the chunk that came in the last."""
    r, n = ring.rank, ring.size
    for step in range(n - 1):
        yield ring.exchange(send=chunks[(r - step) % n], receive=chunks[(r - step - 1) % n])


def ring_reduce_scatter(
    ring: Ring, chunks: Sequence[Tensor], output: Tensor, combine: Combine = torch.add
) -> Iterator[Messages]:
    """Sum chunk c over all ranks: it starts at rank c + 1, each rank on the way adds its own, rank c ends it.

    So the order of the sum is c + 1, c + 2, ..., c on every run. The partial sums are kept in ``chunks``.
    """
    r, n = ring.rank, ring.size
    received = torch.empty_like(max(chunks, key=Tensor.numel))
    for step in range(n - 1):
        ours = chunks[(r - step - 2) % n]
        theirs = received[: ours.numel()]
        yield ring.exchange(send=chunks[(r - step - 1) % n], receive=theirs)
        combine(ours, theirs, out=output if step == n - 2 else ours)


def ring_all_reduce(ring: Ring, chunks: Sequence[Tensor], combine: Combine = torch.add) -> Iterator[Messages]:
    """Sum all chunks over all ranks: each rank sums one of them, and then all gather the sums."""
    yield from ring_reduce_scatter(ring, chunks, chunks[ring.rank], combine)
    yield from ring_all_gather(ring, chunks)


class Pending:
    """A collective under way. Its tensors belong to it until ``wait`` has returned."""

    def __init__(self, steps: Iterator[Messages]) -> None:
        self.steps = steps
        self.messages = next(steps, None)  # the first step is on its way before anyone waits

    def wait(self) -> None:
        while self.messages is not None:
            for message in self.messages:
                message.wait()
            self.messages = next(self.steps, None)


# --- The communicator: one process group, and the way its collectives are run -------------------------------

COMBINE = {"sum": torch.add, "mean": torch.add, "max": torch.maximum}
NATIVE_OP = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# torch 2.13 renamed these two, and warns about the old names.
native_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
native_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Communicator:
    """The collectives of one process group.

    Args:
        group: the ranks that take part; default: all.
        algorithm: ``"ring"``, ``"native"`` (the backend's own), or ``"auto"``: the ring on gloo, else native.

    Every collective takes flat contiguous tensors and returns a :class:`Pending`: it is asynchronous until
    its ``wait``. All ranks of the group must call the same collectives in the same order. ``unit`` is what
    :class:`Traffic` files the call under.

    Raises:
        RuntimeError: there is no process group yet.
        ValueError: tensors of the wrong size, dtype or device, or an unknown algorithm or operation.
    """

    group: dist.ProcessGroup | None = None
    algorithm: str = "auto"
    rank: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        if self.algorithm not in ("auto", "ring", "native"):
            raise ValueError(f"algorithm must be 'auto', 'ring' or 'native', not {self.algorithm!r}")
        if not dist.is_initialized():
            raise RuntimeError(
                "there is no process group yet: call torch.distributed.init_process_group() first, "
                "in a program that torchrun started"
            )
        self.group = self.group or dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ValueError(f"rank {dist.get_rank()} is not in the process group it was given")
        config = str(dist.get_backend_config(self.group))  # "cpu:gloo,cuda:nccl"
        self.backends = dict(entry.split(":") for entry in config.split(","))

    def all_gather(self, output: Tensor, shard: Tensor, unit: str = "") -> Pending:
        """Fill ``output`` (N * S,) with the ``shard`` (S,) of every rank, in the order of ranks.

        ``shard`` may be this rank's own slot of ``output``; then nothing is copied.
        """
        self._check("all_gather", output, shard)
        return Pending(self._all_gather(output, shard, unit))

    def reduce_scatter(self, output: Tensor, buffer: Tensor, op: str = "sum", unit: str = "") -> Pending:
        """Fill ``output`` (S,) with our chunk of the sum, mean or max of all ranks' ``buffer`` (N * S,).

        ``buffer`` is scratch afterwards.
        """
        self._check("reduce_scatter", buffer, output, op)
        return Pending(self._reduce_scatter(output, buffer, op, unit))

    def all_reduce(self, buffer: Tensor, op: str = "sum", unit: str = "") -> Pending:
        """Replace ``buffer``, of any length, by its sum, mean or max over ranks: the same bits on each."""
        self._check("all_reduce", buffer, op=op)
        return Pending(self._all_reduce(buffer, op, unit))

    def _all_gather(self, output: Tensor, shard: Tensor, unit: str) -> Iterator[Messages]:
        call = self._record("all_gather", output, unit)
        slot = output.view(self.size, -1)[self.rank]
        if slot.data_ptr() != shard.data_ptr():
            slot.copy_(shard)
        if not self._runs_ring(output):
            call.sent_bytes = (self.size - 1) * shard.nbytes
            yield [native_all_gather(output, slot, group=self.group, async_op=True)]
            return
        host = self._on_host(output)
        yield from ring_all_gather(self._ring(call), host.view(self.size, -1).unbind())
        _from_host(output, host)

    def _reduce_scatter(self, output: Tensor, buffer: Tensor, op: str, unit: str) -> Iterator[Messages]:
        call = self._record("reduce_scatter", buffer, unit)
        before, after = self._divisors(op, buffer.dtype)
        _divide(buffer, before)
        if self.size == 1:
            output.copy_(buffer)
        elif not self._runs_ring(buffer):
            call.sent_bytes = (self.size - 1) * output.nbytes
            yield [native_reduce_scatter(output, buffer, op=NATIVE_OP[op], group=self.group, async_op=True)]
        else:
            host, chunks = self._on_host(output), self._on_host(buffer).view(self.size, -1).unbind()
            yield from ring_reduce_scatter(self._ring(call), chunks, host, COMBINE[op])
            _from_host(output, host)
        _divide(output, after)

    def _all_reduce(self, buffer: Tensor, op: str, unit: str) -> Iterator[Messages]:
        call = self._record("all_reduce", buffer, unit)
        before, after = self._divisors(op, buffer.dtype)
        _divide(buffer, before)
        if not self._runs_ring(buffer):
            call.sent_bytes = 2 * (self.size - 1) * buffer.nbytes // self.size
            yield [dist.all_reduce(buffer, op=NATIVE_OP[op], group=self.group, async_op=True)]
        elif self.size > 1:
            host = self._on_host(buffer)
            yield from ring_all_reduce(self._ring(call), host.view(-1).tensor_split(self.size), COMBINE[op])
            _from_host(buffer, host)
        _divide(buffer, after)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` by that of the rank ``source`` of this group; blocking."""
        call = self._record("broadcast", tensor, "")
        call.sent_bytes = (self.size - 1) * tensor.nbytes if self.rank == source else 0
        dist.broadcast(tensor, group=self.group, group_src=source)

    def roll_call(self, words: Sequence[int], unit: str = "") -> list[list[int]]:
        """Every rank's ``words``, a few integers, the same number on every rank; blocking."""
        rows = torch.zeros(self.size, len(words), dtype=torch.int64)
        rows[self.rank] = torch.tensor(words, dtype=torch.int64)
        call = self._record("roll_call", rows, unit)
        others = [r for r in range(self.size) if r != self.rank]
        call.sent_bytes = len(others) * rows[0].nbytes
        group = self._control_group
        messages = [dist.isend(rows[self.rank], group=group, group_dst=other) for other in others]
        messages += [dist.irecv(rows[other], group=group, group_src=other) for other in others]
        for message in messages:
            message.wait()
        return rows.tolist()

    def gather_text(self, text: str) -> list[str]:
        """Every rank's ``text``, in the order of ranks; blocking."""
        data = text.encode()
        sizes = [size for (size,) in self.roll_call([len(data)])]
        padded = data.ljust(max(sizes), b"\0")
        rows = self.roll_call(list(padded))
        return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]

    @property
    def _control_group(self) -> dist.ProcessGroup:
        """Where CPUs exchange small messages."""
        return self.group if self.backends.get("cpu") == "gloo" else _gloo_twin(self.group)

    def _ring(self, call: Call) -> Ring:
        return Ring(self.group, self.rank, self.size, call)

    def _record(self, name: str, buffer: Tensor, unit: str) -> Call:
        return Traffic.record(Call(name, unit, str(buffer.dtype).removeprefix("torch."), buffer.numel()))

    def _runs_ring(self, tensor: Tensor) -> bool:
        if self.algorithm == "auto":
            return self.backends.get(tensor.device.type) == "gloo"
        return self.algorithm == "ring"

    def _divisors(self, op: str, dtype: torch.dtype) -> tuple[float, float]:
        """What a mean divides by before and after the sum; in fp16, of narrow range, about sqrt(N) each.

        Where to divide fp16 follows torch's ``fully_shard``, so that the bits agree.
        """
        if op != "mean":
            return 1, 1
        if dtype != torch.float16:
            return 1, self.size
        before = 1
        while self.size % before == 0 and self.size / before > before:
            before *= 2
        return before, self.size / before

    def _check(self, name: str, whole: Tensor, part: Tensor | None = None, op: str = "sum") -> None:
        where = f"{name} on rank {self.rank}"
        if op not in COMBINE:
            raise ValueError(f"{where}: op must be one of {', '.join(COMBINE)}, not {op!r}")
        if not whole.is_contiguous():
            raise ValueError(f"{where}: the buffer must be contiguous; call .contiguous() first")
        if part is None:
            return
        if part.dtype != whole.dtype or part.device != whole.device:
            raise ValueError(
                f"{where}: both tensors need one dtype and device, "
                f"not {part.dtype} on {part.device} and {whole.dtype} on {whole.device}"
            )
        if part.numel() * self.size != whole.numel():
            raise ValueError(
                f"{where}: a buffer of {whole.numel()} elements is not {self.size} chunks of {part.numel()}; "
                f"pad it to a multiple of the {self.size} ranks"
            )

    def _on_host(self, tensor: Tensor) -> Tensor:
        """gloo sends and receives CPU tensors only: a GPU's goes through a pinned copy."""
        if tensor.is_cpu or self.backends.get(tensor.device.type) != "gloo":
            return tensor
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


@functools.cache
def _gloo_twin(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks for CPU tensors, made once, where the group itself moves GPU tensors only."""
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(ranks, backend="gloo", use_local_synchronization=True)


def _divide(tensor: Tensor, divisor: float) -> None:
    if divisor != 1:
        tensor.div_(divisor)


def _from_host(tensor: Tensor, host: Tensor) -> None:
    if host is not tensor:
        tensor.copy_(host)
