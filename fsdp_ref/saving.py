"""State dicts of a wrapped module, out and in: whole, cut by rows, or this rank's memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from fsdp_ref.errors import LoadError
from fsdp_ref.loading import Loading, Walk
from fsdp_ref.local_shards import Units, load_local_state, local_metadata, local_state
from fsdp_ref.naming import WRAPPED
from fsdp_ref.state_dict import Exporting, restore_dtypes
from fsdp_ref.state_dict_types import Export, Form, as_export, export_of
from fsdp_ref.unit_module import UnitModule

if TYPE_CHECKING:  # it takes long to import, and only those who ask need it
    from torch.distributed.fsdp import StateDictSettings


class StateDicts(UnitModule):
    """A wrapper that saves and loads under the plain model's names."""

    state_dict_device: torch.device | str | None = None
    """Where the values of state dicts go, by FairScale's name; `None` for where parameters are.

    Set it on the module whose `state_dict` is called. A config with `offload_to_cpu` counts more.
    """
    _export: Export = Export()
    _exporting: Exporting | None = None  # of the outermost unit, while it lasts
    _loading: Loading | None = None  # the same

    # The form

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
        *,
        replicas: str = "refuse",
    ) -> StateDictSettings:
        """Choose the form of the state dicts of a model. Not collective.

        Every rank chooses the same. See [fsdp_ref.state_dict_types][] for the forms.

        Args:
            module: The model, or any module with units inside.
            state_dict_type: Torch's `StateDictType`, or `"full"`, `"sharded"` or `"local"`.
            state_dict_config: Torch's config for that form, or a dict of its settings:
                `offload_to_cpu`, and for full ones `rank0_only`, with which other ranks get an
                empty dict and need no memory.
            optim_state_dict_config: The same for the state of an optimizer.
            replicas: What to do about weights that exist in several versions, in the full form:
                `"refuse"` unequal ones, return `"all"`, or `"mine"`.

        Returns:
            What was set before, as torch's `StateDictSettings`.

        Raises:
            StateDictTypeError: If the form is unknown, or a config belongs to another form; if
                units inside had different forms.
        """
        before = export_of(module)
        export = as_export(
            state_dict_type, state_dict_config, optim_state_dict_config, replicas,
            where="set_state_dict_type",
        )  # fmt: skip
        for part in _parts(module):
            part._export = export
        return before.as_torchs()

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> StateDictSettings:
        """Return the form of the state dicts of a model. Not collective.

        Args:
            module: The model, or any module with units inside.

        Returns:
            Torch's `StateDictSettings`; the default if there are no units.

        Raises:
            StateDictTypeError: If units inside have different forms.
        """
        return export_of(module).as_torchs()

    @staticmethod
    @contextmanager
    def state_dict_type(
        module: nn.Module,
        state_dict_type: Any,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
        *,
        replicas: str = "refuse",
    ) -> Iterator[None]:
        """Choose the form of the state dicts of a model while the context is open. Not collective.

        Every rank chooses the same.

        Args:
            module: As for `set_state_dict_type`.
            state_dict_type: As for `set_state_dict_type`.
            state_dict_config: As for `set_state_dict_type`.
            optim_state_dict_config: As for `set_state_dict_type`.
            replicas: As for `set_state_dict_type`.

        Yields:
            Nothing; afterwards each unit has the form from before, also after an exception.

        Raises:
            StateDictTypeError: If the form is unknown, or a config belongs to another form.
        """
        export = as_export(
            state_dict_type, state_dict_config, optim_state_dict_config, replicas,
            where="state_dict_type",
        )  # fmt: skip
        before = {part: part._export for part in _parts(module)}
        try:
            for part in before:
                part._export = export
            yield
        finally:
            for part, export in before.items():
                part._export = export

    # Out

    def state_dict(  # type: ignore[override]  # torch declares overloads, one deprecated
        self,
        *args: Any,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the weights under the plain model's names, by default whole ones. Collective.

        Every rank calls it and, unless `rank0_only` is set, gets the whole dict; it gathers
        one unit at a time and leaves the model as it was. Values own their memory; tied ones share
        it. Hooks of the modules inside run as on the plain model. Inside `summon_full_params` it
        sends nothing, and shows this rank's weights. `set_state_dict_type` chooses another form.

        Args:
            *args: Destination, prefix and `keep_vars` by position, as torch allows.
            destination: Fill this dict instead of a new one.
            prefix: Put this before every key.
            keep_vars: Return values as `nn.Parameter`, with `requires_grad` as in the model, and
                buffers that are the model's own.

        Returns:
            A dict that loads into this model at any number of ranks, and a full one into the
            plain model.

        Raises:
            SummonContextError: If another rank is the only one to see the parameters.
            ReplicasDifferError: In the full form, if groups hold different versions of a weight.
            RuntimeError: If a hook from `register_state_dict_post_hook` returns something.
            SilentRanksError: If a rank does not take part within the time limit.

        Tip: Call state_dict on every rank, write on one
            The full weights exist nowhere until all ranks bring their shards together. Calling
            `state_dict` on one rank only waits for the others until the process group's time
            limit.

            Proof: tips/save_on_every_rank
        """
        by_position = (*args, *(destination, prefix, keep_vars)[len(args) :])
        destination, prefix, keep_vars = by_position
        if destination is None:
            destination = OrderedDict()
            destination._metadata = OrderedDict()  # type: ignore[attr-defined]  # torch's note
        if self._exporting is not None:  # the outermost unit has come down to here
            return self._collect(self._exporting, destination, prefix, keep_vars)
        if self._export.form is Form.LOCAL_STATE_DICT:
            destination.update({prefix + k: v for k, v in self.local_state_dict().items()})
            return destination
        with self._joint_export() as exporting:
            into = destination if exporting.is_reader else OrderedDict()
            result = self._collect(exporting, into, prefix, keep_vars)
            exporting.finish(result, keep_vars=keep_vars)
        return result if exporting.is_reader else destination

    @contextmanager
    def _joint_export(self) -> Iterator[Exporting]:
        """Let all units inside fill one dict."""
        self._set_up()
        parts = _parts(self)
        units = [part._unit for part in parts]
        exporting = Exporting(self, units, self._export, self._value_device())
        for part in parts:
            part._exporting = exporting
        try:
            yield exporting
        finally:
            for part in parts:
                part._exporting = None

    def _value_device(self) -> torch.device | None:
        """Return where values go; `None` for where they are."""
        if self._export.offload_to_cpu:
            return torch.device("cpu")
        return None if self.state_dict_device is None else torch.device(self.state_dict_device)

    def _collect(
        self, exporting: Exporting, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> dict[str, Any]:
        before = set(destination)
        for hook in self._state_dict_pre_hooks.values():
            hook(self, prefix, keep_vars)
        with exporting.values_registered(self._unit, self.module, prefix):
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
        exporting.belong(self._unit, result.keys() - before)
        return result

    def local_state_dict(self) -> dict[str, Any]:
        """Return this rank's flat shards and buffers. Local.

        It sends nothing, and loads with `load_local_state_dict` on this rank of as many ranks. For
        anything else use `state_dict`. Hooks do not run. See [fsdp_ref.local_shards][].

        Returns:
            Plain tensors that own their memory, `(shard_numel,)` for each flat parameter, under
            names that end in the rank and the number of ranks.

        Raises:
            SummonContextError: If called inside `summon_full_params`.
        """
        return local_state(self, self._units_by_name(), self._value_device())

    def local_metadata_dict(self) -> dict[str, Any]:
        """Say what each name of `local_state_dict` holds, in a form that JSON can take.

        Collective at first use under a hybrid strategy, otherwise local once the model was used.

        Returns:
            `rank` and `world_size`; `units`, each with its `name`, the `ranks` that share it, this
            rank's `position` among them, all `copies` as lists of ranks, and its
            `flat_parameters`; and where `buffers`, `parameters` outside of units and `extra_state`
            are. A flat parameter has its `key` in the local dict, `dtype`, `numel` in all,
            `padding` behind them, `shard_numel`, `trainable`, and `slots`: name, aliases of a tied
            weight, shape and offset in elements of each weight in it.

        Raises:
            SilentRanksError: If a rank does not take part within the time limit.
        """
        self._set_up()
        return local_metadata(self, self._units_by_name())

    def _units_by_name(self) -> Units:
        return [(name, part._unit) for name, part in self._named_units()]

    # In

    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load what `local_state_dict` returned on this rank, all of it or nothing. Local.

        Args:
            state_dict: It.
            strict: Raise if names are missing or unexpected.

        Returns:
            The missing and the unexpected names.

        Raises:
            LoadError: If it is from another rank, from another number of ranks, or does not fit.
            SummonContextError: If called inside `summon_full_params`.
        """
        units = self._units_by_name()
        missing, unexpected = load_local_state(self, units, state_dict, strict=strict)
        for part in _parts(self):
            names = [slot.name for p in part._unit.flat_params for slot in p._layout.slots]
            part._initial_replaced(names)
        return _IncompatibleKeys(missing, unexpected)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights under the plain model's names, on every rank.

        Local for plain values, collective for `DTensor`s. Each rank copies its own part of every
        value, so it works at any number of ranks. Give all ranks the same values: nothing compares
        them. `DTensor`s may be on any mesh, in any form that is set; one is whole at a time. Of
        weights under `name@rank2` and the like, a rank takes those of its own group.

        If anything does not fit, nothing is loaded; torch loads what fits before it raises. Hooks
        for afterwards run when values are written. If one raises, everything is put back, for which
        shards and buffers are copied first.

        Inside `summon_full_params(rank0_only=True)` the rank that sees the parameters can
        load alone, and all ranks get what it loaded.

        Args:
            state_dict: Values as from the plain model, from `state_dict` in any form that is not
                local, or from `torch.distributed.checkpoint`. Local ones if that form is set.
            strict: Raise if keys are missing or unexpected. Otherwise what is there is loaded and
                the rest left as it is.
            assign: Take over buffers instead of copying them; parameters are copied always.

        Returns:
            The missing and the unexpected keys.

        Raises:
            LoadError: If `strict` and the keys differ, or if a shape differs; if the dict has the
                local form, and that is not set.
            SummonContextError: If another rank is the only one to see the parameters.
            SilentRanksError: If values are `DTensor`s, and a rank does not take part.
        """
        if self._export.form is Form.LOCAL_STATE_DICT:
            return self.load_local_state_dict(state_dict, strict)
        found: Any = OrderedDict(state_dict)
        found._metadata = getattr(state_dict, "_metadata", {})
        with self._joint_load() as loading:
            loading.refuse_local(self._unit.where, found)
            Walk(found._metadata, assign, loading).into(self, found, "")
            loading.finish(self._unit.where, strict=strict)
        return _IncompatibleKeys(loading.missing, loading.unexpected)

    @contextmanager
    def _joint_load(self, *found: list[str]) -> Iterator[Loading]:
        """Let all units inside note what they get; put everything back after an exception."""
        parts = _parts(self)
        loading = Loading(self, self._units_by_name(), *found)
        for part in parts:
            part._loading = loading
        try:
            yield loading
        except BaseException:
            loading.undo()
            raise
        finally:
            for part in parts:
                part._loading = None
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
        if self._loading is not None:
            self._load_jointly(self._loading, state_dict, prefix, local_metadata)
            return
        # Torch loads a model around this unit, and raises at the end for what does not fit.
        if self._export.form is Form.LOCAL_STATE_DICT:
            mine = {
                k.removeprefix(prefix): v for k, v in state_dict.items() if k.startswith(prefix)
            }
            try:
                self.load_local_state_dict(mine)
            except LoadError as error:
                error_msgs.append(str(error))
            self._hide_from_torchs_walk()
            return
        with suppress(LoadError), self._joint_load(*found) as loading:
            self._load_jointly(loading, state_dict, prefix, local_metadata)
            loading.finish(self._unit.where, strict=False)
        self._hide_from_torchs_walk()

    def _load_jointly(
        self, loading: Loading, state_dict: dict[str, Any], prefix: str, local_metadata: Any
    ) -> None:
        if self._unit is loading.outermost:
            loading.translate(state_dict, prefix)
        versions = getattr(state_dict, "_metadata", None) or {}
        assign = local_metadata.get("assign_to_params_buffers", False)
        with loading.targets_registered(self._unit):
            Walk(versions, assign, loading).into(self.module, state_dict, prefix)

    def _hide_from_torchs_walk(self) -> None:
        """Keep torch from loading the wrapped module again, under keys that show the wrapper."""
        if _show_again not in self._load_state_dict_post_hooks.values():
            # torch leaves the registration untyped, and annotates the hooks as a plain dict
            hook = self.register_load_state_dict_post_hook(_show_again)  # type: ignore[no-untyped-call]
            hooks: OrderedDict[int, Any] = self._load_state_dict_post_hooks  # type: ignore[assignment]
            hooks.move_to_end(hook.id, last=False)
        # Nothing but torch's loop over children runs before the hook.
        self.__dict__["_hidden"], self._modules[WRAPPED] = self.module, None


def _show_again(part: StateDicts, _: Any) -> None:
    """What torch calls when it believes to have been through the wrapped module."""
    if "_hidden" in part.__dict__:
        part._modules[WRAPPED] = part.__dict__.pop("_hidden")


def _parts(module: nn.Module) -> list[StateDicts]:
    return [part for part in module.modules() if isinstance(part, StateDicts)]
