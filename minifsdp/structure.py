"""Tensors inside whatever a module takes and returns: tuples, dictionaries, dataclasses, nested as they
like."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
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


def cast_floating(tree: Any, dtype: torch.dtype | None) -> Any:
    """Floating tensors in ``dtype``, if there is one; token ids stay what they are."""
    if dtype is None:
        return tree
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


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
