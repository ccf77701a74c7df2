"""The life of one unit: the parameters that are gathered together, used together and released together.

                gather                   forward, backward             release
    SHARDED  ----------->  GATHERED  ------------------------>  USED  ----------->  SHARDED
    this rank's 1/N        all of it, in param_dtype             |                  the storage is freed
                                                                 | gradients of full size
                                                                 v
                              one flat buffer in reduce_dtype  --- reduce-scatter --->  this rank's 1/N

Everything that enters a unit enters by :class:`Unshard`, and everything that leaves it leaves by
:class:`Reshard`:

    Unshard   forward: gather the shards               backward: reduce-scatter the gradients, release
    Reshard   forward: release                         backward: gather again

The two are mirror images because the gradient of a gather *is* a reduce-scatter: each rank's shard went to
every rank, so its gradient is the sum of what every rank found. Autograd then does the bookkeeping that hooks
would have to do: Unshard's backward runs when the last gradient inside the unit is there, and Reshard's
before the first is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from minifsdp.collectives import Communicator, Pending
from minifsdp.schedule import Schedule, in_backward
from minifsdp.shard import Layout
from minifsdp.structure import map_tensors, replace_tensors

Owners = dict[
    nn.Parameter, list[tuple[nn.Module, str]]
]  # each parameter: the (module, attribute) that hold it


@dataclass
class Flat:
    """Those parameters of one unit that share a dtype and are all trained or all frozen.

    At rest each parameter's data is a 1-D view of ``shard``, the part of it that this rank owns, often empty.
    """

    layout: Layout
    parameters: list[nn.Parameter]
    shard: Tensor  # (S,) in the parameters' own dtype
    dtype: torch.dtype  # of the gathered copy
    storage: torch.UntypedStorage  # the gathered copy: N * S elements, or 0 while released

    @classmethod
    def cut(
        cls, named: dict[str, nn.Parameter], shards: Communicator, parts: int, param_dtype: torch.dtype | None
    ) -> Flat:
        """Keep this rank's shard of the parameters and let the rest of them go."""
        parameters = list(named.values())
        layout = Layout.plan(list(named.items()), parts)
        shard = layout.take_shard([p.detach() for p in parameters], shards.rank, shards.size)
        dtype = param_dtype or shard.dtype
        whole = shards.size == 1 and dtype == shard.dtype
        storage = shard.untyped_storage() if whole else torch.UntypedStorage(0, device=shard.device)
        for slot, parameter in zip(layout.slots, parameters, strict=True):
            start, stop = layout.piece(slot, shards.rank, shards.size)
            parameter.data = shard[start:stop]
        return cls(layout, parameters, shard, dtype, storage)

    @property
    def is_whole(self) -> bool:
        """A shard group of one in the same dtype: the shard serves as its own gathered copy."""
        return self.storage.data_ptr() == self.shard.data_ptr()

    def start_gather(self, shards: Communicator, unit: str) -> Pending | None:
        if self.is_whole:
            return None
        self.storage.resize_(self.layout.padded * self.dtype.itemsize)
        gathered = torch.empty(0, dtype=self.dtype, device=self.shard.device).set_(self.storage)
        slot = gathered.view(shards.size, -1)[shards.rank]
        slot.copy_(
            self.shard
        )  # the cast to param_dtype happens here, before the gather, so that it halves the traffic
        return shards.all_gather(gathered, slot, unit)

    def views(self) -> list[Tensor]:
        return [slot.view(self.storage, self.dtype) for slot in self.layout.slots]

    def release(self) -> None:
        if not self.is_whole:
            self.storage.resize_(0)

    def pieces(self, shard: Tensor) -> list[Tensor]:
        """What of ``shard`` (S,), a gradient for one, belongs to each parameter."""
        first = self.shard.storage_offset()
        return [shard[p.storage_offset() - first :][: p.numel()] for p in self.parameters]


class Unit:
    """Modules whose parameters share one life.

    Args:
        name: for messages and traffic, the name of the (first) module.
        owners: for each parameter, the (module, attribute) pairs that hold it; several if it is tied.
        flats: the parameters themselves.
        shards: the ranks that hold one copy of the parameters together.
        replicas: the ranks that hold the same shard, whose gradients are averaged after the reduce-scatter.
        reduce_dtype: what gradients are summed in; default: the dtype of the gathered parameters.
        keep_after_forward: do not release between forward and backward. None: only the root, which backward
            needs first.
    """

    def __init__(
        self,
        name: str,
        owners: Owners,
        flats: list[Flat],
        shards: Communicator,
        replicas: Communicator | None = None,
        reduce_dtype: torch.dtype | None = None,
        keep_after_forward: bool | None = None,
    ) -> None:
        self.name = name
        self.owners = owners
        self.flats = flats
        self.shards = shards
        self.replicas = replicas
        self.reduce_dtype = reduce_dtype
        self.keep_after_forward = keep_after_forward
        self.parameters = [p for flat in flats for p in flat.parameters]
        self.width = len(self.parameters)
        self.schedule: Schedule  # handed over by the root
        self.sync_gradients = True  # False inside no_sync
        self.gathered = False
        self.underway: list[Pending] = []
        self.depth = 0  # calls of the unit that are running now; a method may call forward
        self.task = -1  # the backward pass that gathered the unit
        self.buffers: list[Tensor | None] = [None] * len(flats)  # full gradients, waiting to be reduced
        self.waiting = [False] * self.width  # the parameters that have a gradient in them

    # --- SHARDED <-> GATHERED -------------------------------------------------------------------------------

    def start_gather(self) -> None:
        """Begin to gather, if nobody has yet; :meth:`gather` ends it."""
        if self.flats and not self.gathered:
            self.schedule.agree_to_gather(self)
            self._start_gather()

    def _start_gather(self) -> None:
        with torch.inference_mode(False), torch.no_grad():
            pending = [flat.start_gather(self.shards, self.name) for flat in self.flats]
        self.underway = [p for p in pending if p is not None]
        self.gathered = True

    def gather(self) -> None:
        self.start_gather()
        self.finish_gather()

    def finish_gather(self) -> None:
        for pending in self.underway:
            pending.wait()
        self.underway = []

    def release(self) -> None:
        """Free the gathered copy. Autograd's saved tensors keep the storage, and find it full again in
        backward. A unit that is running keeps it: a model may ask for gradients inside its own forward."""
        self.finish_gather()
        if self.depth > 0:
            return
        for flat in self.flats:
            flat.release()
        self.gathered = False
        self._show(self.parameters)

    def _show(self, tensors: Sequence[Tensor]) -> None:
        """Let the modules see these tensors under their parameters' names."""
        for parameter, tensor in zip(self.parameters, tensors, strict=True):
            for module, attribute in self.owners[parameter]:
                module._parameters[attribute] = tensor

    # --- forward: the way in and the way out ----------------------------------------------------------------

    def enter(self, inputs: Any) -> Any:
        """Gather, and show the modules their full parameters. Inputs that need a gradient pass through
        Unshard."""
        self.depth += 1
        if self.depth > 1:
            return inputs
        self.gather()
        return replace_tensors(inputs, self._show_full)

    def _show_full(self, entering: Sequence[Tensor] = ()) -> Sequence[Tensor]:
        """Show the modules their full parameters, and pass ``entering`` through the same Unshard."""
        views = [view for flat in self.flats for view in flat.views()]
        trained = {i: views[i] for i, p in enumerate(self.parameters) if p.requires_grad}
        if torch.is_grad_enabled() and (entering or trained):
            outputs = Unshard.apply(self, trained, *entering, *[self.parameters[i] for i in trained])
            entering, tracked = outputs[: len(entering)], outputs[len(entering) :]
            for i, view in zip(trained, tracked, strict=True):
                views[i] = view
        self._show(views)
        return entering

    def leave(self, outputs: Any) -> Any:
        """Release, unless backward comes next. Outputs that need a gradient pass through Reshard."""
        self.depth -= 1
        if self.depth > 0:
            return outputs
        if torch.is_grad_enabled():
            outputs = replace_tensors(
                outputs, lambda leaving: Reshard.apply(self, *leaving) if leaving else ()
            )
        if not in_backward():  # in a recomputation, backward needs the parameters at once
            if self.is_kept() and torch.is_grad_enabled():
                self._show(self.parameters)
            else:
                self.release()
            self.schedule.last_left = self
        return outputs

    def is_kept(self) -> bool:
        """Whether the gathered copy stays between forward and backward."""
        if self.keep_after_forward is None:
            return self is self.schedule.units[0]  # the root is the last that forward leaves
        return self.keep_after_forward

    def abandon(self) -> None:
        """Forward has raised. So does a recomputation that has seen enough, and then uses the parameters."""
        self.depth -= 1
        if self.depth == 0 and not in_backward():
            self.release()

    # --- backward -------------------------------------------------------------------------------------------

    def reenter(self, version: int, previous: Unit | None) -> None:
        """Backward arrives at the unit's outputs: gather again, for what autograd saved and for what a
        checkpoint inside the unit recomputes."""
        self.arrive(version)
        with torch.enable_grad():
            self._show_full()
        if previous is not None and self.schedule.prefetch == "pre":
            previous.start_gather()

    def arrive(self, version: int) -> None:
        """Backward is about to use the gathered parameters of a forward that saw them in this version."""
        self.schedule.begin_backward()
        if version != self.version():
            raise RuntimeError(
                f"rank {self.shards.rank}: the parameters of unit {self.name!r} were changed between the "
                f"forward and its backward, so the gradient would be wrong; step after the last backward"
            )
        self.gather()
        self.task = torch._C._current_graph_task_id()

    def reduce(self, gradients: dict[int, Tensor | None]) -> list[Tensor | None]:
        """From this rank's full gradients, by parameter number, to its pieces of their mean over all
        ranks."""
        self.schedule.begin_backward()
        everyone = [gradients.get(i) for i in range(self.width)]
        here = iter(everyone)
        for i, flat in enumerate(self.flats):
            of_flat = [next(here) for _ in flat.parameters]
            if any(gradient is not None for gradient in of_flat):
                dtype = self.reduce_dtype or flat.dtype
                self.buffers[i] = flat.layout.add(of_flat, self.buffers[i], dtype, flat.shard.device)
        self.waiting = [old or new is not None for old, new in zip(self.waiting, everyone, strict=True)]
        return self._reduce_waiting() if self.sync_gradients else [None] * self.width

    def _reduce_waiting(self) -> list[Tensor | None]:
        if not any(self.waiting):
            return [None] * self.width
        flags = self.schedule.agree_to_reduce(self, self.waiting)
        buffers, self.buffers = self.buffers, [None] * len(self.flats)
        self.waiting = [False] * self.width
        return self._reduce_scatter(buffers, flags)

    def _reduce_scatter(self, buffers: Sequence[Tensor | None], flags: Sequence[bool]) -> list[Tensor | None]:
        """``flags`` says which parameters have a gradient on some rank; the others stay without one."""
        pieces: list[Tensor | None] = []
        for flat, buffer in zip(self.flats, buffers, strict=True):
            used = flags[len(pieces) : len(pieces) + len(flat.parameters)]
            if not any(used):
                pieces += [None] * len(used)
                continue
            if buffer is None:
                dtype = self.reduce_dtype or flat.dtype
                buffer = torch.zeros(flat.layout.padded, dtype=dtype, device=flat.shard.device)
            output = torch.empty_like(flat.shard, dtype=buffer.dtype)
            self.shards.reduce_scatter(output, buffer, "mean", self.name).wait()
            if self.replicas is not None:
                self.replicas.all_reduce(output, "mean", self.name).wait()
            shard = output.to(flat.shard.dtype)
            pieces += [piece if use else None for piece, use in zip(flat.pieces(shard), used, strict=True)]
        return pieces

    def leave_backward(self, previous: Unit | None) -> None:
        """All gradients of the unit are known. A nested backward, of a checkpoint inside, leaves the outer
        one's copy."""
        if self.task == torch._C._current_graph_task_id():
            self.release()
        if previous is not None and self.schedule.prefetch == "post":
            previous.start_gather()

    def end_backward(self) -> None:
        """The whole backward is over: reduce what no_sync left here and this backward did not touch."""
        if self.sync_gradients:
            self._accumulate(self._reduce_waiting())

    def forget_backward(self) -> None:
        """It raised before it was over: what it collected is worth nothing."""
        self.buffers = [None] * len(self.flats)
        self.waiting = [False] * self.width
        self.release()

    @torch.no_grad()
    def _accumulate(self, pieces: Sequence[Tensor | None]) -> None:
        """What autograd does with a gradient, for those that do not reach it through a backward of this
        rank."""
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            if piece is not None:
                parameter.grad = piece if parameter.grad is None else parameter.grad.add_(piece)
                for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                    hook(parameter)

    # --- outside of training --------------------------------------------------------------------------------

    def full_parameters(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its full tensor in its own dtype, one flat buffer after another."""
        for flat in self.flats:
            whole = flat.shard.new_empty(flat.layout.padded)
            self.shards.all_gather(whole, flat.shard, self.name).wait()
            for slot, parameter in zip(flat.layout.slots, flat.parameters, strict=True):
                yield parameter, slot.of(whole)

    def version(self) -> int:
        """Grows with each change of the parameters in place."""
        return sum(p._version for p in self.parameters)

    # --- for the other ranks --------------------------------------------------------------------------------

    def serve_gather(self) -> None:
        held = self.gathered
        self._start_gather()
        self.finish_gather()
        if not held:
            self.release()

    def serve_reduce(self, flags: list[bool]) -> None:
        self._accumulate(self._reduce_scatter([None] * len(self.flats), flags))


class Unshard(torch.autograd.Function):
    """The way into a unit: forward shows it the full parameters, backward reduces their gradients and
    releases."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, trained: dict[int, Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.unit, ctx.trained = unit, list(trained)
        ctx.previous = None if in_backward() else unit.schedule.last_left
        ctx.set_materialize_grads(False)
        entering = tensors[: len(tensors) - len(trained)]
        return *[t.detach() for t in entering], *trained.values()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        entering = len(gradients) - len(ctx.trained)
        pieces = ctx.unit.reduce(dict(zip(ctx.trained, gradients[entering:], strict=True)))
        ctx.unit.leave_backward(ctx.previous)
        return None, None, *gradients[:entering], *[pieces[i] for i in ctx.trained]


class Reshard(torch.autograd.Function):
    """The way out of a unit: forward lets it release, backward gathers it again.

    The outputs are detached aliases and not views, so that the caller may edit them in place.
    """

    @staticmethod
    def forward(ctx: Any, unit: Unit, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.unit, ctx.version = unit, unit.version()
        ctx.previous = unit.schedule.last_left
        ctx.set_materialize_grads(False)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.unit.reenter(ctx.version, ctx.previous)
        return None, *gradients


class Guard(TorchFunctionMode):
    """Active while the modules of a unit run: what is computed from its parameters gathers it before its
    backward.

    Most of backward enters a unit by Reshard. But a module may keep a tensor from inside, and a loss may use
    that; the parameters that autograd saved for it would then be an empty storage.
    """

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.storages = {flat.storage._cdata for flat in unit.flats}
        version = unit.version()
        self.before_backward = lambda _: unit.arrive(version)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.is_grad_enabled() and any(map(self._is_parameter, (*args, *(kwargs or {}).values()))):
            map_tensors(self._guard, result)
        return result

    def _is_parameter(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self._is_parameter, value))
        if not isinstance(value, Tensor):
            return False
        try:
            return value.untyped_storage()._cdata in self.storages
        except NotImplementedError:  # sparse, or inside torch.func: it has no storage of its own
            return False

    def _guard(self, tensor: Tensor) -> Tensor:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(self.before_backward)
        return tensor
