"""minifsdp: Fully Sharded Data Parallel training, to be read and to be used."""

from minifsdp.collectives import Traffic
from minifsdp.fsdp import FullyShardedDataParallel, full_state_dict, fully_shard
from minifsdp.optim import ShardedAdam, clip_grad_norm_
from minifsdp.precision import MixedPrecision, ShardedGradScaler
from minifsdp.schedule import BackwardPrefetch
from minifsdp.strategy import CPUOffload, ShardingStrategy

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "ShardedAdam",
    "ShardedGradScaler",
    "ShardingStrategy",
    "Traffic",
    "clip_grad_norm_",
    "full_state_dict",
    "fully_shard",
]
