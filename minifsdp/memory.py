"""What lives on a rank: the ledger that measures it, and the formula that predicts it.

parameters   at rest: the shard
gathered     full parameters of the units in use
gradients    at rest: the gradient shard
optimizer    Adam's two moments
other        activations, full gradients on their way to the reduction, buffers, batches
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minifsdp.fsdp import units
from minifsdp.shard import join
from minifsdp.unit import Unit

CATEGORIES = ["parameters", "gathered", "gradients", "optimizer", "other"]


class Ledger(TorchDispatchMode):
    """Measures the live bytes of every tensor storage that a rank holds, by category, after each operation.

    >>> with Ledger(model, optimizer) as ledger:
    ...     model(tokens, targets).backward()
    ...     optimizer.step()
    >>> ledger.peak["total"], ledger.peak["gathered"]

    Every operation of PyTorch passes through a dispatch mode, so each storage is seen when it is first
    written, and its size is asked for again after each later operation, since a gathered storage is freed by
    making it empty.

    Attributes:
        peak: bytes by category, and ``total``, at the moment when the total was largest.
        largest: the largest value of each category over the whole time, and of the total.
        history: one dictionary of bytes an operation, in order; :meth:`frame` makes a table of it.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.units = units(model)
        self.parameters = list(model.parameters())  # inside forward, the modules show the full ones
        self.live: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.history: list[dict[str, int]] = []
        self.peak = dict.fromkeys([*CATEGORIES, "total"], 0)
        self.largest = dict(self.peak)

    def __enter__(self) -> Ledger:
        state = [t for s in (self.optimizer.state.values() if self.optimizer else ()) for t in tree_leaves(s)]
        gradients = [p.grad for p in self.parameters]
        self._see([*self.parameters, *self.model.buffers(), *gradients, *state])
        for unit in self.units:
            self.live.update(flat.storage for flat in unit.flats)
        self._sample()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._see(tree_leaves((args, kwargs, result)))
        self._sample()
        return result

    def frame(self) -> pd.DataFrame:
        """Bytes over time: one row an operation, one column a category, and ``total``."""
        return pd.DataFrame(self.history)

    def _see(self, values: Iterable[Any]) -> None:
        self.live.update(value.untyped_storage() for value in values if isinstance(value, Tensor))

    def _sample(self) -> None:
        category = self._categories()
        now = dict.fromkeys(CATEGORIES, 0)
        for storage in self.live:
            now[category.get(storage._cdata, "other")] += storage.nbytes()
        now["total"] = sum(now.values())
        self.history.append(now)
        self.largest = {name: max(value, now[name]) for name, value in self.largest.items()}
        if now["total"] > self.peak["total"]:
            self.peak = now

    def _categories(self) -> dict[int, str]:
        """Which storages belong to what at this moment; gradients and moments come and go."""
        names: dict[int, str] = {}
        if self.optimizer is not None:
            for state in self.optimizer.state.values():
                names.update(
                    (t.untyped_storage()._cdata, "optimizer") for t in state.values() if isinstance(t, Tensor)
                )
        names.update(
            (p.grad.untyped_storage()._cdata, "gradients") for p in self.parameters if p.grad is not None
        )
        names.update((flat.storage._cdata, "gathered") for unit in self.units for flat in unit.flats)
        names.update((p.untyped_storage()._cdata, "parameters") for p in self.parameters)
        return names


def formula(model: nn.Module, moments: int = 2) -> dict[str, int]:
    """What a rank holds by design, in bytes; for a model that is not sharded, all of it.

    Args:
        model: sharded or not.
        moments: tensors of the parameters' size that the optimizer keeps; 2 for Adam.

    Returns:
        ``parameters``, ``gradients`` and ``optimizer`` at rest, and ``gathered`` at its largest: the units
        that are kept after forward and, beside them, the largest other one, with the one that is prefetched.
    """
    whole = _by_storage(model.parameters())
    trained = _by_storage(p for p in model.parameters() if p.requires_grad)
    return {
        "parameters": sum(pieces[0].untyped_storage().nbytes() for pieces in whole),
        "gathered": _gathered_at_most(units(model)),
        "gradients": sum(pieces[0].untyped_storage().nbytes() for pieces in trained),
        "optimizer": moments * sum(_spanned_bytes(pieces) for pieces in trained),
    }


def _by_storage(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters grouped by the storage that they lie in: a shard, or a whole buffer."""
    groups: dict[int, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(p.untyped_storage()._cdata, []).append(p)
    return list(groups.values())


def _spanned_bytes(pieces: list[nn.Parameter]) -> int:
    """From the first piece to the last: an optimizer keeps nothing for the padding after that."""
    held = sorted((p for p in pieces if p.numel()), key=Tensor.data_ptr)
    return join(held).nbytes if held else 0


def _gathered_at_most(found: list[Unit]) -> int:
    """Units are gathered one at a time: each with the units around it, those that are kept, and the
    prefetched one."""
    most = 0
    for i, unit in enumerate(found):
        held = {
            u.name
            for u in found
            if u.is_kept() or u is unit or u is found[0] or unit.name.startswith(f"{u.name}.")
        }
        if unit.schedule.prefetch == "pre" and i > 0:
            held.add(found[i - 1].name)
        most = max(most, sum(gathered_bytes(u) for u in found if u.name in held))
    return most


def gathered_bytes(unit: Unit) -> int:
    """Bytes of a unit's gathered copy; none if its shard is the whole already."""
    return sum(flat.layout.padded * flat.dtype.itemsize for flat in unit.flats if not flat.is_whole)


def traffic_formula(model: nn.Module) -> dict[str, int]:
    """Bytes that a rank sends in one step, in which each unit runs once forward and once backward.

    Of each buffer of B bytes a rank sends (N - 1) / N * B: for the gather before forward, for the one before
    backward unless the unit was kept, and for the reduce-scatter.
    """
    sent = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce"), 0)
    for unit in units(model):
        n = unit.shards.size
        gathers = 1 if unit.is_kept() else 2
        sent["all_gather"] += gathers * gathered_bytes(unit) * (n - 1) // n
        for flat in unit.flats:
            reduced = flat.layout.padded * (unit.reduce_dtype or flat.dtype).itemsize
            if flat.parameters[0].requires_grad:
                sent["reduce_scatter"] += reduced * (n - 1) // n
                if unit.replicas is not None:
                    r = unit.replicas.size
                    sent["all_reduce"] += 2 * (reduced // n) * (r - 1) // r
    return sent
