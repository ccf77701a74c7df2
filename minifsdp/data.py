"""Real text that every machine already has: the source of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor


def read_text(path: str | Path | None = None) -> Tensor:
    """The bytes of a file, or of the standard library's modules in the order of their names: (T,) of uint8.

    Raises:
        ValueError: the file is missing or empty.
    """
    if path is None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        data = b"\n".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
    else:
        if not Path(path).is_file():
            raise ValueError(f"there is no file {path}")
        data = Path(path).read_bytes()
    if not data:
        raise ValueError(f"{path or folder} has no text in it")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def part_of(text: Tensor, rank: int, ranks: int) -> Tensor:
    """The part of the text that one rank reads: ranks must not read the same, or they learn the same."""
    if ranks < 1 or not 0 <= rank < ranks:
        raise ValueError(f"rank {rank} of {ranks} ranks does not exist")
    size = len(text) // ranks
    return text[rank * size : (rank + 1) * size]


def batches(text: Tensor, batch: int, seq: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of the text, for ever: ``tokens`` and ``targets``, both (batch, seq), the second one
    byte later.

    Raises:
        ValueError: the text is too short for one window, or the batch is empty.
    """
    if batch < 1 or seq < 1:
        raise ValueError(f"a batch of {batch} x {seq} has no token in it")
    if len(text) <= seq:
        raise ValueError(f"a text of {len(text)} bytes a rank is too short for sequences of {seq} + 1")
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - seq, (batch,), generator=generator)
        windows = torch.stack([text[start : start + seq + 1] for start in starts]).long()
        yield windows[:, :-1], windows[:, 1:]
