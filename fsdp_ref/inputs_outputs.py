"""The tensors that go into a unit and come out of it, in whatever containers and ways."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_ref.containers import map_tensors, tensors_in
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
    count = 0

    def alias(tensor: Tensor) -> Tensor:
        nonlocal count
        if not tensor.requires_grad:
            return tensor
        passed = tensor.view_as(tensor)
        if passed.grad_fn is not None:  # always, as it needs a gradient
            passed.grad_fn.register_hook(lambda *_: when_passed())
            count += 1
        return passed

    args, kwargs = map_tensors(alias, (args, kwargs))
    return count, args, kwargs


def own_copies(output: Any, weights: Iterable[Tensor]) -> Any:
    """Copy those tensors of an output that share memory with weights, which are dropped soon.

    A learned position embedding that returns a slice of its weight is such a module.

    Args:
        output: Whatever a forward returned.
        weights: The unsharded weights of the unit.

    Returns:
        The same, if there is none; otherwise one with copies in their place. Gradients flow
        through them.
    """
    dropped = {_memory_of(weight) for weight in weights} - {None}
    if not any(_memory_of(tensor) in dropped for tensor in tensors_in(output)):
        return output
    return map_tensors(lambda t: t.clone() if _memory_of(t) in dropped else t, output)


def _memory_of(tensor: Tensor) -> int | None:
    """Return where a tensor's memory begins; `None` if it has none, or does not say."""
    try:
        return tensor.untyped_storage().data_ptr() or None
    except RuntimeError:  # sparse tensors, and those inside function transforms
        return None


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
