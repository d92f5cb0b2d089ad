"""Tensors inside of whatever people pass around: containers, their subclasses, and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def tensors_in(value: Any) -> list[Tensor]:
    """Find the tensors in containers, also those of one's own class, and in dataclasses. Local.

    Args:
        value: Whatever goes into a forward, or comes out of it.

    Returns:
        The tensors, in order.

    Examples:
        >>> import torch
        >>> len(tensors_in({"loss": torch.zeros(()), "hidden": [torch.zeros(2), None]}))
        2
    """
    found: list[Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        else:
            for part in _parts(leaf):
                found += tensors_in(part)
    return found


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Put other tensors in the place of those in containers and dataclasses. Local.

    Args:
        change: Returns what is to take the place of a tensor; itself, if it is to stay.
        value: Whatever goes into a forward, or comes out of it; it is not changed.

    Returns:
        A copy with the other tensors, of the same class.

    Examples:
        >>> import torch
        >>> map_tensors(lambda tensor: tensor + 1, [torch.zeros(2), "and text"])
        [tensor([1., 1.]), 'and text']
    """

    def one(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return change(leaf)
        before = _parts(leaf)
        after = [map_tensors(change, part) for part in before]
        changed = any(new is not old for new, old in zip(after, before, strict=True))
        return _with_parts(leaf, after) if changed else leaf

    return tree_map(one, value)


def _parts(leaf: Any) -> list[Any]:
    """Return what is inside of something that torch's trees take for one piece."""
    if isinstance(leaf, dict):
        return list(leaf.values())
    if isinstance(leaf, list | tuple):
        return list(leaf)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return [getattr(leaf, part.name) for part in fields(leaf)]
    return []


def _with_parts(leaf: Any, parts: list[Any]) -> Any:
    if isinstance(leaf, tuple):
        return type(leaf)(*parts) if hasattr(leaf, "_fields") else type(leaf)(parts)
    changed = copy.copy(leaf)
    if isinstance(leaf, dict):
        for key, part in zip(leaf, parts, strict=True):
            changed[key] = part
    elif isinstance(leaf, list):
        changed[:] = parts
    else:
        for field, part in zip(fields(leaf), parts, strict=True):
            # Frozen ones too: the copy is ours until we return it.
            object.__setattr__(changed, field.name, part)
    return changed
