"""Tensors inside whatever a module takes and returns: tuples, dictionaries, dataclasses, nested as they
like."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """``tree`` with each tensor replaced by ``function(tensor)``; everything else is passed on as it is."""
    if isinstance(tree, Tensor):
        return function(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        result = copy.copy(tree)
        for field in dataclasses.fields(tree):
            if hasattr(tree, field.name):
                object.__setattr__(result, field.name, map_tensors(function, getattr(tree, field.name)))
        return _update_mapping(function, result) if isinstance(tree, Mapping) else result
    if isinstance(tree, Mapping):
        return _update_mapping(function, copy.copy(tree))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*(map_tensors(function, item) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(function, item) for item in tree)
    return tree


def replace_tensors(tree: Any, transform: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> Any:
    """``tree`` with the tensors that require a gradient replaced, all at once, by ``transform`` of their
    list."""
    found: dict[int, Tensor] = {}
    map_tensors(lambda tensor: found.setdefault(id(tensor), tensor) if tensor.requires_grad else tensor, tree)
    replaced = dict(zip(found, transform(list(found.values())), strict=True))
    return map_tensors(lambda tensor: replaced.get(id(tensor), tensor), tree)


def _update_mapping(function: Callable[[Tensor], Tensor], mapping: Any) -> Any:
    for key, value in list(mapping.items()):
        mapping[key] = map_tensors(function, value)
    return mapping
