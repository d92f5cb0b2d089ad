"""The state of an optimizer, in and out, under the plain model's names.

An optimizer of a sharded model keeps the state of shards. Its own `state_dict()` says what this
rank has, by number: it fits no other number of ranks and no plain model, and saved by one rank it
is a fraction. `optim_state_dict` turns it into state of whole weights, by name.
`optim_state_dict_to_load` cuts such a dict to what this rank's optimizer holds.

Which form is asked for with `state_dict_type`. *Full*: whole tensors, on all ranks or with
`rank0_only` on the first, which load anywhere. *Sharded*: `DTensor`s that
`torch.distributed.checkpoint` saves and loads at any number of ranks. Either is a copy: training
on does not change it, and it can be loaded twice.

A flat parameter has one `step` and one set of hyperparameters for all weights in it, so what is
saved says the same for each of them, and what is loaded has to.

Tip: Save the optimizer through the model
    `optimizer.state_dict()` has this rank's shards only. Saved on one rank it lacks what the
    others hold, and nothing says so. `FullyShardedDataParallel.optim_state_dict` brings the
    pieces together.

    Proof: tips/save_the_optimizer
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from fsdp_ref.full_params import is_first
from fsdp_ref.optim_gather import Part, agreed_parts, gathered
from fsdp_ref.optim_keys import Entry, Names, entries_of, groups_of, own_keys, registered_keys
from fsdp_ref.optim_load import saved_here, saved_on_first, to_optimizer
from fsdp_ref.row_shards import cut
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
        """
        return _export(model, optim, optim_state_dict, form_of(model))

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
            result = _import(model, groups, optim_state_dict, form, keys)
        if load_directly:
            optim.load_state_dict(result)
        return result


def form_of(model: nn.Module) -> Form:
    """Return the form that `state_dict_type` has chosen for a model. Local."""
    return Form()


def set_up(model: nn.Module) -> list[Unit]:
    """Make sure that all units in a model can communicate; return them. Collective, once."""
    parts = UnitModule.fsdp_modules(model)
    for part in parts:
        part._set_up()
    return [part._unit for part in parts]


# Out


def _export(
    model: nn.Module, optim: Optimizer, given: dict[str, Any] | None, form: Form
) -> dict[str, Any]:
    own = optim.state_dict() if given is None else given
    if form.kind == "local":
        return copy.deepcopy(own)
    units = set_up(model)
    names = Names(model, of_files=form.kind == "sharded")
    groups = groups_of(model, optim)
    entries = entries_of(groups, names, own_keys(model, groups, own))
    parts = agreed_parts(entries, names.units, own["state"])
    state = _whole_state(parts, names.units, form)
    if form.rank0_only and units and not is_first(units[0]):
        return {}
    return {"state": state, "param_groups": _groups_by_name(own["param_groups"], entries)}


def _whole_state(
    parts: Sequence[Part], units: Sequence[Unit], form: Form
) -> dict[str, dict[str, Any]]:
    state: dict[str, dict[str, Any]] = {}
    for part in parts:
        for name in part.entry.names:
            constants = {
                n: part.constant(n) for n, spec in part.specs.items() if spec[0] != "shard"
            }
            # In the order of the optimizer's own; what is gathered comes in later.
            state[name] = {n: copy.deepcopy(constants.get(n)) for n in part.specs}
    first_only = form.rank0_only and form.kind == "full"
    for unit, stored, name, full in gathered(parts, units, first_only=first_only):
        value = full.cpu() if form.offload_to_cpu else full
        sharded = form.kind == "sharded"
        state[stored][name] = cut(value, unit.placement) if sharded else value.clone()
    return state


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


def _import(
    model: nn.Module,
    groups: Sequence[Sequence[nn.Parameter]],
    given: Mapping[str, Any] | None,
    form: Form,
    keys: Mapping[nn.Parameter, str] | None = None,
) -> dict[str, Any]:
    units = set_up(model)
    names = Names(model, of_files=False)
    entries = entries_of(groups, names, keys)
    if form.rank0_only and units:
        saved = saved_on_first(given, names, units[0].placement.groups)
    else:
        saved = saved_here({} if given is None else given, names)
    return to_optimizer(saved, entries, names)
