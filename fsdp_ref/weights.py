"""Weights in and out of a wrapped module: whole ones for a while, state dicts, `apply`, `to`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Generic, ParamSpec, Self, TypeVar

from torch import Tensor, nn

from fsdp_ref.consolidate import consolidate_shard_weights
from fsdp_ref.errors import SummonContextError
from fsdp_ref.full_params import full_parameters
from fsdp_ref.optim_names import OlderOptimizerNames
from fsdp_ref.saving import StateDicts
from fsdp_ref.unit_module import UnitModule

P = ParamSpec("P")
T = TypeVar("T")


class _method_or_static(Generic[P, T]):
    """Lets a function be called as a method of a model, or with any model in front.

    FairScale's `summon_full_params` is a method. Torch's is static, which can also be called on a
    model: then the module comes first, or by name, all the same.
    """

    def __init__(self, function: Callable[P, T]) -> None:
        """Wrap ``function``, whose first argument is called `module`."""
        self.function = self.__wrapped__ = function

    def __get__(self, instance: nn.Module | None, owner: type | None = None) -> Callable[..., T]:
        """Return the function itself, or bound to a model."""
        if instance is None:
            return self.function

        @wraps(self.function)
        def method(*args: Any, **kwargs: Any) -> T:
            given = "module" in kwargs or isinstance(next(iter(args), None), nn.Module)
            return self.function(*(args if given else (instance, *args)), **kwargs)

        return method


class WeightAccess(StateDicts, OlderOptimizerNames):
    """A wrapper whose weights can be seen, edited, saved and loaded as a whole."""

    @_method_or_static
    @contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
        *,
        volatile: bool | None = None,
    ) -> Iterator[None]:
        """Give every module its full parameters back while the context is open. Collective.

        Inside, names, shapes and order are those of the model before wrapping, and parameters
        have their own dtype. All units are gathered at once, so the whole model has to fit in
        memory, beside what is there already. Neither a forward nor a backward may run inside.

        Call it as a method, like FairScale's, or on the class with any module that contains
        units, like torch's: `FullyShardedDataParallel.summon_full_params(model)`.

        Every rank opens it with the same arguments and leaves it. If one leaves it by an
        exception, nothing is kept there, and ranks that want to keep edits get an error after
        the process group's time limit.

        Args:
            module: The units to show are in it. As a method, it is the model itself.
            recurse: Include the inner units; otherwise only `module`, if it is one.
            writeback: Keep edits: of values, of `requires_grad`, and of gradients if they are
                shown. All ranks have to make the same ones; comparing them costs about as
                much as gathering.
            rank0_only: Show the parameters on the first rank of each unit's group only, of its
                first copy if it has several. The other ranks keep their shards and need no
                memory. With `writeback`, the edits of that rank are taken over by all.
            offload_to_cpu: Show them on the CPU, one unit after the other being moved there.
            with_grads: Also show the mean gradients, whole, as `.grad`; `None` where there is
                none.
            volatile: FairScale's word for the opposite of `writeback`: `True` forgets edits.

        Yields:
            Nothing; the parameters are in their modules.

        Raises:
            SummonContextError: If entered again inside itself, or during a forward or backward,
                or with `writeback` and `volatile` both `False`. On the way out, if an edit cannot
                be kept: another shape, or a parameter frozen alone (without `use_orig_params` a
                unit's parameters of one dtype are frozen together).
            SummonDisagreementError: If ranks wrote different values; nothing is kept then. Or
                if only some ranks have gradients to show.
            UnsynchronizedStepError: If gradients from inside `no_sync` are to be shown.
            SilentRanksError: If a rank does not take part within the time limit.

        Tip: Make the same edit on every rank
            Each rank keeps only its own part of what it wrote. An edit on one rank alone would
            leave a weight that is half old and half new; here it raises, and nothing is kept.

            Proof: tips/edit_inside_summon
        """
        if volatile is False and not writeback:
            raise SummonContextError.at(
                "summon_full_params",
                expected="writeback and volatile to be opposites",
                found="writeback=False and volatile=False",
                fix="Leave out volatile.",
            )
        parts = UnitModule.fsdp_modules(module)
        parts = [part for part in parts if recurse or part is module]
        # Several models may be inside; what concerns all their ranks goes through all groups.
        schedules = dict.fromkeys(part._set_up() for part in parts)
        groups = {group.ranks: group for schedule in schedules for group in schedule.groups}
        before = {part: part._unit.generations() for part in parts}
        with full_parameters(
            [part._unit for part in parts],
            list(groups.values()),
            writeback=writeback and not volatile,
            rank0_only=rank0_only,
            offload_to_cpu=offload_to_cpu,
            with_grads=with_grads,
        ):
            yield
        for part, generations in before.items():
            part._initial_changed(since=generations)

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: Sequence[Mapping[str, Any]],
        shard_metadata: Sequence[Mapping[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Return whole weights from the local dicts of all ranks. Needs no ranks and no model.

        Args:
            shard_weights: What `local_state_dict()` returned on each rank, in any order.
            shard_metadata: What `local_metadata_dict()` returned, in the same order.
            with_module_buffers: Include buffers and whatever else is not sharded, of the lowest
                rank.
            strict: Raise if shards are missing. Otherwise leave out weights that lack any.

        Returns:
            A state dict for the plain model; a tied weight is there under each of its names, and
            versions that differ from group to group under the name and the first rank that has
            one, such as `"expert.weight@rank2"`.

        Raises:
            ConsolidationError: If ranks are missing or there twice, or if dicts do not belong
                together.
        """
        return consolidate_shard_weights(shard_weights, shard_metadata, with_module_buffers, strict)

    # Behaving like the module inside

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` on every module, with full parameters, and keep what it writes. Collective.

        Args:
            fn: Called on each module, as by `nn.Module.apply`; must do the same on all ranks.

        Returns:
            The model itself.
        """
        if self._unit.summoned:  # by the enclosing unit, whose apply has come down to here
            return super().apply(fn)
        with self.summon_full_params():
            return super().apply(fn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # What `to`, `half`, `cuda` and their like call, with a function of one tensor. The
        # shards follow it as parameters do; the full tensors are then made anew to match.
        self.reshard()
        with self._unit.registered.flat_shown():
            # torch leaves `_apply` untyped
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for flat_param in self._unit.flat_params:
            flat_param.follow_move()
        self._unit.registered.follow_dtype_and_device()
        return self
