"""Tensors that stand for a weight: they have its shape and dtype, and no data.

What may be done to one is up to its kind; each kind refuses the rest by the weight's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from fsdp_ref.errors import NotGatheredError


class StandIn(torch.Tensor):
    """Stands for one weight, and refuses every operation."""

    _name: str

    @staticmethod
    def __new__(
        cls, name: str, shape: Sequence[int], like: Tensor, requires_grad: bool = False
    ) -> Self:
        """Stand for the parameter ``name``, with the dtype and device of ``like``."""
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=like.dtype, device=like.device, requires_grad=requires_grad
        )
        self._name = name
        return self

    def __init__(
        self, name: str, shape: Sequence[int], like: Tensor, requires_grad: bool = False
    ) -> None:
        """Nothing left to do: `__new__` did the work, as for every tensor subclass."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Read metadata without asking; operations end in `__torch_dispatch__`.

        That it is defined here keeps fused modules off the path on which they read the weights of
        their parts themselves: they look for tensors that override torch's own.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves out `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuse the operation, by the name of the first stand-in among its arguments."""
        found = [leaf for leaf in (*args, *(kwargs or {}).values()) if isinstance(leaf, cls)]
        cls.refuse(f"'{found[0]._name}'" if found else "a weight", func)

    @classmethod
    def refuse(cls, name: str, operation: Any) -> NoReturn:
        """Raise because an operation needs values.

        Args:
            name: The weight, for the message.
            operation: What was to be done.

        Raises:
            NotGatheredError: Always.
        """
        raise NotGatheredError.at(
            name,
            expected="weights in memory",
            found=f"{operation} outside of its unit's forward, when only shards are in memory",
            fix="Call the module that was wrapped instead of using its weight; let the module "
            "that uses it belong to the same unit; or open summon_full_params() around it.",
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch has an argument nobody gives
        """Say what it stands for."""
        kind = type(self).__name__
        return f"{kind}('{self._name}', shape={tuple(self.shape)}, dtype={self.dtype})"


class ShardedAway(StandIn):
    """Stands for a weight of a unit while that is sharded.

    Without it, writing to the weight would write through an empty storage and crash the
    process.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedAway:
        """Stand for the same weight of a copied module, until that is set up."""
        return ShardedAway(self._name, self.shape, self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle what it says, as there is nothing else."""
        return ShardedAway, (self._name, self.shape, torch.empty(0, dtype=self.dtype))


class LoadTarget(StandIn):
    """Stands for a parameter during a load: notes what is copied to it, and refuses the rest."""

    _noted: Tensor | None = None
    _is_param = True  # lets it pass for an nn.Parameter

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch leaves out `func`
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Note what is copied here; refuse everything else."""
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0]._noted = args[1]
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def refuse(cls, name: str, operation: Any) -> NoReturn:
        """Raise because an operation needs values.

        Args:
            name: The weight, for the message.
            operation: What was to be done.

        Raises:
            NotGatheredError: Always.
        """
        raise NotGatheredError.at(
            name,
            expected="only copy_() during load_state_dict(), as only shards are in memory",
            found=str(operation),
            fix="Change the value in the state dict instead, in a hook before loading.",
        )
