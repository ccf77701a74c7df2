"""Fully sharded training: units laid over a model, and the two faces that people know.

    fully_shard(module)                in place: the module itself becomes a unit
    FullyShardedDataParallel(model)    the wrapper: a policy chooses the units

Both have their namesakes in torch.distributed.fsdp, and both do the same. A unit takes the parameters of a
module that no unit inside it has taken, and the class of the module is extended so that *calling* it walks
through the unit:

    call module:    unit.enter(inputs)  ->  the module's own forward  ->  unit.leave(outputs)

The unit of the outermost module is the *root*. It holds what is left over, and it is where a pass begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from enum import Enum
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.collectives import Communicator
from minifsdp.schedule import BackwardPrefetch, Schedule, in_backward
from minifsdp.strategy import Placement, ShardingStrategy, place
from minifsdp.structure import cast_floating
from minifsdp.unit import Flat, Guard, Owners, Unit
from minifsdp.wrap import chosen_by, shared_between

# --- A module that is a unit --------------------------------------------------------------------------------


class FSDPModule:
    """What :func:`fully_shard` adds to the class of a module."""

    fsdp_unit: Unit
    fsdp_policy: Any  # a MixedPrecision, a MixedPrecisionPolicy, or None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _walk(self, super().__call__, args, kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Under their own names, sharded; also after a backward that failed half-way."""
        self.fsdp_unit.schedule.settle()
        return super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Each name with this rank's piece of the parameter; :func:`full_state_dict` gives the whole."""
        self.fsdp_unit.schedule.settle()
        return super().state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        raise TypeError(
            "a sharded model is bound to its process group and cannot be copied: copy it before sharding"
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward adds full gradients up locally, in ``reduce_dtype``; the next backward outside
        reduces them. Saves traffic, and costs the memory of the whole gradient."""
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(True)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        for unit in units(self):
            unit.sync_gradients = requires_gradient_sync

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """``.to()``, ``.half()`` and the like. A sharded parameter is a view of its shard and cannot move
        alone."""
        for name, parameter in self.named_parameters():
            probe = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
            if (probe.dtype, probe.device) != (parameter.dtype, parameter.device):
                raise RuntimeError(
                    f"parameter {name!r} is sharded ({parameter.dtype}, {parameter.device}) and cannot "
                    f"become {probe.dtype} on {probe.device}: move or convert the model before sharding it, "
                    f"and use a mixed precision policy to compute in another dtype"
                )
        return self


def _walk(module: FSDPModule, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """One call of a unit."""
    unit, schedule, policy = module.fsdp_unit, module.fsdp_unit.schedule, module.fsdp_policy
    is_root = unit is schedule.units[0]
    outermost = is_root and unit.depth == 0 and not in_backward()
    if outermost:
        schedule.begin_forward()
    try:
        if getattr(policy, "cast_forward_inputs", False) or (
            is_root and getattr(policy, "cast_root_forward_inputs", False)
        ):
            args, kwargs = cast_floating((args, kwargs), policy.param_dtype)
        args, kwargs = unit.enter((args, kwargs))
        with Guard(unit):
            output = forward(*args, **kwargs)
        return unit.leave(cast_floating(output, getattr(policy, "output_dtype", None)))
    except Exception as error:
        unit.abandon()
        if outermost:
            schedule.fail(error)
        raise


def units(model: nn.Module) -> list[Unit]:
    """The units of a model in module order, the root first."""
    return [module.fsdp_unit for module in model.modules() if is_unit(module)]


def is_unit(module: nn.Module) -> bool:
    """Whether a module is a unit; the wrapper of one is, since the two share their attributes."""
    return "fsdp_unit" in module.__dict__


# --- The composable face ------------------------------------------------------------------------------------


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    mp_policy: Any = None,
    collectives: str = "auto",
) -> nn.Module:
    """Make ``module`` a unit, in place. Call it on the inner modules first and on the whole model last.

    Args:
        mesh: the ranks to shard over (1-D), or to replicate and shard over (2-D); default: shard over all.
        reshard_after_forward: free the gathered parameters after forward and gather them again in backward.
            The default does so for all but the root, which backward needs first.
        mp_policy: a ``MixedPrecisionPolicy`` or :class:`~minifsdp.precision.MixedPrecision`.
        collectives: ``"auto"``, ``"ring"`` or ``"native"``, see :class:`~minifsdp.collectives.Communicator`.

    Returns:
        ``module``. Its parameters keep their names and are now 1-D: this rank's piece of each, which may be
        empty.

    Raises:
        ValueError: on every rank if the model cannot be sharded or the ranks disagree about it.

    Source: PyTorch's ``fully_shard`` and its design note (https://github.com/pytorch/pytorch/issues/114299).
    """
    placement = place(ranks=mesh, device_type=_device_of(module).type, algorithm=collectives)
    if reshard_after_forward is not None:
        placement.keep_after_forward = not reshard_after_forward
    return _shard(module, placement, mp_policy)


def _shard(
    module: nn.Module,
    placement: Placement,
    policy: Any,
    leave: Set[nn.Parameter] = frozenset(),
    prefetch: str | None = None,
) -> nn.Module:
    """Turn ``module`` into a unit without the parameters to ``leave``, and make it the root of the units
    inside it."""
    if is_unit(module):
        raise ValueError(
            f"{type(module).__name__} is sharded already: shard each module once, the inner ones first"
        )
    named, owners = _left_over(module, leave)
    _check_dtypes(policy)
    _check_parameters(named)
    _check_agreement(named, placement.everyone)
    module.fsdp_unit = Unit(
        name=type(module).__name__,
        owners=owners,
        flats=_cut(named, placement, policy),
        shards=placement.shards,
        replicas=placement.replicas,
        reduce_dtype=getattr(policy, "reduce_dtype", None),
        keep_after_forward=placement.keep_after_forward,
    )
    module.fsdp_policy = policy
    module.__class__ = _extended(type(module))
    for parameter in owners:
        parameter._fsdp_unit = module.fsdp_unit
    _adopt(module, placement.everyone, prefetch)
    return module


def _left_over(module: nn.Module, leave: Set[nn.Parameter]) -> tuple[dict[str, nn.Parameter], Owners]:
    """The parameters that no inner unit has taken, by name, and for each the places that hold it."""
    named: dict[str, nn.Parameter] = {}
    owners: Owners = {}
    inner = tuple(f"{name}." for name, child in module.named_modules() if is_unit(child))
    for path, child in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for attribute, parameter in child._parameters.items():
            if parameter is None or parameter in leave:
                continue
            if hasattr(parameter, "_fsdp_unit"):
                _check_not_tied(parameter, prefix + attribute, inner)
                continue
            if parameter not in owners:
                named[prefix + attribute] = parameter
            places = owners.setdefault(parameter, [])
            if (child, attribute) not in places:
                places.append((child, attribute))
    return named, owners


def _cut(named: dict[str, nn.Parameter], placement: Placement, policy: Any) -> list[Flat]:
    """One flat buffer for each dtype, and frozen parameters apart from trained ones, so that only those are
    reduced."""
    groups: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
    for name, parameter in named.items():
        groups.setdefault((parameter.dtype, parameter.requires_grad), {})[name] = parameter
    param_dtype = getattr(policy, "param_dtype", None)
    return [
        Flat.cut(
            group, placement.shards, placement.everyone.size, param_dtype if dtype.is_floating_point else None
        )
        for (dtype, _), group in groups.items()
    ]


def _extended(cls: type) -> type:
    """The class of a module with :class:`FSDPModule` before it. Whoever constructs that class gets a plain
    module: ``nn.Sequential`` does when it is sliced."""
    return type(
        f"FSDP{cls.__name__}", (FSDPModule, cls), {"__new__": lambda _, *args, **kwargs: cls(*args, **kwargs)}
    )


def _adopt(root: nn.Module, everyone: Communicator, prefetch: str | None) -> None:
    """Put the units inside ``root`` under one schedule, and name them as ``root`` does."""
    schedule = Schedule(everyone, units(root), prefetch)
    for name, module in root.named_modules():
        if is_unit(module):
            module.fsdp_unit.schedule = schedule
            module.fsdp_unit.name = name or "root"


# --- What can be wrong, said on every rank ------------------------------------------------------------------


def _check_dtypes(policy: Any) -> None:
    for field in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
        dtype = getattr(policy, field, None)
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"{field} must be a floating dtype such as torch.float16, not {dtype}")


def _check_not_tied(parameter: nn.Parameter, name: str, inner: tuple[str, ...]) -> None:
    if not name.startswith(inner):
        raise ValueError(
            f"parameter {name!r} is tied to one that unit {parameter._fsdp_unit.name!r} has taken already: "
            f"shard the modules that share it as one unit, or leave them all to the root"
        )


def _check_parameters(named: dict[str, nn.Parameter]) -> None:
    for name, parameter in named.items():
        if isinstance(parameter, nn.parameter.UninitializedParameter) or parameter.is_meta:
            raise ValueError(
                f"parameter {name!r} has no values yet: materialise and initialise the model first"
            )
    devices = {parameter.device: name for name, parameter in named.items()}
    if len(devices) > 1:
        (one, here), (other, there) = list(devices.items())[:2]
        raise ValueError(
            f"parameter {here!r} is on {one} and {there!r} on {other}: move the model to one device first"
        )


def _check_agreement(named: dict[str, nn.Parameter], everyone: Communicator) -> None:
    """Every rank must hold the same parameters, with the same values, before each keeps its shard only."""
    lines = [
        f"{name} {tuple(p.shape)} {p.dtype} {'trained' if p.requires_grad else 'frozen'}"
        for name, p in named.items()
    ]
    texts = everyone.gather_text("\n".join(lines))
    for rank, text in enumerate(texts):
        for number, (ours, theirs) in enumerate(zip_longest(texts[0].split("\n"), text.split("\n"))):
            if ours != theirs:
                raise ValueError(
                    f"ranks disagree about the model: parameter {number} is {ours or 'missing'!r} on rank 0 "
                    f"and {theirs or 'missing'!r} on rank {rank}. Build the same model on every rank"
                )
    sums = everyone.roll_call([_fingerprint(p) for p in named.values()])
    for rank, row in enumerate(sums):
        for name, ours, theirs in zip(named, sums[0], row, strict=True):
            if ours != theirs:
                raise ValueError(
                    f"parameter {name!r} has other values on rank {rank} than on rank 0: seed every rank "
                    f"alike before building the model, or pass sync_module_states=True"
                )


def _fingerprint(parameter: Tensor) -> int:
    """A number that two tensors share only if they very likely hold the same values: the bits of their sum in
    fp64."""
    return parameter.detach().sum(dtype=torch.float64).view(torch.int64).item()


# --- The wrapper face ---------------------------------------------------------------------------------------


class FullyShardedDataParallel(nn.Module):
    """Shard ``module`` over all ranks: a unit for each submodule that the policy chooses, one for the rest.

    The wrapper is a second handle on the same module: the two share their attributes, so parameters keep
    their names, and whatever the module has, the wrapper has.

    Args:
        module: the model; every rank builds the same one.
        process_group: the ranks to shard over; a hybrid strategy shards within a node of them.
        sharding_strategy: see :mod:`minifsdp.strategy`.
        auto_wrap_policy: a set of module classes, or a callable of torch's convention, such as
            ``ModuleWrapPolicy``.
        backward_prefetch: ``BACKWARD_PRE`` starts to gather the next unit before a unit's backward,
            ``BACKWARD_POST`` after it; None waits until it is needed, and holds one unit less.
        mixed_precision: :class:`~minifsdp.precision.MixedPrecision`.
        device_id: where to move the model before it is sharded.
        sync_module_states: overwrite every rank's parameters and buffers by rank 0's first.
        device_mesh: instead of ``process_group``.
        limit_all_gathers: always so: never more than one unit is gathered ahead.
        use_orig_params: always on.
        collectives: ``"auto"``, ``"ring"`` or ``"native"``.

    Raises:
        NotImplementedError: an argument of torch's class that is not served yet.
        ValueError: as for :func:`fully_shard`.

    Source: PyTorch's FSDP (Zhao et al., 2023, https://arxiv.org/abs/2304.11277).
    """

    __slots__ = ("module",)

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        sharding_strategy: Enum | None = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Enum | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: Any = None,
        ignored_modules: Any = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = True,
        ignored_states: Any = None,
        device_mesh: DeviceMesh | None = None,
        *,
        collectives: str = "auto",
    ) -> None:
        _refuse(
            cpu_offload=bool(getattr(cpu_offload, "offload_params", cpu_offload)),
            ignored_modules=ignored_modules,
            ignored_states=ignored_states,
            param_init_fn=param_init_fn,
            forward_prefetch=forward_prefetch,
        )
        if not use_orig_params:
            raise NotImplementedError(
                "use_orig_params=False: parameters always keep their own names here; leave it out"
            )
        if is_unit(module):
            raise ValueError(f"{type(module).__name__} is sharded already: wrap each module once")
        if device_id is not None:
            module.to(torch.device("cuda", device_id) if isinstance(device_id, int) else device_id)
        placement = place(
            sharding_strategy or ShardingStrategy.FULL_SHARD,
            device_mesh if device_mesh is not None else process_group,
            _device_of(module).type,
            collectives,
        )
        if sync_module_states:
            for tensor in (*module.parameters(), *module.buffers()):
                placement.everyone.broadcast(tensor.detach())
        _cast_buffers(module, getattr(mixed_precision, "buffer_dtype", None))
        inner = chosen_by(auto_wrap_policy, module)
        shared = shared_between(inner, module)
        for child in inner:
            _shard(child, placement, mixed_precision, shared)
        prefetch = backward_prefetch.name.removeprefix("BACKWARD_").lower() if backward_prefetch else None
        _shard(module, placement, mixed_precision, prefetch=prefetch)
        object.__setattr__(self, "__dict__", module.__dict__)
        object.__setattr__(self, "module", module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the wrapper's own class lacks comes from the module: its methods, and those of
        :class:`FSDPModule`."""
        return getattr(self.module, name)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return self.module.state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        self.module._apply(fn, recurse)
        return self


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value:
            raise NotImplementedError(f"{name}={value!r} is not served; leave it out")


def _device_of(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _cast_buffers(module: nn.Module, dtype: torch.dtype | None) -> None:
    for child in module.modules():
        child._buffers.update(cast_floating(child._buffers, dtype))


# --- The whole again ----------------------------------------------------------------------------------------


@torch.no_grad()
def full_state_dict(model: nn.Module, rank0_only: bool = False) -> dict[str, Tensor]:
    """The state dict of the unsharded model: every name, with the full tensor in the model's own dtype, on
    the CPU.

    Every rank has to call it, since the shards are gathered unit by unit. ``rank0_only`` leaves the result
    empty on the other ranks, which saves their memory.
    """
    full: dict[nn.Parameter, Tensor] = {}
    for unit in units(model):
        keep = not rank0_only or unit.shards.rank == 0
        for parameter, tensor in unit.full_parameters():
            if keep:
                full[parameter] = tensor.cpu().clone()
    if rank0_only and dist.get_rank() != 0:
        return {}
    state = {name: full.get(tensor, tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    return {name: tensor.detach().cpu() for name, tensor in state.items()}
