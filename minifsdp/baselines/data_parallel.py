"""Data parallel (DP): every rank holds the whole model, and gradients are averaged during backward.

The mirror of a unit in :mod:`minifsdp.unit`. There the way in is a gather, and its gradient a reduce-scatter;
here the way in is a copy that every rank makes for itself, and its gradient an all-reduce. Parameters lie in
the same flat buffers and the ring cuts them at the same places, so DP and FSDP add the same numbers in the
same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from minifsdp.collectives import Communicator
from minifsdp.shard import Layout
from minifsdp.structure import cast_floating
from minifsdp.wrap import chosen_by, shared_between


class DataParallel(nn.Module):
    """Average the gradients of ``module`` over all ranks, one all-reduce a unit as soon as its gradients are
    there.

    Args:
        module: the model; all ranks take the parameters of rank 0.
        auto_wrap_policy: what a unit is, as for :class:`~minifsdp.fsdp.FullyShardedDataParallel`.
        mixed_precision: :class:`~minifsdp.precision.MixedPrecision`.
        communicator: the ranks; default: all.

    Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020.
    """

    def __init__(
        self,
        module: nn.Module,
        auto_wrap_policy: Collection[type] | Callable[..., bool] | None = None,
        mixed_precision: Any = None,
        communicator: Communicator | None = None,
    ) -> None:
        super().__init__()
        self.module = module
        self.communicator = communicator or Communicator()
        self.param_dtype = getattr(mixed_precision, "param_dtype", None)
        self.reduce_dtype = getattr(mixed_precision, "reduce_dtype", None)
        for tensor in (*module.parameters(), *module.buffers()):
            self.communicator.broadcast(tensor.detach())
        inner = chosen_by(auto_wrap_policy, module)
        taken: set[nn.Parameter] = set()
        shared = shared_between(inner, module)
        for unit in inner:
            taken |= self._replicate(unit, shared)
        self._replicate(module, taken)

    def _replicate(self, unit: nn.Module, leave: set[nn.Parameter]) -> set[nn.Parameter]:
        """Make the parameters of ``unit`` one replica, shown to the modules while the unit runs."""
        named = {n: p for n, p in unit.named_parameters() if p.requires_grad and p not in leave}
        if not named:
            return set()
        owners = {p: [] for p in named.values()}
        for module in unit.modules():
            for attribute, parameter in module._parameters.items():
                if parameter in owners:
                    owners[parameter].append((module, attribute))
        replica = Replica(named, self)

        def show(tensors: Collection[Tensor]) -> None:
            for parameter, tensor in zip(named.values(), tensors, strict=True):
                for module, attribute in owners[parameter]:
                    module._parameters[attribute] = tensor

        unit.register_forward_pre_hook(
            lambda *_: show(Replicate.apply(replica, *named.values())), prepend=True
        )
        unit.register_forward_hook(lambda *_: show(named.values()), always_call=True)
        return set(named.values())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = cast_floating((args, kwargs), self.param_dtype)
        return self.module(*args, **kwargs)


class Replica:
    """The parameters of one unit, whole, in one flat buffer (P,)."""

    def __init__(self, named: dict[str, nn.Parameter], wrapper: DataParallel) -> None:
        self.communicator = wrapper.communicator
        self.layout = Layout.plan(list(named.items()), self.communicator.size)
        parameters = list(named.values())
        self.flat = self.layout.take_shard([p.detach() for p in parameters], rank=0, shards=1)
        for slot, parameter in zip(self.layout.slots, parameters, strict=True):
            parameter.data = slot.of(self.flat)
        self.param_dtype = wrapper.param_dtype or self.flat.dtype
        self.reduce_dtype = wrapper.reduce_dtype or self.param_dtype


class Replicate(torch.autograd.Function):
    """Forward: the parameters in ``param_dtype``. Backward: the mean of their gradients over all ranks."""

    @staticmethod
    def forward(ctx: Any, replica: Replica, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.replica = replica
        ctx.set_materialize_grads(False)
        copy = replica.flat.to(replica.param_dtype)  # the flat buffer itself if the dtype is the same
        return tuple(slot.view(copy.untyped_storage(), copy.dtype) for slot in replica.layout.slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        replica, slots = ctx.replica, ctx.replica.layout.slots
        buffer = replica.layout.add(gradients, None, replica.reduce_dtype, replica.flat.device)
        replica.communicator.all_reduce(buffer, "mean").wait()
        buffer = buffer.to(replica.flat.dtype)
        return None, *[
            None if g is None else slot.of(buffer) for slot, g in zip(slots, gradients, strict=True)
        ]
