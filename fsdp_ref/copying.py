"""Copies of a sharded module, by `copy.deepcopy` or pickle: shards travel, hooks are rebuilt.

A copy gets its own shards and no gradients, as a copied `nn.Parameter` does. What hangs on
this process, such as hooks, weak references and storages without memory, is left behind and made
anew. So is a live process group when it is pickled; the copy's first use asks for it again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fsdp_ref.errors import CopyError
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.options import Options
from fsdp_ref.originals import OriginalParameter
from fsdp_ref.rank_group import Placement
from fsdp_ref.registered import RegisteredNames
from fsdp_ref.states import Phase
from fsdp_ref.unit import Unit


@dataclass
class FlatRecord:
    """One flat parameter, without anything that hangs on the process.

    Attributes:
        shard: This rank's values, `(shard_numel,)`.
        requires_grad: Of the flat parameter.
        device: Where the full parameters live.
        divisors: By what the gradient is divided before and after the reduction.
        names: For each original parameter, all names under which modules hold it.
        shapes: Their shapes.
        trainable: Which of them need a gradient.
    """

    shard: Tensor
    requires_grad: bool
    device: torch.device
    divisors: tuple[float, float]
    names: list[list[str]]
    shapes: list[torch.Size]
    trainable: list[bool]


@dataclass
class UnitRecord:
    """One unit, without anything that hangs on the process.

    Attributes:
        name: Its name.
        placement: Its ranks.
        options: Its options.
        flat: Its flat parameters.
        orders: By the dotted name of a module, the order in which it registers parameters.
    """

    name: str
    placement: Placement
    options: Options
    flat: list[FlatRecord]
    orders: dict[str, list[str]]


def record_unit(unit: Unit) -> UnitRecord:
    """Write down a unit that is at rest; its full parameters are dropped. Local.

    Args:
        unit: The unit.

    Returns:
        What `restore_unit` needs.

    Raises:
        CopyError: If the unit is busy.
    """
    if unit.summoned or unit.phase is not Phase.IDLE:
        raise CopyError.at(
            unit.where,
            expected="a model between steps",
            found="summon_full_params" if unit.summoned else f"the phase {unit.phase.name}",
            fix="Copy it after the step, outside of any context.",
        )
    unit.reshard()
    flat = []
    for flat_param in unit.flat_params:
        originals = flat_param._originals
        flat_param.take_back_edits()
        flat.append(
            FlatRecord(
                flat_param.detach(),
                flat_param.requires_grad,
                flat_param.compute_device,
                flat_param._divisors if flat_param._comm_hook is None else flat_param.own_divisors,
                [[name for _, _, name in original.places] for original in originals],
                [original.shape for original in originals],
                [original.parameter.requires_grad for original in originals],
            )
        )
    return UnitRecord(unit.name, unit.placement, unit.options, flat, unit.registered.orders())


def restore_unit(wrapper: nn.Module, module: nn.Module, record: UnitRecord) -> Unit:
    """Make a unit again around a copied module. Local.

    Args:
        wrapper: What registers the flat parameters.
        module: The copy of the module inside.
        record: What `record_unit` wrote down.

    Returns:
        The unit.
    """
    flat_params = [_restore_flat(module, one, record) for one in record.flat]
    for name, order in record.orders.items():
        registered = module.get_submodule(name)._parameters
        ordered = {attribute: registered[attribute] for attribute in order}
        registered.clear()
        registered.update(ordered)
    names = RegisteredNames(wrapper, flat_params, use_orig_params=record.options.use_orig_params)
    return Unit(record.name, flat_params, record.placement, names, record.options)


def _restore_flat(module: nn.Module, record: FlatRecord, unit: UnitRecord) -> FlatParameter:
    originals = []
    for names, shape, trainable in zip(record.names, record.shapes, record.trainable, strict=True):
        places = [(*_holder(module, name), name) for name in names]
        holder, attribute, _ = places[0]
        if unit.options.use_orig_params:  # the copied modules hold copies of the pieces
            leaf = holder._parameters[attribute]
            assert leaf is not None
        else:
            leaf = nn.Parameter(record.shard.new_empty(0), requires_grad=trainable)
        for holder, attribute, _ in places:
            holder.__dict__.pop(attribute, None)  # the copy of a stand-in
            holder._parameters[attribute] = leaf
        originals.append(OriginalParameter(leaf, places, shape))
    flat_param = FlatParameter(originals, unit.placement, record.device, unit.options, record.shard)
    flat_param.requires_grad_(record.requires_grad)
    flat_param._divisors = record.divisors
    return flat_param


def _holder(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return module.get_submodule(path), attribute
