"""Optimizer state of whole weights, by name, cut to what this rank's optimizer holds.

Everything is checked before anything is cut or sent: names, shapes, groups, and whether weights
that share a flat parameter have made equally many steps. The optimizer itself is not touched.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fsdp_ref.agreement import exchange_through
from fsdp_ref.collectives import broadcast
from fsdp_ref.errors import OptimizerStateError
from fsdp_ref.optim_keys import Entry, Names, regroup
from fsdp_ref.optim_words import Whole, decoded, encoded
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.row_shards import whole

_MOST_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Saved:
    """A state dict by name, from wherever.

    Attributes:
        state: By stored name of the weight, then by name of the value.
        groups: The saved groups, whose `params` are names.
        unknown: Names that the model does not have.
        others: What an optimizer keeps under keys of its own: single values, not state of weights.
    """

    state: Mapping[str, Mapping[str, Any]]
    groups: Sequence[Mapping[str, Any]]
    unknown: Sequence[str]
    others: Mapping[str, Any]


def saved_here(optim_state_dict: Mapping[str, Any], names: Names) -> Saved:
    """Read a dict that every rank has, or of which every rank has `DTensor`s. Local.

    Args:
        optim_state_dict: The dict.
        names: What the weights are called.

    Returns:
        What it says.

    Raises:
        OptimizerStateError: If it is no optimizer state dict by name.
    """
    optim_state_dict = with_own_names(optim_state_dict)
    refuse_keys(optim_state_dict)
    wholes, others = _parted(optim_state_dict["state"])
    wholes = {
        name: {n: _lazy(name, value) for n, value in values.items()}
        for name, values in wholes.items()
    }
    return _by_stored_name(wholes, others, optim_state_dict["param_groups"], names)


def with_own_names(optim_state_dict: Any) -> Any:
    """Translate numbers where the optimizer that wrote them knew its parameters' names. Local.

    Torch's optimizers do if they were built from `named_parameters()`.

    Args:
        optim_state_dict: Anything.

    Returns:
        State by name if that is possible, otherwise what was given.
    """
    groups = optim_state_dict.get("param_groups") if isinstance(optim_state_dict, Mapping) else None
    if not groups or not all("param_names" in group for group in groups):
        return optim_state_dict
    names = {
        key: name
        for group in groups
        for key, name in zip(group["params"], group["param_names"], strict=True)
    }
    return {
        "state": {names.get(key, key): values for key, values in optim_state_dict["state"].items()},
        "param_groups": [{**group, "params": list(group["param_names"])} for group in groups],
    }


def refuse_keys(optim_state_dict: Any) -> None:
    """Raise unless a dict has state and groups by name.

    Args:
        optim_state_dict: The dict.

    Raises:
        OptimizerStateError: If not.
    """
    where, keys = "optimizer state to load", {"state", "param_groups"}
    if not isinstance(optim_state_dict, Mapping) or not keys <= set(optim_state_dict):
        found = type(optim_state_dict).__name__
        if isinstance(optim_state_dict, Mapping):
            found = f"a dict with the keys {sorted(map(str, optim_state_dict))}"
        raise OptimizerStateError.at(
            where, expected="a dict with the keys 'state' and 'param_groups'", found=found,
            fix="Hand over what optim_state_dict() returned.",
        )  # fmt: skip
    params = [name for group in optim_state_dict["param_groups"] for name in group["params"]]
    wrong = [key for key in [*optim_state_dict["state"], *params] if not isinstance(key, str)]
    if wrong:
        raise OptimizerStateError.at(
            where, expected="weights called by name", found=f"the key {wrong[0]!r}",
            fix="Numbers mean an order that only the optimizer knows that wrote them: translate "
            "with rekey_optim_state_dict(..., OptimStateKeyType.PARAM_NAME, model, optim=...), "
            "given that optimizer and its model.",
        )  # fmt: skip


def _lazy(name: str, value: Any) -> Any:
    if hasattr(value, "local_shards"):
        raise OptimizerStateError.at(
            f"optimizer state to load, '{name}'",
            expected="whole tensors or DTensors",
            found="a ShardedTensor, as torch's FSDP1 writes without a device mesh",
            fix="Load it through torch.distributed.checkpoint into a dict of the sharded form, or "
            "save it in the full form.",
        )
    if isinstance(value, Tensor) and value.dim() > 0:
        return Whole(tuple(value.shape), value.dtype, lambda: whole(value))
    return whole(value).clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _parted(state: Mapping[str, Any]) -> tuple[dict[str, Mapping[str, Any]], dict[str, Any]]:
    """Tell state of weights from single values that an optimizer keeps under a key of its own."""
    weights = {key: values for key, values in state.items() if isinstance(values, Mapping)}
    return weights, {key: value for key, value in state.items() if key not in weights}


def _by_stored_name(
    state: Mapping[str, Mapping[str, Any]],
    others: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    names: Names,
) -> Saved:
    """Sort out what is this rank's, what belongs to other groups of ranks, and what is unknown."""
    params = [name for group in groups for name in group["params"]]
    unknown = [name for name in dict.fromkeys([*state, *params]) if not _known(name, names)]
    # The stored name last: where a dict has a weight under several names, that one counts.
    ordered = sorted(state, key=lambda name: names.stored.get(name) == name)
    mine = {names.stored[name]: state[name] for name in ordered if name in names.stored}
    return Saved(mine, groups, unknown, copy.deepcopy(dict(others)))


def _known(name: str, names: Names) -> bool:
    # Another group's version of a weight, `name@rank2`, is no mistake.
    return name in names.stored or re.sub(r"@rank\d+$", "", name) in names.stored


# From the first rank


def saved_on_first(
    optim_state_dict: Mapping[str, Any] | None, names: Names, groups: Sequence[RankGroup]
) -> Saved:
    """Let the first rank tell all others what its dict has; they fetch values in turn. Collective.

    Args:
        optim_state_dict: The dict; what other ranks hand in is not looked at.
        names: What the weights are called.
        groups: Who takes part: one group, or two that are the rows and columns of a grid.

    Returns:
        What the first rank's dict says. Every rank must fetch the same values in the same order.

    Raises:
        OptimizerStateError: On every rank, if it is no optimizer state dict by name, or has values
            that cannot be told to others.
        SilentRanksError: If a rank does not take part.
    """
    given: Mapping[str, Any] = {}
    text = ""
    if all(group.rank == 0 for group in groups):
        given = with_own_names({} if optim_state_dict is None else optim_state_dict)
        text = _told(given)
    heard = exchange_through("optimizer state to load", text, [group.ranks for group in groups])
    told = json.loads(next(text for text in heard.values() if text))
    if "error" in told:
        raise OptimizerStateError(told["error"])
    read = decoded(told["told"])
    weights, others = _parted(read["state"])
    state = {
        name: {
            n: value
            if not isinstance(value, Whole)
            else _from_first(value, given.get("state", {}).get(name, {}).get(n), groups)
            for n, value in values.items()
        }
        for name, values in weights.items()
    }
    for name, values in state.items():
        if re.search(r"@rank\d+$", name):  # each rank wants another one of these
            values |= {n: _had(v) for n, v in values.items() if isinstance(v, Whole)}
    return _by_stored_name(state, others, read["param_groups"], names)


def _had(value: Whole) -> Whole:
    """Fetch a value now, on every rank, and return it for those who want it."""
    full = value.fetch()
    return Whole(value.shape, value.dtype, lambda: full)


def _told(optim_state_dict: Mapping[str, Any]) -> str:
    """Put a dict into words, or say what is wrong with it."""
    try:
        refuse_keys(optim_state_dict)
        return json.dumps({"told": encoded(optim_state_dict)})
    except OptimizerStateError as error:
        return json.dumps({"error": str(error)})


def _from_first(value: Whole, mine: Tensor | None, groups: Sequence[RankGroup]) -> Whole:
    """Return a value that the first rank sends when all ranks fetch it."""

    def fetch() -> Tensor:
        full = torch.empty(value.shape, dtype=value.dtype) if mine is None else mine.detach()
        for group in groups:  # along the first row, then down all columns
            broadcast([full], group)
        return full

    return Whole(value.shape, value.dtype, fetch)


# Cutting


def to_optimizer(
    saved: Saved, entries: Sequence[Entry], names: Names, group_count: int
) -> dict[str, Any]:
    """Return a state dict that an optimizer's own `load_state_dict` takes. Collective to fetch.

    Args:
        saved: What is to be loaded.
        entries: The optimizer's parameters.
        names: What the weights are called.
        group_count: How many groups the optimizer has.

    Returns:
        State and groups by the optimizer's own keys, in its own order, in memory of its own. A
        weight without saved state beside others in a flat parameter gets zeros.

    Raises:
        OptimizerStateError: If names are missing or unknown, if a shape differs, or if weights
            of one flat parameter differ in what they share.
    """
    _refuse_names(saved, entries, names)
    by_group: dict[int, list[Entry]] = {}
    for entry in entries:
        by_group.setdefault(entry.group, []).append(entry)
        _refuse_values(saved, entry)
    wanted = [by_group.get(number, []) for number in range(group_count)]
    settings = regroup(saved.groups, wanted, names.stored)
    state = {entry.key: values for entry in entries if (values := _cut(saved, entry))}
    groups = [
        {**copy.deepcopy(one), "params": [entry.key for entry in group]}
        for one, group in zip(settings, wanted, strict=True)
    ]
    return {"state": {**state, **saved.others}, "param_groups": groups}


def _refuse_names(saved: Saved, entries: Sequence[Entry], names: Names) -> None:
    held = {name for entry in entries for name in entry.names}
    params = (name for group in saved.groups for name in group["params"])
    given = {names.stored.get(name, name) for name in params}
    frozen = names.frozen()
    extra = [n for n in names.stored.values() if n in given | set(saved.state) and n not in held]
    extra = [n for n in dict.fromkeys(extra) if n not in frozen or n in saved.state]
    missing = [n for entry in entries for n in entry.names if n not in given and n not in frozen]
    found = []
    if missing:
        found.append(f"nothing for {_listed(missing)}")
    if saved.unknown:
        found.append(f"{_listed(saved.unknown)}, not in the model")
    if extra:
        found.append(f"{_listed(extra)}, not in the optimizer")
    if found:
        raise OptimizerStateError.at(
            "optimizer state to load",
            expected="the weights that the optimizer holds, by name",
            found="; ".join(found),
            fix="Build model and optimizer as they were when the state was saved.",
        )


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:_MOST_NAMES_SHOWN])
    hidden = len(names) - _MOST_NAMES_SHOWN
    return shown if hidden <= 0 else f"{shown} and {hidden} more"


def _values(saved: Saved, entry: Entry, name: str) -> dict[int, Any]:
    """Return what is saved under one name of each weight in a parameter."""
    found = {}
    for slot, weight in zip(entry.slots or (0,), entry.names, strict=True):
        if name in saved.state.get(weight, {}):
            found[slot] = saved.state[weight][name]
    return found


def _value_names(saved: Saved, entry: Entry) -> list[str]:
    return list(dict.fromkeys(n for weight in entry.names for n in saved.state.get(weight, {})))


def _refuse_values(saved: Saved, entry: Entry) -> None:
    for name in _value_names(saved, entry):
        values = _values(saved, entry, name)
        weights = dict(zip(entry.slots or (0,), entry.names, strict=True))
        first = next(iter(values))
        for slot, value in values.items():
            shape = _shape(entry, slot)
            if isinstance(value, Whole) and value.shape != shape:
                raise OptimizerStateError.at(
                    f"optimizer state to load, '{weights[slot]}'",
                    expected=f"'{name}' of shape {shape}",
                    found=f"{value.shape}",
                    fix="Does the state belong to another model, or was it saved by number and "
                    "in another order?",
                )
            if not _alike(value, values[first]):
                raise OptimizerStateError.at(
                    f"optimizer state to load, '{weights[slot]}'",
                    expected=f"the same '{name}' as '{weights[first]}', with which it shares a "
                    f"flat parameter: {_shown(values[first])}",
                    found=_shown(value),
                    fix="Wrap with use_orig_params=True, where every weight has its own.",
                )


def _shape(entry: Entry, slot: int) -> tuple[int, ...]:
    if entry.flat_param is None:
        return tuple(entry.parameter.shape)
    return entry.flat_param._layout.slots[slot].shape


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, Whole) or isinstance(b, Whole):
        return isinstance(a, Whole) and isinstance(b, Whole) and a.dtype == b.dtype
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a.cpu(), b.cpu())
    return bool(a == b)


def _shown(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Whole) else str(value)


def _cut(saved: Saved, entry: Entry) -> dict[str, Any]:
    """Return this rank's state of one parameter; collective where values are fetched."""
    result: dict[str, Any] = {}
    for name in _value_names(saved, entry):
        values = _values(saved, entry, name)
        first = next(iter(values.values()))
        if isinstance(first, Whole):
            result[name] = _piece(entry, first.dtype, _fetched(values))
        else:
            result[name] = first  # a copy already
    return result


def _fetched(values: Mapping[int, Any]) -> Iterator[tuple[int, Tensor]]:
    for slot, value in values.items():
        yield slot, value.fetch()


def _piece(entry: Entry, dtype: torch.dtype, fulls: Iterator[tuple[int, Tensor]]) -> Tensor:
    flat_param = entry.flat_param
    if flat_param is None:
        return next(fulls)[1].detach().clone()
    shard = torch.zeros_like(flat_param.data, dtype=dtype)
    for slot, full in fulls:
        inner, start, numel = flat_param._layout.overlap(
            flat_param._layout.slots[slot], flat_param._group.rank
        )
        shard[start : start + numel].copy_(full.reshape(-1)[inner : inner + numel])
    return entry.piece(shard).clone()
