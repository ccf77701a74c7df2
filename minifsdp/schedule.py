"""The schedule: no rank starts a collective that the others do not.

Collectives have no names on the wire. If one rank gathers an expert that another rank skipped, the two calls
meet anyway: the program hangs, or worse, one unit's weights land in another. Real models do this (experts,
layers dropped at random, a loss that uses a branch on some ranks only), so before each collective the ranks
hold a *roll call*: each says in a few integers what it wants to do next. Where all want the same, they do it.
Where they differ, the earliest wish goes first, and a rank that wanted something else *serves*: it lends its
shard to the gather, or zeros to the reduction, and asks again. Every collective so has every rank in it, and
the numbers come out right.

A rank that fails says so in the next roll call, and all raise. The cost is one exchange of a few words,
measured by :class:`~minifsdp.collectives.Traffic` as ``roll_call``. (Horovod's coordinator solved the same
problem for all-reduces: Sergeev and Del Balso, 2018.)
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Sequence
from typing import Protocol

import torch

from minifsdp.collectives import Communicator

FAILED, FORWARD, BACKWARD, END = range(4)  # the phases of one pass, in the order in which wishes are granted
BITS = 62  # flags packed into one int64


class BackwardPrefetch(enum.Enum):
    """When backward starts to gather the unit that it needs next: before or after the gradients of the
    current one."""

    BACKWARD_PRE = enum.auto()
    BACKWARD_POST = enum.auto()


class RanksDisagree(RuntimeError):
    """Raised on every rank when the ranks cannot go on together."""


class Member(Protocol):
    """What the schedule asks of a unit."""

    name: str
    width: int  # its number of parameters

    def serve_gather(self) -> None: ...
    def serve_reduce(self, flags: list[bool]) -> None: ...
    def finish_gather(self) -> None: ...
    def forget_backward(self) -> None: ...
    def end_backward(self) -> None: ...
    def release(self) -> None: ...


def in_backward() -> bool:
    """Whether autograd is walking a graph right now. Recomputation runs forward code inside backward, so
    nobody else can tell."""
    return torch._C._current_graph_task_id() != -1


class Schedule:
    """The units under one root, in module order (the root first), and what the ranks agree on about them."""

    def __init__(
        self, communicator: Communicator, units: Sequence[Member], prefetch: str | None = None
    ) -> None:
        self.communicator = communicator
        self.units = list(units)
        self.place = {id(unit): i for i, unit in enumerate(self.units)}
        self.words = max((-(-unit.width // BITS) for unit in self.units), default=0)
        self.epoch = 0  # forward passes of the root so far
        self.prefetch = prefetch  # "pre", "post" or None, see BackwardPrefetch
        self.last_left: Member | None = None  # the unit that forward was in last
        self.backward_open = False

    # --- one pass -------------------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The root is called. What an earlier pass kept for a backward that never came is released."""
        self.settle()
        self.epoch += 1
        self.last_left = None
        for unit in self.units:
            unit.release()

    def settle(self) -> None:
        """After a backward that raised half-way, which nobody hears of: forget it."""
        if self.backward_open and not in_backward():
            self.backward_open = False
            for unit in self.units:
                unit.forget_backward()

    def begin_backward(self) -> None:
        """Called by whatever backward reaches first; :meth:`end_backward` then runs when it is over."""
        if not self.backward_open:
            self.backward_open = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def end_backward(self) -> None:
        self.backward_open = False
        for unit in reversed(self.units):
            unit.end_backward()
        self._agree(END, 0)
        for unit in self.units:
            unit.release()

    # --- wishes ---------------------------------------------------------------------------------------------

    def agree_to_gather(self, unit: Member) -> None:
        if in_backward():
            self._agree(BACKWARD, self._backward_place(unit))
        else:
            self._agree(FORWARD, self.place[id(unit)])

    def agree_to_reduce(self, unit: Member, flags: list[bool]) -> list[bool]:
        """``flags`` says which parameters have a gradient here; the answer, which have one on any rank."""
        return self._agree(BACKWARD, self._backward_place(unit) + 1, flags)[: unit.width]

    def _backward_place(self, unit: Member) -> int:
        """Backward walks the units from the last to the first, and gathers each before it reduces it."""
        return 2 * (len(self.units) - 1 - self.place[id(unit)])

    def _unit_at(self, backward_place: int) -> Member:
        return self.units[len(self.units) - 1 - backward_place // 2]

    def _agree(self, phase: int, place: int, flags: Sequence[bool] = ()) -> list[bool]:
        """Return once it is this wish's turn, having served those before it."""
        if self.communicator.size == 1:
            return list(flags)
        for unit in self.units:
            unit.finish_gather()  # a rank that serves is done only when we are
        wish = [self.epoch, phase, place, *self._pack(flags)]
        while True:
            rows = self._roll_call(wish)
            first = min(row[1:3] for row in rows)
            granted = [row[3:] for row in rows if row[1:3] == first]
            flags = self._unpack(
                [functools.reduce(operator.or_, words) for words in zip(*granted, strict=True)]
            )
            if first == wish[1:3]:
                return flags
            self._serve(*first, flags)

    def _serve(self, phase: int, place: int, flags: list[bool]) -> None:
        if phase == FORWARD:
            self.units[place].serve_gather()
            return
        unit = self._unit_at(place)
        if place % 2 == 0:
            unit.serve_gather()
        else:
            unit.serve_reduce(flags[: unit.width])

    def _pack(self, flags: Sequence[bool]) -> list[int]:
        words = [0] * self.words
        for i, flag in enumerate(flags):
            words[i // BITS] |= int(flag) << (i % BITS)
        return words

    def _unpack(self, words: Sequence[int]) -> list[bool]:
        return [bool(word >> bit & 1) for word in words for bit in range(BITS)]

    # --- when it goes wrong ---------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one raised ``error`` in forward, if they can still be reached."""
        if isinstance(error, RanksDisagree) or self.communicator.size == 1:
            return  # they know
        try:
            rows = self.communicator.roll_call([self.epoch, FAILED, 0, *self._pack(())])
            self.communicator.gather_text(f"{type(error).__name__}: {error}"[:500])
            self.epoch = max(row[0] for row in rows)
        except RuntimeError:
            pass  # they are gone; the user needs to see `error`, not this

    def _roll_call(self, wish: list[int]) -> list[list[int]]:
        try:
            rows = self.communicator.roll_call(wish)
        except RuntimeError as error:
            raise RanksDisagree(
                f"{self._our(wish)}, and not every rank came: one has exited, has failed outside the model, "
                f"or runs the model a different number of times ({error})"
            ) from error
        epochs = [row[0] for row in rows]
        self.epoch = max(epochs)  # so that all count alike again after an error
        if any(row[1] == FAILED for row in rows):
            texts = self.communicator.gather_text("")
            failed = "; ".join(f"rank {rank} failed with {text}" for rank, text in enumerate(texts) if text)
            raise RanksDisagree(f"{self._our(wish)}, but {failed}. Mend that; the next step starts afresh")
        if min(epochs) != max(epochs):
            each = "; ".join(f"rank {rank}: {self._describe(row)}" for rank, row in enumerate(rows))
            raise RanksDisagree(
                f"ranks are in different steps ({each}). Call the model equally often on every rank"
            )
        return rows

    def _our(self, wish: list[int]) -> str:
        return f"rank {self.communicator.rank} wanted to {self._describe(wish)}"

    def _describe(self, row: Sequence[int]) -> str:
        epoch, phase, place = row[:3]
        if phase == FAILED:
            return "report a failure"
        if phase == END:
            return f"end backward of pass {epoch}"
        if phase == FORWARD:
            return f"gather unit {self.units[place].name!r} in forward of pass {epoch}"
        unit = self._unit_at(place)
        return f"{'reduce' if place % 2 else 'gather'} unit {unit.name!r} in backward of pass {epoch}"
