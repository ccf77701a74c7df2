"""The sharded optimizer: each rank updates the shard that it owns, and nobody updates anything twice.

Adam works element by element, so a shard can be stepped without a word to the other ranks, and its two
moments exist for the shard only: 8 bytes a parameter become 8 / N (ZeRO stage 1, Rajbhandari et al., 2020,
section 5.1). Only the norm of the whole gradient needs all ranks, and that is one number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from minifsdp.collectives import Communicator
from minifsdp.shard import join, neighbours


class ShardedAdam(torch.optim.Optimizer):
    """Adam, or AdamW with ``decoupled_weight_decay``, over whole shards.

    The numbers are those of ``torch.optim.Adam`` on the same pieces, to the bit. The difference is the number
    of kernels: the pieces of a unit lie side by side in its shard, and so do their gradients and moments, so
    each operation runs once over the whole shard. Pieces with other hyperparameters, or without a gradient,
    split it.

    Args:
        params: parameters, or groups of them, as for any ``torch.optim`` optimizer.
        lr: step size.
        betas: decay of the running means of the gradient and of its square.
        eps: added to the denominator.
        weight_decay: of all parameters; added to the gradient, or to the step if decoupled.
        decoupled_weight_decay: AdamW (Loshchilov and Hutter, 2019) instead of Adam with L2 (Kingma and Ba,
            2015).
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
    ) -> None:
        for name, value, good in (
            ("lr", lr, lr >= 0),
            ("eps", eps, eps >= 0),
            ("weight_decay", weight_decay, weight_decay >= 0),
            ("betas", betas, all(0 <= beta < 1 for beta in betas)),
        ):
            if not good:
                raise ValueError(f"{name}={value} is out of range")
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "decoupled_weight_decay": decoupled_weight_decay,
            },
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient. Returns what ``closure`` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            ready = [p for p in group["params"] if p.grad is not None and p.numel()]
            ready.sort(key=Tensor.data_ptr)  # so that pieces side by side in memory are so in the list
            self._make_state([p for p in ready if not self.state[p]])
            ages = [self.state[p]["step"] for p in ready]
            for age in sorted(set(ages)):
                same_age = [p for p, its in zip(ready, ages, strict=True) if its == age]
                self._step_group(same_age, age + 1, group)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As any optimizer's; the moments are then laid side by side again."""
        super().load_state_dict(state_dict)
        loaded = dict(self.state)
        self._make_state(sorted(loaded, key=Tensor.data_ptr))
        for p, state in loaded.items():
            self.state[p]["step"] = state["step"]
            for moment in ("exp_avg", "exp_avg_sq"):
                self.state[p][moment].copy_(state[moment])

    def _make_state(self, parameters: list[nn.Parameter]) -> None:
        """Zero moments, laid out as the parameters are: side by side where those are."""
        for start, stop in neighbours([parameters]):
            run = parameters[start:stop]
            first = run[0].storage_offset()
            moments = [torch.zeros_like(join(run)) for _ in range(2)]
            for p in run:
                own = [
                    moment.as_strided(p.size(), p.stride(), p.storage_offset() - first) for moment in moments
                ]
                self.state[p] = {"step": 0, "exp_avg": own[0], "exp_avg_sq": own[1]}

    def _step_group(self, parameters: list[nn.Parameter], step: int, group: dict[str, Any]) -> None:
        columns = [
            parameters,
            [_in_memory_order_of(p, p.grad) for p in parameters],
            [self.state[p]["exp_avg"] for p in parameters],
            [self.state[p]["exp_avg_sq"] for p in parameters],
        ]
        for start, stop in neighbours(columns):
            adam(*[join(column[start:stop]) for column in columns], step=step, **group)
        for p in parameters:
            self.state[p]["step"] = step


def _in_memory_order_of(parameter: Tensor, gradient: Tensor) -> Tensor:
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def adam(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled_weight_decay: bool,
    **_: Any,
) -> None:
    """Adam in place on flat tensors (S,), with torch.optim's operations in torch.optim's order, so that bits
    agree."""
    beta1, beta2 = betas
    if weight_decay and decoupled_weight_decay:
        param.mul_(1 - lr * weight_decay)
    elif weight_decay:
        grad = grad.add(param, alpha=weight_decay)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    correction1 = 1 - beta1 ** float(step)  # as torch has it: a whole power could round otherwise
    correction2 = 1 - beta2 ** float(step)
    denominator = exp_avg_sq.sqrt().div_(correction2**0.5).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-lr / correction1)


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale all gradients so that their global norm is at most ``max_norm``.

    A shard knows only its own part of the norm, so the parts are summed over the ranks that hold the shards,
    once. Every rank has to call it.

    Args:
        parameters: a model, or its parameters.
        max_norm: in the units of the gradient.
        norm_type: p of the p-norm; ``inf`` for the largest absolute value.

    Returns:
        The norm before clipping, 0-dimensional, the same bits on every rank: that of the unsharded gradient.
    """
    parameters = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    largest = norm_type == float("inf")
    runs, total = [], torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    for shards, gradients in _by_shard_group(parameters):
        flat = [join(gradients[start:stop]) for start, stop in neighbours([gradients])]
        norms = [torch.linalg.vector_norm(run, norm_type, dtype=torch.float64) for run in flat]
        part = torch.stack([total * 0, *norms])
        part = part.max() if largest else part.pow(norm_type).sum()
        if shards is not None:
            shards.all_reduce(part, "max" if largest else "sum", "gradient norm").wait()
        total = torch.maximum(total, part) if largest else total + part
        runs += flat
    norm = (total if largest else total.pow(1 / norm_type)).to(parameters[0].dtype)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for run in runs:
        run.mul_(factor)
    return norm


def _by_shard_group(parameters: list[nn.Parameter]) -> list[tuple[Communicator | None, list[Tensor]]]:
    """The gradients of parameters by the ranks that hold them together; None for those that each rank holds
    whole.

    A group is listed even if this rank has no gradient in it: the others will wait for it there.
    """
    groups: dict[Any, tuple[Communicator | None, list[Tensor]]] = {}
    for p in sorted(parameters, key=Tensor.data_ptr):
        unit = getattr(p, "_fsdp_unit", None)
        shards = unit.shards if unit is not None else None
        _, gradients = groups.setdefault(shards and shards.group, (shards, []))
        if p.grad is not None and p.numel():
            gradients.append(p.grad)
    return list(groups.values())
