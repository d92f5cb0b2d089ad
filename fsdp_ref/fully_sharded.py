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

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ref.at_exit import wait_for_threads_at_exit
from fsdp_ref.errors import (
    InnerUnitBeforeRootError,
    SummonContextError,
)
from fsdp_ref.flat_param import flatten
from fsdp_ref.grad_norm import scale_gradients, total_norm
from fsdp_ref.naming import current_unit_name
from fsdp_ref.optimizer_watch import refuse_unreduced, watch_optimizers
from fsdp_ref.options import Options, as_device, as_offload, as_prefetch
from fsdp_ref.originals import (
    collect_originals,
    move_buffers,
    refuse_module,
    refuse_parameters,
)
from fsdp_ref.precision import as_precision
from fsdp_ref.rank_group import Placement
from fsdp_ref.registered import RegisteredNames
from fsdp_ref.states import Phase
from fsdp_ref.strategies import place
from fsdp_ref.structure import count_models
from fsdp_ref.unit import Unit
from fsdp_ref.weights import WeightAccess
from fsdp_ref.wrapping import apply_policy

INHERITED = (
    *("process_group", "sharding_strategy", "cpu_offload", "backward_prefetch"),
    *("mixed_precision", "device_id", "forward_prefetch", "use_orig_params", "device_mesh"),
)
"""The arguments that an auto-wrap policy hands on to the units inside."""


class FullyShardedDataParallel(WeightAccess):
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
        cpu_offload: What lives on the CPU between uses: torch's `CPUOffload`, a bool, or a dict;
            see [fsdp_ref.options][].
        auto_wrap_policy: Which modules inside become units of their own; see
            [fsdp_ref.wrapping][]. A policy may return a dict of arguments for a unit.
        backward_prefetch: When the unit that the backward needs next is gathered: torch's
            `BackwardPrefetch`, a word, or `None` for not ahead.
        mixed_precision: In which dtypes to compute and to reduce: torch's `MixedPrecision` or a
            dict; see [fsdp_ref.precision][]. By default everything stays in its own dtype.
        device_id: Where parameters and buffers go; by default they stay on their device. On a
            machine without an accelerator a number means the CPU.
        forward_prefetch: Whether to gather the next unit ahead in the forward too.
        limit_all_gathers: Accepted for torch's sake: at most one unit is ever gathered ahead.
        use_orig_params: Whether modules keep their own parameters registered, each of them
            showing this rank's piece; see [fsdp_ref.options][].
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
        OptionError: If `cpu_offload` or `backward_prefetch` is not understood.
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

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: Any = None,
        cpu_offload: Any = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = "BACKWARD_PRE",
        mixed_precision: Any = None,
        *,
        device_id: int | torch.device | None = None,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name in INHERITED}
        name = current_unit_name() or type(module).__name__
        where = f"unit '{name}'"
        refuse_module(module, where)
        options = Options(
            precision=as_precision(mixed_precision, where),
            offload=as_offload(cpu_offload, where),
            use_orig_params=use_orig_params,
            backward_prefetch=as_prefetch(backward_prefetch, where),
            forward_prefetch=forward_prefetch,
        )
        placement = place(sharding_strategy, process_group, where=where, device_mesh=device_mesh)
        refuse_parameters(collect_originals(module), where)
        if auto_wrap_policy is not None:
            apply_policy(module, auto_wrap_policy, type(self), arguments)
        super().__init__()
        self._fsdp_wrapped_module = module
        self._shard(name, placement, options, as_device(device_id))

    def _shard(
        self, name: str, placement: Placement, options: Options, device: torch.device | None
    ) -> None:
        """Replace the module's parameters by flat parameters; from here on nothing is refused."""
        move_buffers(self.module, device)
        flat_params = flatten(collect_originals(self.module), placement, device, options)
        registered = RegisteredNames(self, flat_params, use_orig_params=options.use_orig_params)
        self._unit = Unit(name, flat_params, placement, registered, options)
        self._number = count_models(placement)
        self._start_alone()
        watch_optimizers()
        wait_for_threads_at_exit()

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
            args, kwargs = unit.options.precision.cast_inputs(args, kwargs, is_root=is_root)
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
