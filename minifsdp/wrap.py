"""Which modules become units: the policies of torch.distributed.fsdp.wrap, accepted as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import nn


def chosen_by(policy: Collection[type] | Callable[..., bool] | Any, root: nn.Module) -> list[nn.Module]:
    """The modules inside ``root`` that become units of their own, inner ones first.

    Args:
        policy: a collection of module classes; one of torch's policy objects (``ModuleWrapPolicy``,
            ``CustomPolicy``); or a callable of torch's convention, ``policy(module=, recurse=,
            nonwrapped_numel=) -> bool``, such as a partial of ``size_based_auto_wrap_policy``. None chooses
            no module.
    """
    if policy is None:
        return []
    if hasattr(policy, "_run_policy"):
        chosen = policy._run_policy(root, set(), {})
    elif callable(policy):
        chosen = {module for module, _ in _walk(root, policy, set())}
    else:
        chosen = {module for module in root.modules() if isinstance(module, tuple(policy))}
    # This one is never called: its parent reads its weight.
    read_by_parent = {m.out_proj for m in root.modules() if isinstance(m, nn.MultiheadAttention)}
    inner_first = reversed(list(root.modules()))
    return [m for m in inner_first if m in chosen and m is not root and m not in read_by_parent]


def shared_between(inner: list[nn.Module], root: nn.Module) -> set[nn.Parameter]:
    """Tied parameters that no one of the ``inner`` modules holds alone: the root has to gather them."""
    unit_of = {}  # each module -> the innermost chosen module around it
    for unit in [root, *reversed(inner)]:
        unit_of.update(dict.fromkeys(unit.modules(), unit))
    holders: dict[nn.Parameter, set[nn.Module]] = {}
    for module in root.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders.setdefault(parameter, set()).add(unit_of[module])
    return {parameter for parameter, units in holders.items() if len(units) > 1}


def _walk(
    module: nn.Module, policy: Callable[..., bool], seen: set[nn.Module]
) -> Iterator[tuple[nn.Module, int]]:
    """Each module that the policy wraps, with the number of elements it wraps; children are asked before
    parents."""
    if module in seen:
        return
    seen.add(module)
    numel = sum(parameter.numel() for parameter in module.parameters())
    if not policy(module=module, recurse=True, nonwrapped_numel=numel):
        return
    wrapped = 0
    for child in module.children():
        for pair in _walk(child, policy, seen):
            wrapped += pair[1]
            yield pair
    if policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped):
        yield module, numel - wrapped
