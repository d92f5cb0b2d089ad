"""`FullyShardedDataParallel`: what people construct and call.

# One training step

Wrapping turns a module into a *unit*. Between steps each rank keeps only its shard of the
unit's parameters. A forward gathers the full parameters, computes, and drops them; the
backward gathers them again, computes the gradients, sums them over the ranks so that each
rank keeps the mean gradient of its own shard, and drops them once more. The optimizer then
updates shards. Other [strategies][fsdp_ref.strategies] keep the full parameters longer, or
never cut them.

Units nest. Parameters that no inner unit holds belong to the enclosing one; the outermost
unit, the *root*, belongs around the whole model, because it alone sees the order of the units
and the end of the backward. It keeps its full parameters from the forward to the backward,
which follows at once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ref import agreement, process_groups
from fsdp_ref.at_exit import wait_for_threads_at_exit
from fsdp_ref.errors import (
    InnerUnitBeforeRootError,
    RootOnlyError,
    SummonContextError,
)
from fsdp_ref.flat_param import flatten
from fsdp_ref.full_params import full_parameters
from fsdp_ref.grad_norm import scale_gradients, total_norm
from fsdp_ref.naming import current_unit_name
from fsdp_ref.optimizer_watch import refuse_unreduced, watch_optimizers
from fsdp_ref.originals import (
    cast_buffers,
    collect_originals,
    move_buffers,
    refuse_module,
    refuse_parameters,
)
from fsdp_ref.precision import as_precision
from fsdp_ref.registered import RegisteredNames
from fsdp_ref.schedule import RootSchedule
from fsdp_ref.state_dict import (
    clean_name,
    fill_in_full_values,
    insert_wrapped,
    restore_dtypes,
    strip_wrapped,
    take_own_values,
)
from fsdp_ref.states import Phase
from fsdp_ref.strategies import place
from fsdp_ref.structure import count_models, describe_units
from fsdp_ref.unit import Unit
from fsdp_ref.wrapper import Wrapper
from fsdp_ref.wrapping import apply_policy


class FullyShardedDataParallel(Wrapper):
    """Shard a module's parameters, gradients and optimizer state over ranks.

    Collective: every rank constructs the same units, with the same arguments, in the same
    order. Construction itself sends nothing; ranks are compared when the root is first used.

    Build the optimizer after wrapping, from `model.parameters()`. The wrapper answers
    attribute and index access like the module inside.

    Warning: Initialise before wrapping
        A deterministic initialisation of the parameters after wrapping, with one seed on all
        ranks, fills every shard with the same numbers: as many identical shards as there are
        ranks, and a weight of low rank. Initialise before wrapping, or inside
        `summon_full_params`. A run shows the damage:
        [wrapping/initialise_after_sharding][initialise-after-sharding].

    Tip: Build the optimizer after wrapping
        Wrapping replaces the parameters that an optimizer can update by flat parameters. An
        optimizer from before wrapping would train nothing; its first step raises here.

        Proof: tips/optimizer_after_wrapping

    Args:
        module: The module to wrap; it is changed in place.
        process_group: The ranks that share this unit: `None` for all, a process group, a word
            such as `'self'`, or a list of global ranks that contains this one. A hybrid
            strategy takes a pair: the ranks that share one copy, the ranks that hold the others.
        sharding_strategy: What is cut, what is copied and what is kept after a forward, as a
            word or as torch's enum; see [fsdp_ref.strategies][]. By default `FULL_SHARD`.
        auto_wrap_policy: Which modules inside become units of their own; see
            [fsdp_ref.wrapping][]. A policy may return a dict of arguments for a unit.
        mixed_precision: In which dtypes to compute and to reduce: torch's `MixedPrecision` or a
            dict; see [fsdp_ref.precision][]. By default everything stays in its own dtype.
        device_id: Where parameters and buffers go; by default they stay on their device.
        device_mesh: In place of `process_group`, a mesh of one or two dimensions.

    Raises:
        NotAModuleError: If `module` is no module.
        NoValuesError: If a parameter is on the meta device, or lazy.
        ContainerWithoutForwardError: If `module` has no `forward`, such as `ModuleList`.
        AlreadyWrappedError: If `module` is a unit, or the policy meets one inside.
        NonFloatingParameterError: If a parameter has an integer, boolean or complex dtype.
        ScalarParameterError: If a parameter has no dimension.
        TiedParametersError: If a parameter would belong to two units.
        PrecisionError: If `mixed_precision` is not understood.
        StrategyError: If there is no such strategy, or the groups do not fit it.

    Examples:
        >>> import torch.distributed as dist
        >>> dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, backend="gloo")
        >>> model = FullyShardedDataParallel(nn.Linear(2, 3))
        >>> [tuple(parameter.shape) for parameter in model.parameters()]
        [(9,)]
        >>> list(model.state_dict())
        ['weight', 'bias']
        >>> dist.destroy_process_group()
    """

    _is_fsdp_unit = True

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        *,
        auto_wrap_policy: Any = None,
        mixed_precision: Any = None,
        device_id: int | torch.device | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        name = current_unit_name() or type(module).__name__
        where = f"unit '{name}'"
        refuse_module(module, where)
        precision = as_precision(mixed_precision, where)
        placement = place(sharding_strategy, process_group, where=where, device_mesh=device_mesh)
        refuse_parameters(collect_originals(module), where)
        if auto_wrap_policy is not None:
            defaults = {
                "process_group": process_group,
                "sharding_strategy": sharding_strategy,
                "mixed_precision": mixed_precision,
                "device_id": device_id,
                "device_mesh": device_mesh,
            }
            apply_policy(module, auto_wrap_policy, type(self), defaults)
        super().__init__()
        self._fsdp_wrapped_module = module
        device = None if device_id is None else torch.device(device_id)
        move_buffers(module, device)
        flat_params = flatten(collect_originals(module), placement, device, precision)
        self._unit = Unit(name, flat_params, placement, RegisteredNames(self, flat_params))
        self._precision = precision
        self._buffer_dtypes: dict[str, torch.dtype] = {}  # before they were cast
        self._schedule: RootSchedule | None = None
        self._number = count_models(placement)
        self._outer: weakref.ref[FullyShardedDataParallel] | None = None
        self._adopt_inner_units()
        watch_optimizers()
        wait_for_threads_at_exit()

    # The tree of units

    @property
    def process_group(self) -> ProcessGroup:
        """The live process group of this unit. Collective at first use: it may be created then."""
        self._set_up()
        return self._unit.group.live

    @staticmethod
    def fsdp_modules(module: nn.Module) -> list[FullyShardedDataParallel]:
        """Return all units in ``module``, outer before inner. Not collective.

        Args:
            module: Any module.

        Returns:
            The units, in the order of `module.modules()`.
        """
        return [part for part in module.modules() if isinstance(part, FullyShardedDataParallel)]

    def check_is_root(self) -> bool:
        """Return whether this is the outermost unit. Not collective."""
        return self._root() is self

    def _adopt_inner_units(self) -> None:
        """Tell inner units who is around them, and what they are called from here."""
        for name, part in self._named_units():
            if part is not self:
                part._rename(name)
                part._schedule = None
                if part._outer is None or part._outer() is None:
                    part._outer = weakref.ref(self)

    def _named_units(self) -> Iterator[tuple[str, FullyShardedDataParallel]]:
        """Yield this unit and all inner ones, outer first, under the plain model's names."""
        for name, part in self.named_modules():
            if isinstance(part, FullyShardedDataParallel):
                yield clean_name(name), part

    def _rename(self, name: str) -> None:
        before, self._unit.name = self._unit.where, name
        for group in self._unit.placement.groups:
            group.asked = group.asked.replace(before, self._unit.where, 1)

    def _root(self) -> FullyShardedDataParallel:
        outer = None if self._outer is None else self._outer()
        return self if outer is None else outer._root()

    def _set_up(self) -> RootSchedule:
        """Name the units, create their groups, compare them across ranks. Collective, once."""
        root = self._root()
        if root._schedule is None:
            units = []
            for name, part in root._named_units():
                part._rename(name)
                part._buffer_dtypes |= cast_buffers(part.module, part._precision.buffer_dtype)
                units.append(part._unit)
            # Groups first: they are compared over all ranks, also if the root's own differ.
            process_groups.create([group for unit in units for group in unit.placement.groups])
            root._compare("structure of the model", describe_units(units, root._number))
            differ = partial(root._compare, "order of the units")
            root._schedule = RootSchedule(units, root._number, differ)
        return root._schedule

    def _compare(self, topic: str, mine: str) -> None:
        for group in self._unit.placement.groups:
            agreement.compare(topic, mine, group.ranks)

    # A step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its parameters gathered. Collective.

        Args:
            *args: Passed on to the module.
            **kwargs: Passed on to the module.

        Returns:
            What the module returns.

        Raises:
            InnerUnitBeforeRootError: If an inner unit is called before the root ever was.
            SummonContextError: If called inside `summon_full_params`.
        """
        unit, is_root = self._unit, self.check_is_root()
        if not is_root and self._root()._schedule is None:
            raise InnerUnitBeforeRootError.at(
                unit.where,
                expected="the outermost unit to be called first",
                found="a call of an inner unit",
                fix="Call the model itself once before you call a part of it.",
            )
        if unit.summoned:
            raise SummonContextError.at(
                unit.where,
                expected="a forward outside of summon_full_params",
                found="a forward inside it",
                fix="Close the context first; a forward gathers what it needs by itself.",
            )
        self._set_up()
        try:
            args, kwargs = self._precision.cast_inputs(args, kwargs, is_root=is_root)
            call, args, kwargs = unit.pre_forward(args, kwargs)
            output = self._fsdp_wrapped_module(*args, **kwargs)
        except BaseException:
            unit.abandon_forward()
            raise
        return unit.post_forward(call, output)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them; the next backward outside reduces the sum.

        Every rank opens the context around the same forwards and backwards. It saves the
        reduce-scatters and nothing else: inside, each rank keeps the gradient of the *whole*
        model.

        Yields:
            Nothing.

        Raises:
            RootOnlyError: If called on an inner unit.

        Tip: Accumulate inside no_sync only if the whole gradient fits
            Without `no_sync` the gradients of several backwards add up too, as shards, to the
            same sum. `no_sync` trades memory for fewer reduce-scatters.

            Proof: tips/accumulate_gradients
        """
        self._root_only("no_sync")
        with self._set_up().without_synchronization():
            yield

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradient of the whole model by its norm. Collective.

        Each element counts once, in whatever unit and group it lies.

        Args:
            max_norm: The largest norm that is left as it is.
            norm_type: The p of the p-norm, above 0; `float("inf")` for the largest element.

        Returns:
            The norm before clipping, a scalar tensor, the same on every rank.

        Raises:
            RootOnlyError: If called on an inner unit.
            UnsynchronizedStepError: If gradients from inside `no_sync` are not reduced yet.
            ValueError: If `norm_type` is not above 0.

        Tip: Clip with the model's own method
            `torch.nn.utils.clip_grad_norm_` sees one rank's shards. It computes another norm on
            each rank and scales the pieces of one gradient differently.

            Proof: tips/clip_by_the_true_norm
        """
        self._root_only("clip_grad_norm_")
        schedule = self._set_up()
        flat_params = [p for unit in schedule.units for p in unit.flat_params]
        refuse_unreduced(flat_params, "clip_grad_norm_()")
        norm = total_norm(flat_params, float(norm_type), schedule.groups)
        scale_gradients(flat_params, norm, max_norm)
        return norm

    def reshard(self) -> None:
        """Drop full parameters that are in memory, here and in all inner units. Not collective.

        The next forward gathers them again. Needed after editing a shard through `.data`, an
        edit that leaves no trace.

        Tip: Evaluate whenever you like
            Weights gathered for an evaluation are never used after the next optimizer step: a
            forward without gradients keeps nothing, and a step drops what is kept. Torch's
            classes keep them, and may compute the next training step with weights from before.

            Proof: tips/evaluate_then_step
        """
        for part in self.fsdp_modules(self):
            if part._unit.phase is Phase.IDLE and not part._unit.summoned:
                part._unit.reshard()

    # Weights in and out

    @contextmanager
    def summon_full_params(self, recurse: bool = True, writeback: bool = True) -> Iterator[None]:
        """Give every module its full parameters back while the context is open. Collective.

        Inside, names, shapes and order are those of the model before wrapping. It gathers all
        units at once, so the whole model has to fit in memory. Also callable on the class, with
        any module that contains units: `FullyShardedDataParallel.summon_full_params(model)`.

        Args:
            recurse: Include the inner units.
            writeback: Keep edits. All ranks have to make the same ones.

        Yields:
            Nothing; the parameters are in their modules.

        Raises:
            SummonContextError: If entered again inside itself, or during a forward.
            SummonDisagreementError: If ranks wrote different values; nothing is kept then.

        Tip: Make the same edit on every rank
            Each rank keeps only its own part of what it wrote. An edit on one rank alone would
            leave a weight that is half old and half new; here it raises, and nothing is kept.

            Proof: tips/edit_inside_summon
        """
        parts = FullyShardedDataParallel.fsdp_modules(self)
        parts = [part for part in parts if recurse or part is self]
        groups = [part._set_up().groups for part in parts]
        units = [part._unit for part in parts]
        with full_parameters(units, groups[0] if groups else [], writeback=writeback):
            yield

    def state_dict(  # type: ignore[override]  # torch declares overloads, one deprecated
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the full weights under the plain model's names. Collective.

        Every rank calls it and every rank gets the whole dict; it gathers one unit at a time
        and leaves the model as it was. Values own their memory.

        Args:
            destination: Fill this dict instead of a new one.
            prefix: Put this before every key.
            keep_vars: Leave `requires_grad` as it is on the values.

        Returns:
            A dict that loads into the plain model, and back into this one at any number of
            ranks.

        Tip: Call state_dict on every rank, write on one
            The full weights exist nowhere until all ranks bring their shards together. Calling
            `state_dict` on one rank only waits for the others until the process group's time
            limit.

            Proof: tips/save_on_every_rank
        """
        self._set_up()
        into: dict[str, Any] = {} if destination is None else {"destination": destination}
        with self._unit.registered.names_shown():
            result: dict[str, Any] = super().state_dict(prefix=prefix, keep_vars=True, **into)
        strip_wrapped(result, prefix)
        fill_in_full_values(self._unit, result, prefix)
        restore_dtypes(result, prefix, self._buffer_dtypes)
        if not keep_vars:
            for key, value in result.items():
                if isinstance(value, Tensor) and key.startswith(prefix):
                    result[key] = value.detach()
        return result

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load full weights under the plain model's names, on every rank. Local.

        Each rank copies its own part of every value. It works at any number of ranks. Give all
        ranks the same values: nothing compares them.

        Args:
            state_dict: Full values, as from the plain model or from `state_dict`.
            strict: Raise if keys are missing or unexpected.
            assign: Take over buffers instead of copying them; parameters are copied always.

        Returns:
            The missing and the unexpected keys.

        Raises:
            RuntimeError: If `strict` and the keys differ, or if a shape differs.
        """
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        for keys in (result.missing_keys, result.unexpected_keys):
            keys[:] = [clean_name(key) for key in keys]
        if strict and (result.missing_keys or result.unexpected_keys):
            raise RuntimeError(
                f"{self._unit.where}: missing keys {result.missing_keys}, unexpected keys "
                f"{result.unexpected_keys}. With strict=False what fits is loaded."
            )
        return result

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # torch calls this before it descends into the wrapped module, which then finds only
        # its buffers and the keys of inner units.
        take_own_values(self._unit, state_dict, prefix, missing_keys, error_msgs)
        insert_wrapped(state_dict, prefix)

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
        # torch leaves `_apply` untyped
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for flat_param in self._unit.flat_params:
            flat_param.point_originals_at_full()
        self._unit.registered.follow_dtype_and_device()
        return self

    def extra_repr(self) -> str:
        """Show the unit's size and who shares it."""
        flat = self._unit.flat_params
        total = sum(p._layout.total_numel for p in flat)
        shard = sum(p.numel() for p in flat)
        return f"numel={total}, shard_numel={shard}, ranks={list(self._unit.group.ranks)}"

    def _root_only(self, method: str) -> None:
        if not self.check_is_root():
            raise RootOnlyError.at(
                self._unit.where,
                expected=f"{method}() on the outermost unit",
                found="an inner unit",
                fix="Call it on the model that you wrapped last.",
            )
