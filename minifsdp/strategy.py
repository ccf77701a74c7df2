"""Sharding strategies: which ranks hold one copy of the parameters together, and which hold the same shard.

                          shard group   replica group   gathered parameters after forward
    FULL_SHARD            all ranks     -               released                             ZeRO-3
    SHARD_GRAD_OP         all ranks     -               kept for backward                    ZeRO-2
    NO_SHARD              one rank      all ranks       (nothing to gather)                  data parallel
    HYBRID_SHARD          one node      across nodes    released
    _HYBRID_SHARD_ZERO2   one node      across nodes    kept for backward

Every strategy is these three choices and nothing else: a unit gathers within its shard group, reduce-scatters
within it, and then averages its gradient shard over its replica group. Names and meaning are those of
torch.distributed.fsdp.
"""

from __future__ import annotations

import enum
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from minifsdp.collectives import Communicator


class ShardingStrategy(enum.Enum):
    """See the table above."""

    FULL_SHARD = enum.auto()
    SHARD_GRAD_OP = enum.auto()
    NO_SHARD = enum.auto()
    HYBRID_SHARD = enum.auto()
    _HYBRID_SHARD_ZERO2 = enum.auto()


@dataclass(frozen=True)
class CPUOffload:
    """Keep shards in CPU memory while they are not in use, as in torch.distributed.fsdp."""

    offload_params: bool = False


@dataclass
class Placement:
    """A strategy applied to the ranks at hand."""

    everyone: Communicator  # all ranks that train this model
    shards: Communicator  # those that hold one copy together
    replicas: Communicator | None  # those that hold the same shard; None if this rank is the only one
    keep_after_forward: bool | None  # None: only the unit that backward needs first


def place(
    strategy: enum.Enum = ShardingStrategy.FULL_SHARD,
    ranks: dist.ProcessGroup | DeviceMesh | None = None,
    device_type: str = "cpu",
    algorithm: str = "auto",
) -> Placement:
    """Build the process groups of a strategy.

    Args:
        strategy: ours, or torch's enum of the same name.
        ranks: a process group or a 1-D mesh (default: all ranks), or a 2-D mesh whose first dimension
            replicates and whose second shards. A hybrid strategy without a mesh shards within a node of
            ``LOCAL_WORLD_SIZE`` ranks.
        algorithm: that of :class:`~minifsdp.collectives.Communicator`.

    Raises:
        ValueError: the mesh does not fit the strategy.
    """
    hybrid = strategy.name in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
    keep = True if strategy.name in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2") else None
    if isinstance(ranks, DeviceMesh) and ranks.ndim > 2:
        raise ValueError(
            f"a mesh of {ranks.ndim} dimensions: give 1 (shard) or 2 (replicate, shard), or slice yours"
        )
    if isinstance(ranks, DeviceMesh) and ranks.ndim == 1:
        ranks = ranks.get_group()
    if isinstance(ranks, DeviceMesh):
        return _on_mesh(ranks, keep, algorithm)
    everyone = Communicator(ranks, algorithm)
    if not hybrid and strategy.name != "NO_SHARD":
        return Placement(everyone, everyone, None, keep)
    shards = int(os.environ.get("LOCAL_WORLD_SIZE", everyone.size)) if hybrid else 1
    if everyone.size % shards:
        raise ValueError(
            f"{strategy.name}: {everyone.size} ranks do not split into nodes of {shards}; pass a 2-D mesh"
        )
    grid = torch.tensor(dist.get_process_group_ranks(everyone.group)).view(-1, shards)
    mesh = DeviceMesh(device_type, grid, mesh_dim_names=("replicate", "shard"))
    return _on_mesh(mesh, keep, algorithm, everyone)


def _on_mesh(
    mesh: DeviceMesh, keep: bool | None, algorithm: str, everyone: Communicator | None = None
) -> Placement:
    replicas, shards = (Communicator(mesh.get_group(dim), algorithm) for dim in (0, 1))
    if everyone is None:
        everyone = _flattened(mesh, algorithm)
    return Placement(everyone, shards, replicas if replicas.size > 1 else None, keep)


def _flattened(mesh: DeviceMesh, algorithm: str) -> Communicator:
    """All ranks of a 2-D mesh as one group: the world where that is all of them."""
    if mesh.size() == dist.get_world_size():
        return Communicator(None, algorithm)
    ranks = sorted(mesh.mesh.flatten().tolist())
    return Communicator(dist.new_group(ranks, use_local_synchronization=True), algorithm)
