"""Which entry of an optimizer belongs to which weight.

An optimizer numbers its parameters, and keeps their state by number. To a plain model a number
means one weight. Here it may mean a flat parameter, which holds many, or one rank's piece of a
weight. So what goes in and out is kept by name, the name in the plain model, and this module
knows who is who.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp_ref.errors import OptimizerBeforeWrappingError, OptimizerStateError
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.leaves import shown_by
from fsdp_ref.originals import unit_that_owns
from fsdp_ref.row_shards import stored_name
from fsdp_ref.state_dict import clean_name
from fsdp_ref.unit import Unit
from fsdp_ref.unit_module import UnitModule

Groups = Sequence[Sequence[nn.Parameter]]
"""The parameters of an optimizer, one list for each of its groups."""


def plain_name(name: str) -> str:
    """Return a parameter's name as in the plain model: wrappers leave no trace in it.

    Examples:
        >>> plain_name("_fsdp_wrapped_module.head._checkpoint_wrapped_module.weight")
        'head.weight'
    """
    return clean_name(name).replace("_checkpoint_wrapped_module.", "")


class Names:
    """What the weights of a model are called, wherever they lie.

    Attributes:
        units: All units in the model, outer before inner.
        of_slots: For each flat parameter, the names of its original parameters, in order, as they
            are stored.
        of_others: The names of parameters that lie in no unit.
        stored: From every name of the plain model, also further ones of tied weights, and from
            every stored name, to the stored one.
        plain_order: The stored names in the order of the plain model's `named_parameters()`.
    """

    def __init__(self, model: nn.Module, *, of_files: bool = True) -> None:
        """Look through a model whose units are set up. Collective as `stored_name` is.

        Args:
            model: A unit, or a module with units inside, or a plain one.
            of_files: Use the names of files that all ranks of the world write together, and not
                those of a dict that belongs to this model alone.
        """
        self._of_files = of_files
        self.units: list[Unit] = []
        self.of_slots: dict[FlatParameter, list[str]] = {}
        self.of_others: dict[nn.Parameter, str] = {}
        self.stored: dict[str, str] = {}
        for prefix, part in model.named_modules():
            if isinstance(part, UnitModule):
                ranks = part._root()._unit.placement.size
                self._add(part._unit, plain_name(f"{prefix}." if prefix else ""), ranks)
        for name, parameter in model.named_parameters():
            if not isinstance(parameter, FlatParameter) and shown_by(parameter) is None:
                self.of_others[parameter] = plain_name(name)
                self.stored[plain_name(name)] = plain_name(name)
        self.plain_order = list(self._in_order(model))

    def _add(self, unit: Unit, prefix: str, model_ranks: int) -> None:
        alone = not self._of_files and unit.placement.size == model_ranks
        self.units.append(unit)
        for flat_param in unit.flat_params:
            self.of_slots[flat_param] = []
            for original in flat_param._originals:
                names = [plain_name(prefix + name) for _, _, name in original.places]
                in_files = stored_name(names[0], unit.placement)
                key = names[0] if alone else in_files
                self.of_slots[flat_param].append(key)
                self.stored.update(dict.fromkeys([*names, in_files], key))

    def _in_order(self, model: nn.Module) -> dict[str, None]:
        orders = {m: order for u in self.units for m, order in u.registered._order.items()}
        found: dict[str, None] = {}
        for prefix, module in model.named_modules():
            attributes = [] if isinstance(module, UnitModule) else list(module._parameters)
            for attribute in orders.get(module, attributes):
                name = plain_name(f"{prefix}.{attribute}" if prefix else attribute)
                if name in self.stored:  # further names of tied weights lead to the first
                    found[self.stored[name]] = None
        return found

    def frozen(self) -> set[str]:
        """Return the stored names of weights that are not trained now."""
        leaves = {
            name: original.parameter
            for flat_param, inside in self.of_slots.items()
            for name, original in zip(inside, flat_param._originals, strict=True)
        }
        others = {name: parameter for parameter, name in self.of_others.items()}
        return {name for name, p in {**others, **leaves}.items() if not p.requires_grad}


@dataclass(frozen=True, eq=False)
class Entry:
    """One parameter of an optimizer.

    Attributes:
        key: Under which the optimizer's own state dict has its state: a number, as a rule.
        group: The position of its group.
        parameter: What the optimizer holds.
        names: The stored names of all weights in it; one, unless it is a flat parameter.
        flat_param: The flat parameter that it is, or shows a piece of; `None` outside of units.
        slots: Positions of the weights in the flat parameter.
    """

    key: int | str
    group: int
    parameter: nn.Parameter
    names: tuple[str, ...]
    flat_param: FlatParameter | None = None
    slots: tuple[int, ...] = ()

    def piece(self, shard: Tensor) -> Tensor:
        """Return the part of a shard that the parameter covers."""
        if self.flat_param is None or self.parameter is self.flat_param:
            return shard
        return self.flat_param._leaves.piece(shard, self.slots[0])

    def owned_by(self, group_rank: int) -> bool:
        """Return whether a rank of the unit's group holds any element of it."""
        if self.flat_param is None:
            return True
        layout = self.flat_param._layout
        return any(layout.overlap(layout.slots[slot], group_rank)[2] for slot in self.slots)


def entries_of(
    groups: Groups, names: Names, keys: Mapping[nn.Parameter, str] | None = None
) -> list[Entry]:
    """Return what an optimizer holds, in its own order. Local.

    Args:
        groups: Its parameters.
        names: What the weights of the model are called.
        keys: Its keys, if they are not numbers.

    Returns:
        One entry per parameter.

    Raises:
        OptimizerBeforeWrappingError: If it holds a parameter that a unit has replaced since.
        OptimizerStateError: If it holds a parameter that is not in the model.
    """
    found: list[Entry] = []
    for group, parameters in enumerate(groups):
        for parameter in parameters:
            key = len(found) if keys is None else keys[parameter]
            found.append(_entry(key, group, parameter, names))
    return found


def _entry(key: int | str, group: int, parameter: nn.Parameter, names: Names) -> Entry:
    if isinstance(parameter, FlatParameter) and parameter in names.of_slots:
        inside = tuple(names.of_slots[parameter])
        return Entry(key, group, parameter, inside, parameter, tuple(range(len(inside))))
    flat_param: FlatParameter | None = shown_by(parameter)
    if flat_param is not None and flat_param in names.of_slots:
        originals = [original.parameter for original in flat_param._originals]
        slot = next(n for n, original in enumerate(originals) if original is parameter)
        name = names.of_slots[flat_param][slot]
        return Entry(key, group, parameter, (name,), flat_param, (slot,))
    if parameter in names.of_others:
        return Entry(key, group, parameter, (names.of_others[parameter],))
    owner = unit_that_owns(parameter)
    if owner is not None and flat_param is None:
        raise OptimizerBeforeWrappingError.at(
            f"optimizer state, group {group}",
            expected="an optimizer built from the parameters of the wrapped model",
            found=f"a parameter from before wrapping, '{owner}'",
            fix="Wrap first, then build the optimizer from model.parameters().",
        )
    raise OptimizerStateError.at(
        f"optimizer state, group {group}",
        expected="an optimizer of this model's parameters",
        found=f"one of shape {tuple(parameter.shape)} that is not in the model",
        fix="Hand over the model that the optimizer was built from.",
    )


# Which parameters


def groups_of(
    model: nn.Module, optim: Optimizer | None, optim_input: Any = None
) -> list[list[nn.Parameter]]:
    """Return an optimizer's parameters, or those that it would have if it were built in that way.

    Args:
        model: The model.
        optim: The optimizer, if there is one.
        optim_input: What it was built from otherwise: parameters, or groups; by default
            `model.parameters()`.
    """
    if optim is not None:
        return [list(group["params"]) for group in optim.param_groups]
    given = list(model.parameters() if optim_input is None else optim_input)
    if given and isinstance(given[0], dict):
        return [_listed(group["params"]) for group in given]
    return [given]


def _listed(parameters: nn.Parameter | Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameters] if isinstance(parameters, nn.Parameter) else list(parameters)


def own_keys(
    model: nn.Module, groups: Groups, optim_state_dict: Mapping[str, Any]
) -> dict[nn.Parameter, str] | None:
    """Return the keys of an optimizer that calls its parameters by name, `None` for numbers.

    Args:
        model: The model.
        groups: The optimizer's parameters.
        optim_state_dict: The optimizer's own state dict.
    """
    keys = [key for group in optim_state_dict["param_groups"] for key in group["params"]]
    if not any(isinstance(key, str) for key in keys):
        return None
    return registered_keys(model, groups)


def registered_keys(model: nn.Module, groups: Groups) -> dict[nn.Parameter, str]:
    """Return the names under which a model registers an optimizer's parameters."""
    held = {parameter for group in groups for parameter in group}
    return {p: name for name, p in model.named_parameters() if p in held}


# Groups


def regroup(
    saved: Sequence[Mapping[str, Any]], wanted: Sequence[Sequence[Entry]], names: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return, for each group of an optimizer, what a saved dict says of its parameters. Local.

    An optimizer that loads pairs parameters by position. So what is handed to it has its own order.

    Args:
        saved: Groups of a dict by name.
        wanted: The optimizer's own groups.
        names: From any name to the stored one.

    Returns:
        One dict per group, without `params`.

    Raises:
        OptimizerStateError: If parameters of one group come from several that differ.
    """
    group_of: dict[str, int] = {}
    for number, group in enumerate(saved):
        for name in group["params"]:
            group_of.setdefault(names.get(name, name), number)
    result = []
    for number, entries in enumerate(wanted):
        found = {group_of[n]: n for entry in entries for n in entry.names if n in group_of}
        if not found and number >= len(saved):
            raise _no_such_group(number)
        settings = [_settings(saved[one]) for one in found or (number,)]
        if any(one != settings[0] for one in settings):
            first, second = sorted(found.values())[:2]
            raise OptimizerStateError.at(
                f"optimizer state to load, group {number}",
                expected="one set of hyperparameters for all parameters of a group",
                found=f"'{first}' and '{second}' in groups that differ",
                fix="Build the optimizer with the groups that the saved one had; in a flat "
                "parameter all weights share a group, unless use_orig_params=True.",
            )
        result.append(settings[0])
    return result


def _no_such_group(number: int) -> OptimizerStateError:
    return OptimizerStateError.at(
        f"optimizer state to load, group {number}",
        expected="hyperparameters for every group",
        found="none for this one",
        fix="Build the optimizer with the groups that the saved one had.",
    )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
