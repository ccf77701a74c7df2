"""Unit sharding: many parameters become one flat buffer, padded so that it splits into N equal shards.

    parameters      [ w1 (3, 2) ]  [ b1 (3,) ]  [ w2 (2, 3) ]
    flat buffer     w1 w1 w1 w1 w1 w1 -- -- b1 b1 b1 -- w2 w2 w2 w2 w2 w2 -- -- -- -- -- --      -- is padding
    shard of rank   |---------- 0 ---------|----------- 1 ----------|---- ...

One buffer means one collective for all the parameters of a unit, and views into it need no copy in or out.
The idea is the FlatParameter of PyTorch's FSDP (Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully
Sharded Data Parallel", 2023, section 3.2.1), which goes back to ZeRO (Rajbhandari et al., 2020).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 8  # elements: the 16 bytes on which tensor cores want an fp16 or bf16 matrix to start


@dataclass(frozen=True)
class Slot:
    """Where one parameter lies in the flat buffer, in elements."""

    name: str
    shape: torch.Size
    stride: tuple[int, ...]  # the parameter's own order in memory, channels-last for one
    offset: int
    numel: int

    def view(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> Tensor:
        """The parameter's full tensor inside a gathered storage.

        A fresh tensor each time and no view in autograd's eyes: it has a version counter of its own, so that
        filling the storage again for backward is not taken for a change of what forward saved.
        """
        return torch.empty(0, dtype=dtype, device=storage.device).set_(
            storage, self.offset, self.shape, self.stride
        )

    def of(self, flat: Tensor) -> Tensor:
        """The parameter's full tensor as a view of the flat buffer (P,)."""
        return flat.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Layout:
    """The plan of one flat buffer: a slot for each parameter, and the same number of elements for each shard.

    ``parts`` is the number of ranks that the padding allows for. Strategies that split the buffer into fewer
    shards keep it, so that the ring cuts it at the same places and sums in the same order.
    """

    slots: tuple[Slot, ...]
    padded: int  # elements of the whole buffer, a multiple of parts
    parts: int

    @classmethod
    def plan(cls, named: Sequence[tuple[str, Tensor]], parts: int) -> Layout:
        """Lay out ``named`` tensors one after another, each on an aligned start."""
        slots, end = [], 0
        for name, tensor in named:
            stride = torch.empty_like(tensor, device="meta").stride()  # dense, the order of dimensions kept
            slots.append(Slot(name, tensor.shape, stride, end, tensor.numel()))
            end += _round_up(tensor.numel(), ALIGNMENT)
        return cls(tuple(slots), _round_up(end, ALIGNMENT * parts), parts)

    def gaps(self) -> Iterator[tuple[int, int]]:
        """(start, stop) of each stretch of padding."""
        ends = [slot.offset + slot.numel for slot in self.slots]
        starts = [slot.offset for slot in self.slots[1:]] + [self.padded]
        return ((end, start) for end, start in zip(ends, starts, strict=True) if end < start)

    def piece(self, slot: Slot, rank: int, shards: int) -> tuple[int, int]:
        """(start, stop) of the part of ``slot`` that lies in the shard of ``rank``, counted from the shard's
        start."""
        numel = self.padded // shards
        first = rank * numel
        start = min(max(slot.offset - first, 0), numel)
        stop = min(max(slot.offset + slot.numel - first, 0), numel)
        return start, stop

    def take_shard(self, tensors: Sequence[Tensor], rank: int, shards: int) -> Tensor:
        """The shard of ``rank``, (padded / shards,), cut out of the full parameters; the whole is never
        built."""
        numel = self.padded // shards
        shard = torch.zeros(numel, dtype=tensors[0].dtype, device=tensors[0].device)
        for slot, tensor in zip(self.slots, tensors, strict=True):
            start, stop = self.piece(slot, rank, shards)
            if start < stop:
                skip = rank * numel + start - slot.offset
                dense = tensor if tensor.stride() == slot.stride else torch.empty_like(tensor).copy_(tensor)
                flat = dense.as_strided((slot.numel,), (1,))  # in memory order
                shard[start:stop] = flat[skip : skip + stop - start]
        return shard

    def add(
        self,
        tensors: Sequence[Tensor | None],
        buffer: Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Add full tensors, one a slot, to a flat buffer (P,), to a new one in ``dtype`` if there is none.

        What is missing counts as 0, and so does the padding: it is summed and stepped like everything else.
        """
        fresh = buffer is None
        if fresh:
            buffer = torch.empty(self.padded, dtype=dtype, device=device)
            for start, stop in self.gaps():
                buffer[start:stop].zero_()
        for slot, tensor in zip(self.slots, tensors, strict=True):
            if tensor is not None:
                slot.of(buffer).copy_(tensor) if fresh else slot.of(buffer).add_(tensor)
            elif fresh:
                slot.of(buffer).zero_()
        return buffer


def neighbours(columns: Sequence[Sequence[Tensor]]) -> Iterator[tuple[int, int]]:
    """Split rows of 1-D tensors into the longest runs that lie next to each other in memory, in every column.

    Yields (start, stop) row numbers. The pieces of a unit, their gradients and their optimizer state each lie
    in one buffer at the same distances, so a whole unit is one run, and :func:`join` makes it one tensor.
    """
    start = 0
    rows = list(zip(*columns, strict=True))
    for i in range(1, len(rows) + 1):
        if i == len(rows) or not _adjacent(rows[i - 1], rows[i]):
            yield start, i
            start = i


def join(tensors: Sequence[Tensor]) -> Tensor:
    """One flat tensor over a run of neighbours, the padding between them included."""
    first, last = tensors[0], tensors[-1]
    numel = last.storage_offset() + last.numel() - first.storage_offset()
    return first.as_strided((numel,), (1,))


def _adjacent(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether in each column right follows left in one storage, with nothing but padding between them.

    Every parameter starts on an aligned element, so a gap smaller than the alignment has no other parameter
    in it.
    """
    gaps = set()
    for a, b in zip(left, right, strict=True):
        if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or a.dtype != b.dtype:
            return False
        gaps.add(b.storage_offset() - a.storage_offset() - a.numel())
    return len(gaps) == 1 and 0 <= gaps.pop() < ALIGNMENT


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
