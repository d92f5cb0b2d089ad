"""`FullyShardedDataParallel`: what people construct and call.

# One training step

Wrapping turns a module into a *unit*. Between steps each rank keeps only its shard of the
unit's parameters. A forward gathers the full parameters, computes, and drops them; the
backward gathers them again, computes the gradients, drops them once more, and sums the gradients
over the ranks so that each rank keeps the mean gradient of its own shard. The optimizer then
updates shards. Other [strategies][fsdp_ref.strategies] keep the full parameters longer, or
never cut them.

Units nest. Parameters that no inner unit holds belong to the enclosing one; the outermost
unit, the *root*, belongs around the whole model, because it alone sees the order of the units
and the end of the backward. It keeps its full parameters from the forward to the backward,
which follows at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh

from fsdp_ref.at_exit import wait_for_threads_at_exit
from fsdp_ref.collectives import CommHook
from fsdp_ref.comm_hooks import refuse_comm_hook
from fsdp_ref.errors import (
    InnerUnitBeforeRootError,
    OptionError,
    SummonContextError,
)
from fsdp_ref.fingerprints import InitialWeights, take_fingerprints
from fsdp_ref.flat_param import flatten, is_sharded
from fsdp_ref.grad_norm import scale_gradients, total_norm
from fsdp_ref.initialize import broadcast_initial, materialize
from fsdp_ref.naming import current_unit_name
from fsdp_ref.optimizer_watch import refuse_unreduced, watch_optimizers
from fsdp_ref.options import Options, as_device, as_divisor, as_options
from fsdp_ref.originals import (
    collect_originals,
    move_buffers,
    refuse_module,
    refuse_parameters,
    resolve_ignored,
)
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
    *("mixed_precision", "param_init_fn", "device_id", "sync_module_states"),
    *("forward_prefetch", "limit_all_gathers", "use_orig_params", "device_mesh"),
    "gradient_divisor",
)
"""The arguments that an auto-wrap policy hands on to the units inside."""


class FullyShardedDataParallel(WeightAccess):
    """Shard a module's parameters, gradients and optimizer state over ranks.

    Collective: every rank constructs the same units, with the same arguments, in the same
    order. Construction itself sends nothing, unless `sync_module_states` is asked for; ranks are
    compared when the root is first used.

    Build the optimizer after wrapping, from `model.parameters()`. The wrapper answers
    attribute and index access like the module inside.

    Warning: Initialise before wrapping
        A deterministic initialisation of the parameters after wrapping, with one seed on all
        ranks, fills every shard with the same numbers: as many identical shards as there are
        ranks, and a weight of low rank. The first forward refuses them. Initialise before
        wrapping, or inside `summon_full_params`; see [fsdp_ref.initialize][]. A run shows the
        damage:
        [wrapping/initialise_after_sharding][initialise-after-sharding].

    Tip: Build the optimizer after wrapping
        Wrapping replaces the parameters that an optimizer can update by flat parameters. An
        optimizer from before wrapping would train nothing; its first step raises here.

        Proof: tips/optimizer_after_wrapping

    Args:
        module: The module to wrap; it is changed in place.
        process_group: The ranks that share this unit: `None` for all, a process group, a word
            such as `'self'`, a list of global ranks that contains this one, or a list of such
            lists with every rank once. A hybrid strategy takes a pair: the ranks that share one
            copy, the ranks that hold the others. See [fsdp_ref.process_groups][].
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
        ignored_modules: Modules that units leave alone, with everything inside: their parameters
            stay as they are, on every rank for itself. Units inside leave them alone too.
        param_init_fn: Gives values to a module that is on the meta device; by default its
            `reset_parameters` does. See [fsdp_ref.initialize][].
        device_id: Where parameters and buffers go; by default they stay on their device. On a
            machine without an accelerator a number means the CPU.
        sync_module_states: Whether the values of parameters and buffers come from the first rank.
            Collective then.
        forward_prefetch: Whether to gather the next unit ahead in the forward too.
        limit_all_gathers: Accepted for torch's sake: at most one unit is ever gathered ahead.
        use_orig_params: Whether modules keep their own parameters registered, each of them
            showing this rank's piece; see [fsdp_ref.options][].
        ignored_states: In place of `ignored_modules`, parameters or modules to leave alone.
        device_mesh: In place of `process_group`, a mesh of one or two dimensions.
        gradient_divisor: What the sum of the ranks' gradients is divided by. By default the
            number of ranks that share and copy the unit, which makes the mean. For an expert that
            gets tokens of all ranks, the number of all ranks; [fsdp_ref.options][] has the
            arithmetic, case by case. Not an argument of torch's class.
        bucket_cap_mb: How many megabytes of full parameters small units may gather and reduce
            together, by shared messages; `0` for never. By default one eighth of what lies
            outside the root; see [fsdp_ref.buckets][]. Only the outermost unit's counts. Not an
            argument of torch's class; FairScale's joins reductions alone.

    Raises:
        NotAModuleError: If `module` is no module.
        NoValuesError: If a parameter is lazy, or on the meta device and nothing gives it values.
        ContainerWithoutForwardError: If `module` has no `forward`, such as `ModuleList`.
        AlreadyWrappedError: If `module` is a unit, or the policy meets one inside.
        NonFloatingParameterError: If a parameter has an integer, boolean or complex dtype.
        ScalarParameterError: If a parameter has no dimension.
        TiedParametersError: If a parameter would belong to two units.
        PrecisionError: If `mixed_precision` is not understood.
        OptionError: If `cpu_offload`, `backward_prefetch`, `gradient_divisor`, `bucket_cap_mb` or
            `param_init_fn` is not understood.
        IgnoredStatesError: If something is to be ignored that cannot be.
        RankDisagreementError: If `sync_module_states` and the ranks' modules differ.
        SilentRanksError: If `sync_module_states` and a rank does not take part.
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
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Any = None,
        device_mesh: DeviceMesh | None = None,
        gradient_divisor: float | None = None,
        bucket_cap_mb: float | None = None,
    ) -> None:
        given = locals()
        name = current_unit_name() or type(module).__name__
        where = f"unit '{name}'"
        refuse_module(module, where)
        options = as_options(given, where)
        placement = place(sharding_strategy, process_group, where=where, device_mesh=device_mesh)
        ignored = resolve_ignored(module, ignored_modules, ignored_states, where)
        refuse_parameters(collect_originals(module, ignored), where, may_be_on_meta=True)
        if auto_wrap_policy is not None:
            inherited = {argument: given[argument] for argument in INHERITED}
            apply_policy(module, auto_wrap_policy, type(self), inherited, ignored)
        super().__init__()
        self._fsdp_wrapped_module, self._ignored = module, ignored
        device, from_meta = as_device(device_id), []
        if sync_module_states:
            broadcast_initial(module, placement, param_init_fn, device, name=name, ignored=ignored)
        else:
            from_meta = materialize(module, param_init_fn, device, where=where, ignored=ignored)
        self._shard(name, placement, options, device, from_meta)

    def _shard(
        self,
        name: str,
        placement: Placement,
        options: Options,
        device: torch.device | None,
        from_meta: list[str],
    ) -> None:
        """Replace the module's parameters by flat parameters; from here on nothing is refused."""
        move_buffers(self.module, device, self._ignored)
        originals = collect_originals(self.module, self._ignored)
        whole = take_fingerprints(originals) if placement.size > 1 else {}
        flat_params = flatten(originals, placement, device, options)
        registered = RegisteredNames(self, flat_params, use_orig_params=options.use_orig_params)
        self._unit = Unit(name, flat_params, placement, registered, options)
        self._initial = InitialWeights(self._unit, whole, from_meta)
        self._number = count_models(placement)
        self._forward_methods: set[str] = set()
        self._start_alone()
        watch_optimizers()
        wait_for_threads_at_exit()

    # A step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with its parameters gathered. Collective.

        Under `torch.compile` it runs as it is, outside of graphs: compile the modules inside units
        instead.

        Args:
            *args: Passed on to the module.
            **kwargs: Passed on to the module.

        Returns:
            What the module returns.

        Raises:
            InnerUnitBeforeRootError: If an inner unit is called before the root ever was.
            SummonContextError: If called inside `summon_full_params`.
            InitialWeightsDifferError: At the first forward, if ranks cut their shards from
                different weights.
            IdenticalShardsError: At the first forward, if ranks wrote the same numbers to their
                shards.
        """
        return self._run(self._fsdp_wrapped_module, args, kwargs)

    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the wrapped module, or one of its methods, as a forward of this unit."""
        if torch.compiler.is_compiling():
            return _outside_of_graphs(self, function, args, kwargs)
        unit, is_root, before = self._unit, self.check_is_root(), (args, kwargs)
        self._refuse_forward(is_root)
        self._set_up()
        if is_root and self._initial is not None:
            self._compare_initial_weights()
        precision = self._precision_of_mode()
        try:
            args, kwargs = precision.cast_inputs(args, kwargs, is_root=is_root)
            call, args, kwargs = unit.pre_forward(args, kwargs)
            output = precision.cast_outputs(function(*args, **kwargs), like=before)
        except BaseException:
            unit.abandon_forward()
            raise
        return unit.post_forward(call, output)

    def _refuse_forward(self, is_root: bool) -> None:
        if not is_root and self._root()._schedule is None:
            raise InnerUnitBeforeRootError.at(
                self._unit.where,
                expected="the outermost unit to be called first",
                found="a call of an inner unit",
                fix="Call the model itself once before you call a part of it.",
            )
        if self._unit.summoned:
            raise SummonContextError.at(
                self._unit.where,
                expected="a forward outside of summon_full_params",
                found="a forward inside it",
                fix="Close the context first; a forward gathers what it needs by itself.",
            )

    def __getattr__(self, name: str) -> Any:
        """Find what the wrapper lacks in the wrapped module; gather for registered methods."""
        if name in self.__dict__.get("_forward_methods", ()):
            method = getattr(self.module, name)
            return lambda *args, **kwargs: self._run(method, args, kwargs)
        return super().__getattr__(name)

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

        Each element counts once, in whatever unit and group it lies. Ignored parameters are
        clipped too; where their gradients differ between ranks, the norm takes the mean.

        Args:
            max_norm: The largest norm that is left as it is.
            norm_type: The p of the p-norm, above 0; `float("inf")` for the largest element.

        Returns:
            The norm before clipping, a scalar tensor, the same on every rank.

        Raises:
            RootOnlyError: If called on an inner unit.
            UnsynchronizedStepError: If gradients from inside `no_sync` are not reduced yet.
            ClippingError: If `norm_type` is not above 0, or `max_norm` is no limit.

        Tip: Clip with the model's own method
            `torch.nn.utils.clip_grad_norm_` sees one rank's shards. It computes another norm on
            each rank and scales the pieces of one gradient differently.

            Proof: tips/clip_by_the_true_norm
        """
        self._root_only("clip_grad_norm_")
        schedule = self._set_up()
        flat_params = [p for unit in schedule.units for p in unit.flat_params]
        refuse_unreduced(flat_params, "clip_grad_norm_()")
        for flat_param in flat_params:
            flat_param.take_back_gradients(hide=False)
        others = [p for p in self.parameters() if not is_sharded(p)]
        norm = total_norm(flat_params, float(norm_type), schedule.groups, others)
        scale_gradients(flat_params, norm, max_norm, others)
        return norm

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Let a function reduce the gradients, here and in all inner units. Not collective.

        The hook takes the place of the reduce-scatter, with its scaling: it gets the whole
        gradient as it is, and has to divide it. Torch's hooks work here. Every rank registers
        the same hook, before the first forward.

        Args:
            state: Handed to the hook first; torch's hooks want their own state with a group.
            hook: `hook(state, gradient, shard)` fills the shard, `(shard_numel,)`, from the
                gradient, `(padded_numel,)`. Where nothing is cut, as in `NO_SHARD`,
                `hook(state, gradient)` reduces in place.

        Raises:
            RootOnlyError: If called on an inner unit.
            OptionError: If the hook cannot be called, if there is one already, or if a unit is
                hybrid: its gradient is reduced twice.
        """
        self._root_only("register_comm_hook")
        parts = self.fsdp_modules(self)
        for part in parts:
            refuse_comm_hook(part._unit, hook)
        for part in parts:
            part._unit.reduce_with(CommHook(state, hook))

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool = True) -> None:
        """Say anew by what gradients are divided. Not collective.

        Every rank sets the same. The sum over the ranks of a unit is divided by `pre` times
        `post`, so the constructor's `gradient_divisor=d` is `set_gradient_divide_factors(d, 1)`,
        and by default `d` is the number of ranks. [fsdp_ref.options][] says which number suits
        which unit. FairScale's name. It holds for all backwards from now on, also for a unit
        that was given another divisor.

        Two factors, because a reduction in a low dtype can overflow if all of the division comes
        after it, and lose small numbers if all of it comes before.

        Args:
            pre: Divides this rank's gradient before the reduction.
            post: Divides the reduced gradient.
            recursive: Also in all inner units.

        Raises:
            OptionError: If a factor is not a finite number above 0.
        """
        factors = [as_divisor(factor, self._unit.where) for factor in (pre, post)]
        for part in self.fsdp_modules(self) if recursive else [self]:
            for flat_param in part._unit.flat_params:
                flat_param._divisors = (factors[0], factors[1])

    # By hand

    def unshard(self, recurse: bool = True, async_op: bool = False) -> Unsharding | None:
        """Gather full parameters ahead, here and in all inner units. Collective.

        They stay until a forward of their unit has used them, until `reshard`, or until the
        shards change. Torch's `fully_shard` has the same method for one unit at a time.

        Args:
            recurse: Include the inner units.
            async_op: Do not wait for the messages; call `wait` on what is returned.

        Returns:
            The gather in flight if `async_op`, else `None`.

        Raises:
            SummonContextError: If called inside `summon_full_params`.
        """
        self._set_up()
        self._refuse_forward(is_root=True)
        units = [part._unit for part in (self.fsdp_modules(self) if recurse else [self])]
        for unit in units:
            unit.start_unshard_ahead()
        unsharding = Unsharding(units)
        if async_op:
            return unsharding
        unsharding.wait()
        return None

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


class Unsharding:
    """Full parameters on their way.

    Args:
        units: The units that gather.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units

    def wait(self) -> None:
        """Wait until the parameters are there.

        Collective, if they were dropped since `unshard`: then they are gathered again.
        """
        for unit in self._units:
            unit.unshard()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method of a wrapped module gather parameters as its forward does. Local.

    Without it, `model.encode(x)` calls the module inside, whose weights are not in memory.
    Torch's `fully_shard` has the same function. Every rank registers the same methods.

    Args:
        module: A unit; any other module is left as it is.
        method_name: The method, as the wrapped module calls it. Its outputs are watched as
            those of a forward are.

    Raises:
        OptionError: If the wrapped module has no such method.

    Examples:
        >>> register_fsdp_forward_method(nn.Linear(2, 2), "encode")
    """
    if not isinstance(module, FullyShardedDataParallel):
        return
    if not callable(getattr(module.module, method_name, None)):
        raise OptionError.at(
            module._unit.where,
            expected=f"a method of {type(module.module).__name__}",
            found=repr(method_name),
            fix="Give the name of a method, as a string.",
        )
    module._forward_methods.add(method_name)


@_disable_dynamo
def _outside_of_graphs(
    model: FullyShardedDataParallel, function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Run a forward that `torch.compile` met: collectives and freed memory are not for graphs."""
    return model._run(function, args, kwargs)
