"""The state of an optimizer, in and out, under the plain model's names.

An optimizer of a sharded model keeps the state of shards. Its own `state_dict()` says what this
rank has, by number: it fits no other number of ranks and no plain model, and saved by one rank it
is a fraction.
[optim_state_dict][fsdp_ref.FullyShardedDataParallel.optim_state_dict] turns it into state of whole
weights, by name.
[optim_state_dict_to_load][fsdp_ref.FullyShardedDataParallel.optim_state_dict_to_load] cuts such a
dict to what this rank's optimizer holds, at any number of ranks and for any wrapping.

| form, as `state_dict_type` says | values | for |
| --- | --- | --- |
| full, the default | whole tensors, on all ranks or with `rank0_only` on the first | one file |
| sharded | this rank's rows, as `DTensor` | `torch.distributed.checkpoint` |
| local | the optimizer's own dict, copied | the same ranks again |

Every form is a copy: training on does not change it, and it can be loaded twice. In torch's FSDP1
the weights of a flat parameter share one count of steps, and an optimizer that takes it over counts
for each of them; in its FSDP2 the dict goes on counting with the optimizer.

A flat parameter has one `step` and one set of hyperparameters for all weights in it. What is saved
says the same for each of them, and what is loaded has to; with `use_orig_params=True` each weight
has its own. A weight that never had a gradient has no state. Beside others in a flat parameter it
has: zeros.

Groups of hyperparameters list names, and names decide which of the optimizer's groups gets which.
Torch pairs groups by position.

# Other ways to the same

Torch's older methods, such as
[full_optim_state_dict][fsdp_ref.FullyShardedDataParallel.full_optim_state_dict] and
[scatter_full_optim_state_dict][fsdp_ref.FullyShardedDataParallel.scatter_full_optim_state_dict],
have the form in their name.
[rekey_optim_state_dict][fsdp_ref.FullyShardedDataParallel.rekey_optim_state_dict] translates
between names and the numbers of a plain optimizer. FairScale's
[gather_full_optim_state_dict][fsdp_ref.FullyShardedDataParallel.gather_full_optim_state_dict] gives
numbers at once. `fsdp_ref.checkpoint` has torch's functions for model and optimizer together, and
[attach][fsdp_ref.optim_state.attach] lets torch's own see whole weights.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fsdp_ref.errors import OptimizerStateError
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.full_params import is_first
from fsdp_ref.naming import WRAPPED
from fsdp_ref.optim_gather import Part, agreed_parts, gathered
from fsdp_ref.optim_keys import (
    Entry,
    Groups,
    Names,
    entries_of,
    groups_of,
    own_keys,
    registered_keys,
)
from fsdp_ref.optim_load import saved_here, saved_on_first, to_optimizer
from fsdp_ref.optim_versions import bring_together
from fsdp_ref.optimizer_watch import (
    is_understood,
    local_state_understood,
    own_pieces,
    speaking_for_all,
)
from fsdp_ref.row_shards import cut, whole
from fsdp_ref.state_dict_types import export_of
from fsdp_ref.unit import Unit
from fsdp_ref.unit_module import UnitModule


@dataclass(frozen=True)
class Form:
    """In which form state is wanted.

    Attributes:
        kind: `"full"`, `"sharded"` or `"local"`.
        rank0_only: In the full form, on the first rank only.
        offload_to_cpu: Whether tensors go to the CPU.
    """

    kind: str = "full"
    rank0_only: bool = False
    offload_to_cpu: bool = True


class OptimizerStateAccess(UnitModule):
    """A wrapper that knows what an optimizer's state means."""

    @staticmethod
    def optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any] | None = None,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return an optimizer's state under the plain model's names. Collective.

        Every rank calls it. The form is that of `state_dict_type`, by default full, on the CPU, on
        every rank. Ranks first tell each other what state they have; then one value of one
        unit is gathered at a time. The optimizer and the model stay as they are.

        Args:
            model: The model, or any module with all the optimizer's parameters in it.
            optim: Its optimizer.
            optim_state_dict: What `optim.state_dict()` returned, if that was called already.
            group: Not needed: every unit knows its ranks. Taken because torch's method has it.

        Returns:
            A dict with `"state"` and `"param_groups"`, in memory of its own. State has the shapes
            of the weights; weights that never had a gradient have none. Groups list names. A
            weight of a unit that only some of the model's ranks share has the first of them in its
            name, such as `"experts.0.weight@rank2"`; the full form has all versions. With
            `rank0_only` other ranks get an empty dict.

        Raises:
            OptimizerStateError: On every rank of a unit, if its ranks have different state, or if
                state describes weights as a whole. If a parameter is not in the model.
            OptimizerBeforeWrappingError: If the optimizer was built before the model was wrapped.
            SilentRanksError: If a rank does not take part within the time limit.

        Tip: Save the optimizer through the model
            `optimizer.state_dict()` has the state of this rank's shards. Saved on one rank it lacks
            what the others hold; this method brings the pieces together, and each weight has a step
            count of its own.

            Proof: tips/save_the_optimizer
        """
        return export_state(model, optim, optim_state_dict, form_of(model))

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: Optimizer,
        optim_state_dict: dict[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return what `optim.load_state_dict` takes, from state by name. Local as a rule.

        Each rank cuts out its own part, so it works at any number of ranks and for any wrapping.
        Collective for `DTensor`s, and under `rank0_only`: there only the first rank needs the
        dict, and sends one value at a time.

        Args:
            model: The model.
            optim: Its optimizer, which stays as it is unless `load_directly`.
            optim_state_dict: State by name, full or sharded, from this package or from torch's.
            is_named_optimizer: Whether the optimizer's own state dict has names for keys.
            load_directly: Also call `optim.load_state_dict`.
            group: Not needed; torch's method has it.

        Returns:
            State and groups as the optimizer numbers them, in memory of their own.

        Raises:
            OptimizerStateError: If names are missing or unknown, if shapes differ, or if weights
                in one flat parameter differ in what they share. Nothing is loaded then.
            OptimizerBeforeWrappingError: If the optimizer was built before the model was wrapped.
            SilentRanksError: If a rank does not take part within the time limit.
        """
        form = form_of(model)
        if form.kind == "local":
            result = copy.deepcopy(optim_state_dict)
        else:
            groups = groups_of(model, optim)
            keys = registered_keys(model, groups) if is_named_optimizer else None
            result = cut_state(model, groups, optim_state_dict, form, keys)
        if load_directly:
            optim.load_state_dict(result)
        return result

    def _fqn_modifiers(self) -> dict[str, str]:
        # What torch's checkpoint helpers ask to leave the wrapper out of names.
        return {"": WRAPPED}


def form_of(model: nn.Module) -> Form:
    """Return the form that `state_dict_type` has chosen for a model. Local."""
    export = export_of(model)
    offload = export.optim_offload_to_cpu is not False
    return Form(export.form.value, export.optim_rank0_only, offload)


def set_up(model: nn.Module) -> list[Unit]:
    """Make sure that all units in a model can communicate; return them. Collective, once."""
    parts = UnitModule.fsdp_modules(model)
    for part in parts:
        part._set_up()
    return [part._unit for part in parts]


# Out


def export_state(
    model: nn.Module, optim: Optimizer, given: dict[str, Any] | None, form: Form
) -> dict[str, Any]:
    """Return an optimizer's state by name. Collective.

    Args:
        model: The model.
        optim: Its optimizer.
        given: The optimizer's own state dict, if it was asked for already.
        form: Which form.
    """
    own = _own_state_dict(optim) if given is None else _gathered(given)
    if form.kind == "local":
        return copy.deepcopy(own)
    units = set_up(model)
    names = Names(model, of_files=form.kind == "sharded")
    groups = groups_of(model, optim)
    entries = entries_of(groups, names, own_keys(model, groups, own))
    parts = agreed_parts(entries, units, own["state"])
    state = whole_state(parts, units, form)
    keys = {entry.key for entry in entries}
    state |= {key: copied(v, form) for key, v in own["state"].items() if key not in keys}
    by_name = _groups_by_name(own["param_groups"], entries)
    if form.kind == "full":
        for root, inside in _models(model):
            bring_together(state, by_name, entries, inside, root)
        if form.rank0_only and units and not is_first(units[0]):
            return {}
    elif form.kind == "sharded":
        # A file has one list for all ranks, so it must not say which version this rank has.
        for group in by_name:
            for names_of in group.keys() & {"params", "param_names"}:
                group[names_of] = [re.sub(r"@rank\d+$", "", name) for name in group[names_of]]
    return {"state": state, "param_groups": by_name}


def _own_state_dict(optim: Optimizer) -> dict[str, Any]:
    with local_state_understood():
        own: dict[str, Any] = optim.state_dict()
    return own


def _gathered(own: dict[str, Any]) -> dict[str, Any]:
    """Make `DTensor`s whole that an attached optimizer's own state dict has. Collective then."""
    state = {
        key: {n: whole(v) if isinstance(v, Tensor) else v for n, v in values.items()}
        if isinstance(values, Mapping)
        else values
        for key, values in own["state"].items()
    }
    return {**own, "state": state}


def _models(model: nn.Module) -> list[tuple[Unit, list[Unit]]]:
    """Return each outermost unit in a model, with all units in it."""
    found: dict[UnitModule, list[Unit]] = {}
    for part in UnitModule.fsdp_modules(model):
        found.setdefault(part._root(), []).append(part._unit)
    return [(root._unit, units) for root, units in found.items()]


def whole_state(
    parts: Sequence[Part], units: Sequence[Unit], form: Form
) -> dict[str, dict[str, Any]]:
    """Return the state of weights by stored name, whole or cut by rows. Collective.

    Args:
        parts: What `agreed_parts` has returned.
        units: The model's units, in the same order on all ranks.
        form: Which form; not the local one.

    Returns:
        By name of the weight, then of the value; on ranks that get nothing, scalars only.
    """
    state: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name in part.entry.names:
            # In the order of the optimizer's own; what is gathered comes in later.
            state[name] = {
                n: None if spec[0] == "shard" else copied(part.constant(n), form)
                for n, spec in part.specs.items()
            }
    first_only = form.rank0_only and form.kind == "full"
    for unit, stored, name, full in gathered(parts, units, first_only=first_only):
        if form.kind == "sharded":
            state[stored][name] = cut(full.cpu() if form.offload_to_cpu else full, unit.placement)
        else:
            state[stored][name] = copied(full, form)
    return state


def copied(value: Any, form: Form) -> Any:
    """Return a value in memory of its own, on the CPU if that is asked for."""
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    return value.detach().to("cpu" if form.offload_to_cpu else value.device, copy=True)


def _groups_by_name(
    groups: Sequence[Mapping[str, Any]], entries: Sequence[Entry]
) -> list[dict[str, Any]]:
    result = []
    for number, group in enumerate(groups):
        names = [name for entry in entries if entry.group == number for name in entry.names]
        one = {**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": names}
        result.append(one | ({"param_names": list(names)} if "param_names" in group else {}))
    return result


# In


def cut_state(
    model: nn.Module,
    groups: Groups,
    given: Mapping[str, Any] | None,
    form: Form,
    keys: Mapping[nn.Parameter, str] | None = None,
) -> dict[str, Any]:
    """Return what an optimizer of these parameters loads. Collective as far as it fetches.

    Args:
        model: The model.
        groups: The optimizer's parameters.
        given: State by name.
        form: Whether all ranks have it.
        keys: The optimizer's keys, if they are not numbers.
    """
    units = set_up(model)
    names = Names(model, of_files=False)
    entries = entries_of(groups, names, keys)
    if form.rank0_only and units:
        saved = saved_on_first(given, names, units[0].placement.groups)
    else:
        saved = saved_here({} if given is None else given, names)
    return to_optimizer(saved, entries, names, len(groups))


# Torch's own helpers


def attach(model: nn.Module, optimizer: Optimizer) -> None:
    """Let an optimizer's own state dict be sharded, for torch's checkpoint helpers. Not collective.

    Torch's `get_optimizer_state_dict` and `set_optimizer_state_dict` do not know this package:
    they take what `optimizer.state_dict()` returns. It has this rank's pieces, as tensors that
    `torch.distributed.checkpoint` takes to be equal on all ranks. Once attached, it returns a
    `DTensor` for each whole weight's state, and `load_state_dict` understands those, whole tensors
    and this rank's pieces. Both are collective from then on.

    Args:
        model: A model that was wrapped with `use_orig_params=True`.
        optimizer: An optimizer of its parameters.

    Raises:
        OptimizerStateError: If it holds flat parameters, which torch's helpers cannot name, or
            weights of units in small groups, of whose versions they would keep one.
    """
    for part in UnitModule.fsdp_modules(model):
        if part._unit.placement.size < dist.get_world_size():
            raise OptimizerStateError.at(
                "attach",
                expected="units over all ranks, so that a name means one weight",
                found=f"{part._unit.where} over {part._unit.placement.size} ranks",
                fix="Use FullyShardedDataParallel.optim_state_dict, which has a name for each "
                "version, such as 'expert.weight@rank2'.",
            )
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if isinstance(parameter, FlatParameter):
            raise OptimizerStateError.at(
                "attach",
                expected="an optimizer of original parameters, which have names",
                found=f"flat parameters, such as that of {parameter._layout.slots[0].name}",
                fix="Wrap with use_orig_params=True, or use FullyShardedDataParallel."
                "optim_state_dict, which names what is in them.",
            )
    if optimizer not in speaking_for_all:
        speaking_for_all.add(optimizer)
        optimizer.register_state_dict_post_hook(partial(_sharded_instead, model))
        optimizer.register_load_state_dict_pre_hook(partial(_pieces_instead, model))


def _sharded_instead(
    model: nn.Module, optimizer: Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any] | None:
    """What torch calls after `optimizer.state_dict()`."""
    if is_understood():
        return None
    units, names = set_up(model), Names(model)
    entries = entries_of(groups_of(model, optimizer), names)
    parts = agreed_parts(entries, units, state_dict["state"])
    by_name = whole_state(parts, units, Form("sharded", offload_to_cpu=False))
    state = {part.entry.key: by_name[part.entry.names[0]] for part in parts}
    return {**state_dict, "state": state}


def _pieces_instead(
    model: nn.Module, optimizer: Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """What torch calls before `optimizer.load_state_dict()`; parameters are paired by position."""
    entries = entries_of(groups_of(model, optimizer), Names(model))
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    state = dict(state_dict["state"])
    for key, entry in zip(keys, entries, strict=False):
        values = {
            n: whole(v) if isinstance(v, Tensor) else v for n, v in state.get(key, {}).items()
        }
        if values and entry.flat_param is not None:
            values = own_pieces(values, entry.flat_param, entry.slots[0])
        if values:
            state[key] = copy.deepcopy(values)
    return {**state_dict, "state": state}
