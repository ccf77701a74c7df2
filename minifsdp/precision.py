"""Mixed precision: compute and send in 16 bits, remember in 32.

Three casts, each at one place of its own:

    param_dtype    the shard (fp32) is cast as it is copied into the gather      Flat.start_gather in unit.py
    reduce_dtype   gradients are cast as they are copied into the reduce buffer  Layout.add in shard.py
    buffer_dtype   buffers are cast once, when the model is wrapped              _cast_buffers in fsdp.py

The shard itself, its gradient and the optimizer's moments stay in fp32: they are the *master weights*, to
which an update of a thousandth of a percent can still be added (Micikevicius et al., "Mixed Precision
Training", 2018).

The range of fp16 ends at 6e-8 below and 65504 above. Small gradients would become zero, so the loss is
multiplied by a *scale* before backward and the gradients are divided by it after. The scale is as large as it
can be without overflow, and it is found by trying: :class:`ShardedGradScaler`. (bf16 has the range of fp32
and needs no scale.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minifsdp.collectives import Communicator
from minifsdp.shard import join, neighbours


@dataclass(frozen=True)
class MixedPrecision:
    """What is cast to which dtype; None leaves it as it is. Fields and meaning as in
    ``torch.distributed.fsdp``.

    Args:
        param_dtype: of the gathered parameters, and so of the computation.
        reduce_dtype: of the gradients' sum over ranks; default: ``param_dtype``.
        buffer_dtype: of the floating buffers.
        cast_forward_inputs: cast the floating inputs of every unit to ``param_dtype``.
        cast_root_forward_inputs: cast those of the root. Token ids are never cast.
        output_dtype: of the floating outputs of every unit that :func:`~minifsdp.fsdp.fully_shard` makes.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    output_dtype: torch.dtype | None = None


class ShardedGradScaler:
    """Dynamic loss scaling that all ranks agree on, with the interface of ``torch.amp.GradScaler``.

    >>> scaler.scale(loss).backward()
    >>> scaler.unscale_(optimizer)  # only if you clip
    >>> scaler.step(optimizer)  # skipped on every rank if any rank has an inf or nan
    >>> scaler.update()

    A rank sees only its shard of the gradient. If each decided for itself, one rank would skip a step that
    the others take, and the model would come apart; so the answer to "is there an overflow?" is a maximum
    over all ranks.

    Args:
        device: accepted for the sake of the interface; the scale lives where the gradients are.
        init_scale: the first scale, a power of two so that scaling loses no bit.
        growth_factor: applied after ``growth_interval`` steps in a row without overflow.
        backoff_factor: applied after an overflow.
        enabled: False makes every method do nothing, so that one training loop serves all precisions.
        process_group: the ranks that must agree; default: all.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if growth_factor <= 1 or not 0 < backoff_factor < 1:
            raise ValueError("growth_factor must be above 1 and backoff_factor between 0 and 1")
        self._scale = init_scale
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._enabled = enabled
        self._good_steps = 0
        self._overflow: dict[
            torch.optim.Optimizer, bool
        ] = {}  # the optimizers unscaled since the last update
        self._stepped: set[torch.optim.Optimizer] = set()
        self._group = process_group

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> float:
        return self._scale if self._enabled else 1.0

    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Any:
        """The loss, or each of several, times the scale."""
        if isinstance(outputs, Tensor):
            return outputs * self.get_scale()
        return type(outputs)(self.scale(output) for output in outputs)

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, once, and find out whether any rank has an inf or a nan."""
        if not self._enabled:
            return
        if optimizer in self._overflow:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update()")
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        device = gradients[0].device if gradients else torch.device("cpu")
        overflow = torch.zeros(1, device=device)
        for start, stop in neighbours([gradients]):
            run = join(gradients[start:stop]).mul_(1 / self._scale)
            overflow += 1 - torch.isfinite(run).all().float()
        Communicator(self._group).all_reduce(overflow, "max", "overflow").wait()
        self._overflow[optimizer] = bool(overflow.item())

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, unless some rank has seen an overflow."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if optimizer not in self._overflow:
            self.unscale_(optimizer)
        if optimizer in self._stepped:
            raise RuntimeError("step() has already been called on this optimizer since the last update()")
        self._stepped.add(optimizer)
        return None if self._overflow[optimizer] else optimizer.step(*args, **kwargs)

    def update(self, new_scale: float | None = None) -> None:
        """Shrink the scale after an overflow; let it grow after enough good steps. Ends the iteration."""
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = float(new_scale)
        elif not self._overflow:
            raise RuntimeError("update() needs a step() or unscale_() before it")
        elif any(self._overflow.values()):
            self._scale *= self._backoff_factor
            self._good_steps = 0
        else:
            self._good_steps += 1
            if self._good_steps == self._growth_interval:
                self._scale *= self._growth_factor
                self._good_steps = 0
        self._overflow.clear()
        self._stepped.clear()

    def state_dict(self) -> dict[str, Any]:
        """The scale and what it depends on, under the names that ``torch.amp.GradScaler`` uses."""
        if not self._enabled:
            return {}
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._good_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self._enabled:
            return
        self._scale = state_dict["scale"]
        self._growth_factor = state_dict["growth_factor"]
        self._backoff_factor = state_dict["backoff_factor"]
        self._growth_interval = state_dict["growth_interval"]
        self._good_steps = state_dict["_growth_tracker"]
