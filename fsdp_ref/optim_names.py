"""Optimizer state under its older names: torch's first methods, and FairScale's.

Each is `optim_state_dict` or `optim_state_dict_to_load` with the form in its name, whatever
`state_dict_type` says.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from fsdp_ref.errors import OptimizerStateError, this_rank
from fsdp_ref.optim_keys import Entry, Names, entries_of, groups_of, regroup
from fsdp_ref.optim_load import refuse_keys
from fsdp_ref.optim_state import Form, OptimizerStateAccess, cut_state, export_state, set_up
from fsdp_ref.small_groups import first_rank


class OlderOptimizerNames(OptimizerStateAccess):
    """A wrapper that answers to the older names, too."""

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return state of whole weights, on the CPU of the first rank as a rule. Collective.

        Args:
            model: The model.
            optim: Its optimizer.
            optim_input: Not needed: the optimizer knows its parameters.
            rank0_only: Give the others an empty dict.
            group: Not needed.

        Returns:
            As `optim_state_dict` in the full form.
        """
        return export_state(model, optim, None, Form("full", rank0_only=rank0_only))

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: Optimizer, group: ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Return state cut by rows, as `DTensor`s. Collective.

        Args:
            model: The model.
            optim: Its optimizer.
            group: Not needed.

        Returns:
            As `optim_state_dict` in the sharded form.
        """
        return export_state(model, optim, None, Form("sharded"))

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return what this rank's optimizer loads, from a dict that every rank has. Local.

        Args:
            full_optim_state_dict: State by name.
            model: The model.
            optim_input: Without `optim`, what the optimizer was built from; by default
                `model.parameters()`.
            optim: The optimizer that will load it.

        Returns:
            As `optim_state_dict_to_load`.

        Raises:
            OptimizerStateError: If it does not fit.
        """
        groups = groups_of(model, optim, optim_input)
        return cut_state(model, groups, full_optim_state_dict, Form("full"))

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: Optimizer
    ) -> dict[str, Any]:
        """Return what this rank's optimizer loads, from `DTensor`s. Collective.

        Args:
            sharded_optim_state_dict: State by name.
            model: The model.
            optim: The optimizer that will load it.

        Returns:
            As `optim_state_dict_to_load`.

        Raises:
            OptimizerStateError: If it does not fit.
        """
        return cut_state(model, groups_of(model, optim), sharded_optim_state_dict, Form("sharded"))

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
        group: ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Return what this rank's optimizer loads, from a dict that the first rank has. Collective.

        The first rank sends one value at a time; no other rank needs memory for more.

        Args:
            full_optim_state_dict: State by name; on other ranks it is not looked at.
            model: The model.
            optim_input: As for `shard_full_optim_state_dict`.
            optim: The optimizer that will load it.
            group: Not needed.

        Returns:
            As `optim_state_dict_to_load`.

        Raises:
            OptimizerStateError: On every rank, if it does not fit.
            SilentRanksError: If a rank does not take part within the time limit.
        """
        groups = groups_of(model, optim, optim_input)
        return cut_state(model, groups, full_optim_state_dict, Form("full", rank0_only=True))

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: dict[str, Any],
        optim_state_key_type: Any,
        model: nn.Module,
        optim_input: Any = None,
        optim: Optimizer | None = None,
    ) -> dict[str, Any]:
        """Return the state dict of a plain model's optimizer with other keys. Local.

        To load state from a plain run, translate it to names with the plain model and its
        optimizer; to go on without sharding, translate it to numbers with those. Numbers mean
        the order of one optimizer's parameters: shapes are compared to find out if it is another.

        Args:
            optim_state_dict: State by number or by name.
            optim_state_key_type: Torch's `OptimStateKeyType`, or `"PARAM_NAME"` or `"PARAM_ID"`.
            model: The plain model, or one with `use_orig_params`.
            optim_input: Without `optim`, what the optimizer was or will be built from; by default
                `model.parameters()`.
            optim: The optimizer that the numbers belong to.

        Returns:
            The same state with the other keys, in memory of its own, in the optimizer's order.

        Raises:
            OptimizerStateError: If keys are mixed, unknown, or belong to weights of another shape;
                if the model has flat parameters.
        """
        set_up(model)
        entries = entries_of(groups_of(model, optim, optim_input), Names(model, of_files=False))
        _refuse_flat(entries)
        named = [isinstance(key, str) for key in optim_state_dict["state"]]
        wanted = getattr(optim_state_key_type, "name", optim_state_key_type)
        mixed = any(named) and not all(named)
        if wanted not in ("PARAM_NAME", "PARAM_ID") or mixed:
            raise OptimizerStateError.at(
                "rekey_optim_state_dict",
                expected="keys of one kind, to become PARAM_NAME or PARAM_ID",
                found="numbers and names" if mixed else repr(wanted),
                fix="Hand over a state dict as an optimizer or optim_state_dict() returned it.",
            )
        params = [key for group in optim_state_dict["param_groups"] for key in group["params"]]
        if isinstance((params or [0])[0], str) == (wanted == "PARAM_NAME"):
            return dict(_copied(optim_state_dict))
        translate = _to_names if wanted == "PARAM_NAME" else _to_numbers
        return translate(optim_state_dict, entries)

    # FairScale's

    def gather_full_optim_state_dict(
        self, optim: Optimizer, recipient_rank: int | None = None
    ) -> dict[str, Any] | None:
        """Return state of whole weights by number, as a plain optimizer has it. Collective.

        Weights are numbered in the plain model's order, group by group, so an optimizer over the
        plain model's parameters loads it.

        Args:
            optim: The model's optimizer.
            recipient_rank: The only global rank that wants it; `None` for all.

        Returns:
            A dict with `"state"`, `"param_groups"`, and the names in `"param_names"`, on the CPU;
            `None` on ranks that do not want it.

        Raises:
            OptimizerStateError: On every rank of a unit, if its ranks have different state.
            SilentRanksError: If a rank does not take part within the time limit.
        """
        set_up(self)
        only_first = recipient_rank == first_rank(self._unit)
        full = export_state(self, optim, None, Form("full", rank0_only=only_first))
        if recipient_rank not in (None, this_rank()):
            return None
        order = {name: at for at, name in enumerate(Names(self, of_files=False).plain_order)}
        numbers: dict[str, int] = {}
        groups = []
        for group in full["param_groups"]:
            names = sorted(
                group["params"], key=lambda n: order.get(n.partition("@")[0], len(order))
            )
            start = len(numbers)
            numbers.update({name: start + at for at, name in enumerate(names)})
            groups.append({**group, "params": [numbers[name] for name in names]})
        state = {numbers[name]: values for name, values in full["state"].items()}
        return {
            "state": dict(sorted(state.items())),
            "param_groups": groups,
            "param_names": dict(sorted((number, name) for name, number in numbers.items())),
        }

    def get_shard_from_optim_state_dict(
        self, full_optim_state_dict: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what this rank's optimizer loads, from state by number. Local.

        Args:
            full_optim_state_dict: What `gather_full_optim_state_dict` returned, or what the
                optimizer of a plain model's parameters did, built from `parameters()`.

        Returns:
            State for an optimizer built from this model's `parameters()`, or from groups of them
            in that order.

        Raises:
            OptimizerStateError: If it does not fit.
        """
        set_up(self)
        names = Names(self, of_files=False)
        known = full_optim_state_dict.get("param_names", dict(enumerate(names.plain_order)))
        named = {
            "state": {known.get(k, k): v for k, v in full_optim_state_dict["state"].items()},
            "param_groups": [
                {**group, "params": [known.get(key, key) for key in group["params"]]}
                for group in full_optim_state_dict["param_groups"]
            ],
        }
        refuse_keys(named)
        set_up(self)
        entries = entries_of(groups_of(self, None), Names(self, of_files=False))
        inside = [set(group["params"]) for group in named["param_groups"]]
        groups = [
            [e.parameter for e in entries if not names.isdisjoint(e.names)] for names in inside
        ]
        return cut_state(self, groups, named, Form("full"))


def _refuse_flat(entries: Sequence[Entry]) -> None:
    for entry in entries:
        if len(entry.names) != 1:
            raise OptimizerStateError.at(
                "rekey_optim_state_dict",
                expected="a model in which every number is one weight",
                found=f"a flat parameter with '{entry.names[0]}' and others",
                fix="Hand over the plain model; a wrapped one takes and gives names.",
            )


def _copied(value: Any) -> Any:
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, value)


def _to_names(given: Mapping[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
    by_number = {entry.key: entry for entry in entries}
    params: dict[Any, dict[str, Any]] = {
        key: {} for group in given["param_groups"] for key in group["params"]
    }
    for key, values in {**params, **given["state"]}.items():
        _refuse_other_shape(key, values, by_number.get(key))
    groups = [
        {**copy.deepcopy(group), "params": [by_number[key].names[0] for key in group["params"]]}
        for group in given["param_groups"]
    ]
    state = {by_number[key].names[0]: _copied(values) for key, values in given["state"].items()}
    return {"state": state, "param_groups": groups}


def _to_numbers(given: Mapping[str, Any], entries: Sequence[Entry]) -> dict[str, Any]:
    by_name = {entry.names[0]: entry for entry in entries}
    for name, values in given["state"].items():
        _refuse_other_shape(name, values, by_name.get(name))
    count = max((entry.group for entry in entries), default=-1) + 1
    wanted = [[entry for entry in entries if entry.group == number] for number in range(count)]
    settings = regroup(given["param_groups"], wanted, {})
    groups = [
        {**copy.deepcopy(one), "params": [entry.key for entry in inside]}
        for one, inside in zip(settings, wanted, strict=True)
    ]
    state = {by_name[name].key: _copied(values) for name, values in given["state"].items()}
    return {"state": state, "param_groups": groups}


def _refuse_other_shape(key: Any, values: Mapping[str, Any], entry: Entry | None) -> None:
    where = "rekey_optim_state_dict"
    if entry is None:
        raise OptimizerStateError.at(
            where, expected="state of the optimizer's parameters", found=f"the key {key!r}",
            fix="Hand over the model and the optimizer that the state belongs to.",
        )  # fmt: skip
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or entry.flat_param is not None:
            continue
        if value.shape != entry.parameter.shape:
            raise OptimizerStateError.at(
                where,
                expected=f"'{name}' of '{entry.names[0]}' of shape {tuple(entry.parameter.shape)}",
                found=f"{tuple(value.shape)} under the key {key!r}",
                fix="Numbers follow the order in which an optimizer got its parameters: hand over "
                "the optimizer that wrote the state.",
            )
