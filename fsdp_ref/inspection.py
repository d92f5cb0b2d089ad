"""Where is my weight? What `explain` and `unit_tree` say about a sharded model.

Sharding takes weights out of the modules that own them. Where one went is pure arithmetic, so any
rank can say it alone, at any time, also before the first forward. Nothing is sent.

[explain][fsdp_ref.explain] takes a weight's point of view: the unit and the place in its flat
parameter, which ranks hold which elements, in which dtypes, how many bytes. Use it when a
checkpoint does not fit, when one rank has more memory in use than the others, or when you
wonder why a shard holds what it holds.

[unit_tree][fsdp_ref.unit_tree] takes the model's point of view: what wrapping has made of it. Use
it after you chose a policy. One huge unit, a root that holds most parameters, or units of a few
elements each are seen at once.

Both return data, one frozen dataclass for each row, that prints as a table. Where the package
`rich` is installed, `rich.print` draws the table.

Tip: Look at the tree of units before you train
    A policy that selects too little leaves its parameters to the root, which is whole from the
    beginning of the forward to the end of the backward. The tree shows what each unit holds, and
    what it weighs when it is whole.

    Proof: inspection/where_is_my_weight
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import nn

from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.layout import ParameterSlot
from fsdp_ref.places import Dtypes, Explanation, Piece, UnitPlace, UnitTree, WeightPlace
from fsdp_ref.rank_group import Placement
from fsdp_ref.state_dict import clean_name
from fsdp_ref.unit import Unit
from fsdp_ref.unit_module import UnitModule


def strategy_of(placement: Placement) -> str:
    """Name the strategy that a placement amounts to. Local.

    Args:
        placement: Where a unit's weights are.

    Returns:
        A name in the table of [fsdp_ref.strategies][]. Of two that amount to the same, such as
        a hybrid one within groups of one rank, the simpler.

    Examples:
        >>> from fsdp_ref.rank_group import RankGroup
        >>> strategy_of(Placement(RankGroup((0, 1), rank=0), reshard_after_forward=False))
        'SHARD_GRAD_OP'
    """
    dropped = placement.reshard_after_forward
    if placement.replicate is None:
        return "FULL_SHARD" if dropped else "SHARD_GRAD_OP"
    if placement.shard.size == 1 and not dropped:
        return "NO_SHARD"
    return "HYBRID_SHARD" if dropped else "_HYBRID_SHARD_ZERO2"


# The questions


@dataclass(frozen=True)
class _Found:
    """A unit below the model that was asked about."""

    label: str  # its name in a timeline
    prefix: str  # its name from that model, with a dot at the end
    part: UnitModule

    @property
    def unit(self) -> Unit:
        """What the wrapper holds."""
        return self.part._unit


def _find_units(model: nn.Module) -> Iterator[_Found]:
    """Yield the units of a model, outer first; one that the model holds twice, twice."""
    labels: dict[nn.Module, str] = {}
    if isinstance(model, UnitModule):  # a timeline names units as its root sees them
        labels = {part: name for name, part in model._root()._named_units()}
    for name, part in model.named_modules(remove_duplicate=False):
        if isinstance(part, UnitModule):
            path = clean_name(name)
            label = labels.get(part, path) or "root"
            yield _Found(label, f"{path}." if path else "", part)


def explain(model: nn.Module) -> Explanation:
    """Say of each original parameter where it is, in which dtypes, and how large.

    Not collective: it is arithmetic and sends nothing. It needs no forward before.

    Args:
        model: The wrapped model, or a module that contains units.

    Returns:
        One place for each name of a parameter, unit by unit. Parameters that no unit holds,
        because they are ignored or outside, come last.

    Examples:
        >>> import torch.distributed as dist
        >>> from fsdp_ref import FullyShardedDataParallel, explain
        >>> dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, backend="gloo")
        >>> explained = explain(FullyShardedDataParallel(nn.Linear(2, 3)))
        >>> print(explained)
        parameter  shape   offset  elements on ranks  bytes here  whole
        root: FULL_SHARD over 0, float32
          weight   (3, 2)       0  0[0:6]                     24     24
          bias     (3,)         6  0[0:3]                     12     12
        >>> explained.named("bias").offset
        6
        >>> dist.destroy_process_group()
    """
    places: list[WeightPlace] = []
    first_names: dict[nn.Parameter, str] = {}
    taken: set[tuple[nn.Module, str]] = set()

    def add(parameter: nn.Parameter, place: WeightPlace) -> None:
        first = first_names.setdefault(parameter, place.name)
        places.append(place if first == place.name else replace(place, tied_to=first))

    for found in _find_units(model):
        for number, flat_param in enumerate(found.unit.flat_params):
            slots = zip(flat_param._layout.slots, flat_param._originals, strict=True)
            for slot, original in slots:
                place = _place(found, number, flat_param, slot)
                for module, attribute, name in original.places:
                    taken.add((module, attribute))
                    add(original.parameter, replace(place, name=found.prefix + name))
    for prefix, module in model.named_modules(remove_duplicate=False):
        for attribute, parameter in module._parameters.items():
            flat = parameter is None or isinstance(parameter, FlatParameter)
            if parameter is not None and not flat and (module, attribute) not in taken:
                name = clean_name(f"{prefix}.{attribute}" if prefix else attribute)
                add(parameter, _place_outside(name, parameter))
    return Explanation(places)


def _place(
    found: _Found, number: int, flat_param: FlatParameter, slot: ParameterSlot
) -> WeightPlace:
    placement, layout = found.unit.placement, flat_param._layout
    pieces = []
    for position, rank in enumerate(placement.shard.ranks):
        start, _, numel = layout.overlap(slot, position)
        if numel:
            pieces.append(Piece(rank, start, start + numel))
    numel_here = layout.overlap(slot, placement.shard.rank)[2]
    return WeightPlace(
        name=slot.name,
        shape=slot.shape,
        unit=found.label,
        flat_param=number,
        offset=slot.offset,
        pieces=tuple(pieces),
        ranks=placement.shard.ranks,
        copies=() if placement.replicate is None else placement.replicate.ranks,
        strategy=strategy_of(placement),
        dtypes=_dtypes(found.unit, flat_param),
        device=flat_param.device,
        bytes_at_rest=numel_here * flat_param.dtype.itemsize,
        bytes_unsharded=slot.numel * flat_param.compute_dtype.itemsize,
        padding_numel=layout.padding_numel,
    )


def _dtypes(unit: Unit, flat_param: FlatParameter) -> Dtypes:
    reduced = flat_param.gradient_dtype if flat_param.requires_grad else None
    buffers = unit.options.precision.buffer_dtype
    return Dtypes(flat_param.dtype, flat_param.compute_dtype, reduced, buffers)


def _place_outside(name: str, parameter: nn.Parameter) -> WeightPlace:
    return WeightPlace(
        name=name,
        shape=tuple(parameter.shape),
        unit=None,
        flat_param=None,
        offset=0,
        pieces=(),
        ranks=(),
        copies=(),
        strategy=None,
        dtypes=Dtypes(parameter.dtype, parameter.dtype, None),
        device=parameter.device,
        bytes_at_rest=parameter.nbytes,
        bytes_unsharded=parameter.nbytes,
        padding_numel=0,
    )


def unit_tree(model: nn.Module) -> UnitTree:
    """Say what wrapping has made of a model: which units there are, and what each holds.

    Not collective: it is arithmetic and sends nothing. It needs no forward before.

    Args:
        model: The wrapped model, or a module that contains units.

    Returns:
        The units, outer before inner.

    Examples:
        >>> import torch.distributed as dist
        >>> from fsdp_ref import FullyShardedDataParallel, ModuleWrapPolicy, unit_tree
        >>> dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, backend="gloo")
        >>> plain = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3))
        >>> policy = ModuleWrapPolicy({nn.Linear})
        >>> print(unit_tree(FullyShardedDataParallel(plain, auto_wrap_policy=policy)))
        unit  class       parameters  elements  padding  bytes here  whole
        root  Sequential           2         6        0          24     24  FULL_SHARD over 0
        └─ 0  Linear               2         9        0          36     36  FULL_SHARD over 0
        >>> dist.destroy_process_group()
    """
    places: dict[Unit, UnitPlace] = {}
    around: list[str] = []
    for found in _find_units(model):
        while around and not found.prefix.startswith(around[-1]):
            around.pop()
        places.setdefault(found.unit, _unit_place(found, depth=len(around)))  # its first place
        around.append(found.prefix)
    return UnitTree(places.values())


def _unit_place(found: _Found, depth: int) -> UnitPlace:
    unit, flat_params = found.unit, found.unit.flat_params
    layouts = [flat_param._layout for flat_param in flat_params]
    replicate = unit.placement.replicate
    return UnitPlace(
        name=found.label,
        depth=depth,
        module=type(found.part.module).__name__,
        parameters=tuple(slot.name for layout in layouts for slot in layout.slots),
        numel=sum(layout.total_numel for layout in layouts),
        padding_numel=sum(layout.padding_numel for layout in layouts),
        bytes_at_rest=sum(p.numel() * p.dtype.itemsize for p in flat_params),
        bytes_unsharded=sum(p._layout.padded_numel * p.compute_dtype.itemsize for p in flat_params),
        ranks=unit.placement.shard.ranks,
        copies=() if replicate is None else replicate.ranks,
        strategy=strategy_of(unit.placement),
    )
