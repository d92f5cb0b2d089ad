"""The tensors that go into a unit and come out of it, in whatever containers and ways."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_ref.errors import OutputNotUnderstoodWarning


def alias_inputs(args: Any, kwargs: Any, when_passed: Callable[[], None]) -> tuple[int, Any, Any]:
    """Alias all inputs that need a gradient, and be told when backward has passed each of them.

    Autograd runs later operations first, so everything a unit did in this call, and in every
    later one, has been differentiated by the time its inputs' aliases are. Counting parameters
    instead would go wrong as soon as two ranks use different ones. An alias that never gets a
    gradient, or that the module overwrites in place, does no harm: the unit is then reduced
    together with the one before it.

    Args:
        args: Positional arguments of a forward.
        kwargs: Keyword arguments of a forward.
        when_passed: Called once per backward and alias.

    Returns:
        How many inputs were aliased, and the arguments to use instead.
    """
    leaves, structure = tree_flatten((args, kwargs))
    count = 0
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaves[index] = alias = leaf.view_as(leaf)
            if alias.grad_fn is not None:  # always, as it needs a gradient
                alias.grad_fn.register_hook(lambda *_: when_passed())
                count += 1
    args, kwargs = tree_unflatten(leaves, structure)
    return count, args, kwargs


def tensors_in(output: Any) -> list[Tensor]:
    """Find the tensors in an output: in containers, and in the fields of dataclasses.

    Args:
        output: Whatever a forward returned.

    Returns:
        The tensors, in order.

    Examples:
        >>> import torch
        >>> len(tensors_in({"loss": torch.zeros(()), "hidden": [torch.zeros(2), None]}))
        2
    """
    found: list[Tensor] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for part in fields(leaf):
                found += tensors_in(getattr(leaf, part.name))
    return found


class SideOutputs:
    """Tensors that leave a unit as attributes of its modules, such as an auxiliary loss."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Look at ``modules``, those of one unit."""
        self._modules = list(modules)
        self._seen: Any = WeakIdKeyDictionary()  # also those left over from earlier forwards

    def new(self) -> list[Tensor]:
        """Return the tensors with a gradient that were not there when this was asked before."""
        found = []
        for module in self._modules:
            for name, value in vars(module).items():
                for tensor in _tensors_of_attribute(name, value):
                    if tensor.grad_fn is not None and tensor not in self._seen:
                        self._seen[tensor] = True
                        found.append(tensor)
        return found


def _tensors_of_attribute(name: str, value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple, dict)) and not name.startswith("_"):
        parts = value.values() if isinstance(value, dict) else value
        return [part for part in parts if isinstance(part, Tensor)]
    return []


def warn_of_output(output: Any, where: str) -> None:
    """Warn that no tensor was found in an output.

    Args:
        output: What a forward returned.
        where: The unit, for the message.
    """
    warnings.warn(
        OutputNotUnderstoodWarning.at(
            where,
            expected="an output with tensors, in lists, tuples, dicts or dataclasses",
            found=f"{type(output).__name__} without any",
            fix="If tensors hide inside, return them too: a backward through them alone fails.",
        ),
        stacklevel=3,
    )
