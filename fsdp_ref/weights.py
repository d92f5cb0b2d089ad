"""Weights in and out of a wrapped module: whole ones for a while, state dicts, `apply`, `to`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, Generic, ParamSpec, Self, TypeVar

from torch import Tensor, nn
from torch.nn.modules.module import _IncompatibleKeys

from fsdp_ref.errors import LoadError, SummonContextError
from fsdp_ref.full_params import full_parameters
from fsdp_ref.loading import Loading, Walk
from fsdp_ref.naming import WRAPPED
from fsdp_ref.optim_state import OptimizerStateAccess
from fsdp_ref.state_dict import full_copies_registered, restore_dtypes
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


class WeightAccess(OptimizerStateAccess):
    """A wrapper whose weights can be seen, edited, saved and loaded as a whole."""

    _loading: Loading | None = None  # of the outermost unit, while it lasts

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

    def state_dict(  # type: ignore[override]  # torch declares overloads, one deprecated
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the full weights under the plain model's names. Collective.

        Every rank calls it and every rank gets the whole dict; it gathers one unit at a time
        and leaves the model as it was. Values own their memory; tied ones share it. Hooks of the
        modules inside run as on the plain model. Inside `summon_full_params` it sends nothing.

        Args:
            destination: Fill this dict instead of a new one.
            prefix: Put this before every key.
            keep_vars: Return values as `nn.Parameter`, with `requires_grad` as in the model.

        Returns:
            A dict that loads into the plain model, and back into this one at any number of
            ranks.

        Raises:
            SummonContextError: If another rank is the only one to see the parameters.
            RuntimeError: If a hook from `register_state_dict_post_hook` returns something.
            SilentRanksError: If a rank does not take part within the time limit.

        Tip: Call state_dict on every rank, write on one
            The full weights exist nowhere until all ranks bring their shards together. Calling
            `state_dict` on one rank only waits for the others until the process group's time
            limit.

            Proof: tips/save_on_every_rank
        """
        self._set_up()
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()  # type: ignore[attr-defined]  # torch's note
        for hook in self._state_dict_pre_hooks.values():
            hook(self, prefix, keep_vars)
        with full_copies_registered(self._unit):
            # Not through torch's walk over children, which would insert the wrapper into keys.
            result: dict[str, Any] = self.module.state_dict(
                destination=destination, prefix=prefix, keep_vars=keep_vars
            )
        restore_dtypes(result, prefix, self._buffer_dtypes)
        versions = getattr(result, "_metadata", {}).get(prefix.removesuffix("."), {})
        for hook in self._state_dict_hooks.values():
            changed = hook(self, result, prefix, versions)
            if changed is not None and getattr(hook, "_from_public_api", False):
                raise RuntimeError(
                    f"{self._unit.where}: a hook from register_state_dict_post_hook() returned "
                    f"{type(changed).__name__}; it has to change the dict in place."
                )
            result = result if changed is None else changed
        return result

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load full weights under the plain model's names, on every rank. Local.

        Each rank copies its own part of every value, so it works at any number of ranks. Give
        all ranks the same values: nothing compares them. If anything does not fit, nothing is
        loaded; torch loads what fits before it raises. For that, buffers are copied first, and
        values are written only after all hooks have run.

        Inside `summon_full_params(rank0_only=True)` the rank that sees the parameters can
        load alone, and all ranks get what it loaded.

        Args:
            state_dict: Full values, as from the plain model or from `state_dict`.
            strict: Raise if keys are missing or unexpected. Otherwise what is there is loaded and
                the rest left as it is.
            assign: Take over buffers instead of copying them; parameters are copied always.

        Returns:
            The missing and the unexpected keys.

        Raises:
            LoadError: If `strict` and the keys differ, or if a shape differs.
            SummonContextError: If another rank is the only one to see the parameters.
        """
        loading = Loading(self, [part._unit for part in self.fsdp_modules(self)])
        with self._joint_load(loading):
            try:
                super().load_state_dict(state_dict, strict=False, assign=assign)
            except RuntimeError:
                if not loading.errors:
                    raise
            loading.refuse_misfits(self._unit.where, strict=strict)
        return _IncompatibleKeys(loading.missing, loading.unexpected)

    @contextmanager
    def _joint_load(self, loading: Loading) -> Iterator[None]:
        """Let all units inside note what they get; write it unless there is an exception."""
        parts = [part for part in self.fsdp_modules(self) if isinstance(part, WeightAccess)]
        for part in parts:
            part._loading = loading
        try:
            yield
        except BaseException:
            loading.undo()
            raise
        finally:
            for part in parts:
                part._loading = None
        loading.write()
        for part in parts:
            if not part._unit.summoned:
                part._initial_replaced(loading.names_for(part._unit))

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
        # What torch calls for every module.
        found = missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(  # runs the hooks that were registered on the wrapper
            state_dict, prefix, local_metadata, False, *found
        )
        versions = getattr(state_dict, "_metadata", None) or {}
        walk = Walk(versions, local_metadata.get("assign_to_params_buffers", False), found)
        if self._loading is not None:
            self._loading.missing, self._loading.unexpected, self._loading.errors = found
            with self._loading.targets_registered(self._unit):
                walk.into(self.module, state_dict, prefix)
        else:
            self._load_alone(walk, state_dict, prefix)
        self._hide_from_torchs_walk()

    def _load_alone(self, walk: Walk, state_dict: dict[str, Any], prefix: str) -> None:
        """Load this unit and those inside for torch, which loads a model around it.

        What does not fit is left to torch, which raises at the end.
        """
        loading = Loading(self, [part._unit for part in self.fsdp_modules(self)])
        before = len(walk.found[2])
        with suppress(LoadError), self._joint_load(loading):
            with loading.targets_registered(self._unit):
                walk.into(self.module, state_dict, prefix)
            loading.errors = walk.found[2][before:]
            loading.refuse_misfits(self._unit.where, strict=False)

    def _hide_from_torchs_walk(self) -> None:
        """Keep torch from loading the wrapped module again, under keys that show the wrapper."""
        if _show_again not in self._load_state_dict_post_hooks.values():
            # torch leaves the registration untyped, and annotates the hooks as a plain dict
            hook = self.register_load_state_dict_post_hook(_show_again)  # type: ignore[no-untyped-call]
            hooks: OrderedDict[int, Any] = self._load_state_dict_post_hooks  # type: ignore[assignment]
            hooks.move_to_end(hook.id, last=False)
        # Nothing but torch's loop over children runs before the hook.
        self.__dict__["_hidden"], self._modules[WRAPPED] = self.module, None

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


def _show_again(part: WeightAccess, _: Any) -> None:
    """What torch calls when it believes to have been through the wrapped module."""
    part._modules[WRAPPED] = part.__dict__.pop("_hidden")
