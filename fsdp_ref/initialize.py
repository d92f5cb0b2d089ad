"""With which weights training starts: the same on every rank, and set exactly once.

Sharding cuts weights that every rank has in full, if only for a moment and one unit at a time.
The shards fit together if all ranks cut the same weights. Nothing in a later step would show that
they did not: a patchwork of different draws has the size and the spread of a good weight.

Four ways lead to equal weights:

- *One seed.* Call `torch.manual_seed` with the same number on every rank before the model is
  built, and build the same model.
- *One rank sends.* With `sync_module_states=True` every unit takes its values from the first of
  its ranks. The others may hold anything, or nothing.
- *One file.* Load a full state dict on every rank after wrapping.
- *One name, one draw.* [seeded][fsdp_ref.initialize.seeded] draws weights by their module's name,
  so that they do not depend on what was built before, or how it was wrapped.

# Models too large to build: the meta device

Build the model under `torch.device("meta")`. It has shapes and no memory. The constructor gives
each unit memory and values right before it cuts it, so no rank ever holds more than one whole
unit and its own shards.

By default each module that holds something on meta is given memory, and its own
`reset_parameters()` sets the values. It has to set all of them: what it leaves out is refused by
name, because memory that nobody has written holds whatever was there before. A module without that
method is refused too. Give `param_init_fn` then, a function of one module, which is called with
each module of the unit, from the outside to the inside, and sets what the module holds *itself*:

    def init(module):
        module.to_empty(device="cpu", recurse=False)
        ...

What has values already keeps them, and parameters that were tied on meta stay tied: the first
module that holds one sets it. Values go to `device_id`, or else to the accelerator, or to the CPU
where there is none. Materialised modules draw from the random state of the process, and move it
on: two layers of one shape start with different numbers, offloaded or not. So give all ranks one
seed here, too. The deferred tensors of torchdistX, which torch's class also takes, are not known
here.

Tip: Build a model on meta if it does not fit into memory
    Wrapping gives one unit after the other its values and cuts it at once. What a rank holds is
    its shards and one whole unit, never the whole model.

    Proof: initialisation/deferred_from_meta

# One rank holds the weights

Usually one rank has read a checkpoint. With `sync_module_states=True` the others need neither read
it nor initialise anything: they may be on meta. Each unit's parameters and buffers are sent when
the unit is constructed, before it is cut. This is the only case in which a constructor
communicates, so all ranks must construct the same units in the same order. Names, shapes and
dtypes are compared first: a rank that differs causes an error on all, and no rank waits.

Where a unit has copies, the first copy is sent to the others. A unit with a process group of its
own takes the values of the first rank of that group.

Tip: Read the checkpoint on one rank, and let the others wait on meta
    With `sync_module_states=True` the first rank's values reach every shard, and the other ranks
    never hold more than one whole unit.

    Proof: initialisation/broadcast_from_rank_0

# What is compared, and when

While a rank has whole weights it takes a fingerprint of each parameter. Before the first forward
the ranks of each unit, and its copies, compare them. If they differ, every rank raises
[InitialWeightsDifferError][fsdp_ref.errors.InitialWeightsDifferError], with the unit, the
parameter and the ranks. Torch's classes do not look.

Until the first forward there is time to give whole values in another way: by `load_state_dict` on
all ranks, inside `summon_full_params`, or with `apply`. What was replaced so is not compared any
more. If one rank alone has loaded something, that is an error.

Buffers are not compared. They are never cut, and a rank may have its own; only
`sync_module_states` makes them equal.

# Writing to shards

After wrapping, a loop over `model.parameters()` sees shards. Each rank fills its own, and with one
seed all ranks fill them with the same numbers: the weight is one block repeated, of low rank.
[A run shows it][initialise-after-sharding]. Before the first forward such shards raise
[IdenticalShardsError][fsdp_ref.errors.IdenticalShardsError]. Shards of constants, shards of a few
elements, and equal layers that were cut into equal shards are left alone.

# Seeds for weights, seeds for dropout

Weights want the same seed on every rank. Dropout wants another one on each, or all ranks drop the
same units of their different samples. So seed twice: once before building, once, with the rank
added, after wrapping. With [seeded][fsdp_ref.initialize.seeded] once is enough: it leaves the
random state of the process alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fsdp_ref import agreement
from fsdp_ref.collectives import broadcast, explained, travel_device
from fsdp_ref.deferred import (
    DeferredUnit,
    InitFunction,
    default_device,
    fill,
    is_deferred,
    tensors_of,
)
from fsdp_ref.errors import NoValuesError, RankDisagreementError
from fsdp_ref.originals import NOTHING_IGNORED, Ignored
from fsdp_ref.rank_group import Placement
from fsdp_ref.recording import record
from fsdp_ref.states import Phase


def materialize(
    module: nn.Module,
    param_init_fn: InitFunction | None = None,
    device: torch.device | None = None,
    *,
    where: str,
    ignored: Ignored = NOTHING_IGNORED,
) -> list[str]:
    """Give values to everything on meta in the modules of one unit. Local.

    What has values keeps them. Tensors that were tied on meta stay tied.

    Args:
        module: The module that becomes a unit.
        param_init_fn: Initialises one module; `None` to call `reset_parameters`.
        device: Where the values go; by default the current accelerator, or the CPU.
        where: The unit, for messages.
        ignored: What to leave alone.

    Returns:
        The names of what was on meta.

    Raises:
        OptionError: If `param_init_fn` cannot be called.
        NoValuesError: If a module has no `reset_parameters`, or if something was left without
            values.
    """
    unit = DeferredUnit(module, where, ignored)
    unit.materialize(param_init_fn, device or default_device())
    return unit.names()


def refuse_deferred(
    module: nn.Module,
    param_init_fn: InitFunction | None,
    *,
    where: str,
    ignored: Ignored = NOTHING_IGNORED,
) -> None:
    """Raise if something on meta could not be given values; called before anything changes. Local.

    Args:
        module: The module that is to be wrapped.
        param_init_fn: Initialises one module; `None` to call `reset_parameters`.
        where: Who asks, for messages.
        ignored: What to leave alone.

    Raises:
        OptionError: If `param_init_fn` cannot be called.
        NoValuesError: If a module has no `reset_parameters` and no function is given.
    """
    unit = DeferredUnit(module, where, ignored)
    unit.refuse(param_init_fn, unit.names())


def broadcast_initial(
    module: nn.Module,
    placement: Placement,
    param_init_fn: InitFunction | None = None,
    device: torch.device | None = None,
    *,
    name: str,
    ignored: Ignored = NOTHING_IGNORED,
) -> None:
    """Give the modules of one unit the values that the first of its ranks has.

    Collective: all ranks of the unit call it, for the same units in the same order. It costs
    one exchange of texts and one broadcast of the unit for each of its groups.

    Where the first rank has values, other ranks may be on meta: they get memory, and no
    function initialises them. What the first rank has on meta is initialised on every rank that
    has it there.

    Args:
        module: The module that becomes a unit.
        placement: Its ranks; their groups need not be live.
        param_init_fn: Initialises one module; `None` to call `reset_parameters`.
        device: Where the values go; by default they stay where they are.
        name: The unit's name.
        ignored: What to leave alone.

    Raises:
        RankDisagreementError: On every rank of a group, if names, shapes or dtypes differ.
        SilentRanksError: If a rank does not take part.
        OptionError: If `param_init_fn` cannot be called.
        NoValuesError: If something stays without values.
    """
    unit = DeferredUnit(module, f"unit '{name}'", ignored)
    target = device or default_device()
    unset = _agree(unit, placement, device, target)
    unit.materialize(param_init_fn, target, only=unset)
    tensors = [tensor for _, tensor in _everything(unit)]
    # The first rank of each copy gets everything from the first copy, and hands it on.
    copies = placement.replicate
    ways = [copies] if copies is not None and placement.shard.rank == 0 else []
    for group in (*ways, placement.shard):
        with explained(f"{unit.where}, broadcast of initial values", [group]):
            sent = broadcast(tensors, group, device)
        idle, sent_as = Phase.IDLE.value, torch.uint8
        record(name, idle, "broadcast", bytes_on_wire=sent, group=group.ranks, dtype=sent_as)


def _everything(unit: DeferredUnit) -> list[tuple[str, Tensor]]:
    """Return each parameter and buffer of the unit once, under its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for part, prefix in unit.parts.items():
        for attribute, tensor in tensors_of(part, unit.ignored):
            found.setdefault(id(tensor), (prefix + attribute, tensor))
    return list(found.values())


def _agree(
    unit: DeferredUnit, placement: Placement, device: torch.device | None, target: torch.device
) -> list[str]:
    """Compare what is about to be sent; return what the very first rank has no values for."""
    live = [group.process_group is not None for group in placement.groups]
    lines = [f"{unit.where} over {placement.shard.size} ranks in {placement.copies} copies, {live}"]
    for name, tensor in _everything(unit):
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        sent_from = target if is_deferred(tensor) else travel_device(tensor, device)
        lines.append(f"{kind} '{name}' {tuple(tensor.shape)} {tensor.dtype} on {sent_from.type}")
    text, ranks = "\n".join(lines), [group.ranks for group in placement.groups]
    mine = [hashlib.sha256(text.encode()).hexdigest(), unit.names(), ranks[-1][0]]
    heard = agreement.exchange_through("sync_module_states", json.dumps(mine), ranks)
    said = {rank: json.loads(one) for rank, one in heard.items()}
    if len({digest for digest, _, _ in said.values()}) > 1:
        texts = agreement.exchange_through("sync_module_states/text", text, ranks)
        raise RankDisagreementError.at(
            f"{unit.where}, sync_module_states",
            expected="the same parameters and buffers on all of its ranks",
            found=agreement.describe_differences(texts),
            fix="Build the same model on every rank; only its values may differ.",
        )
    _, _, source = said[placement.shard.ranks[0]]  # from which this rank's copy gets everything
    unset: list[str] = said[source][1]
    return unset


def seeded(
    model: nn.Module,
    seed: int = 0,
    init_fns: Mapping[type[nn.Module], InitFunction] | None = None,
    device: torch.device | str = "cpu",
) -> InitFunction:
    """Return a `param_init_fn` whose weights depend on a seed and on names, and on nothing else.

    Call it on the whole model, on meta, before anything is wrapped: only there has every
    module the name that it always has. Each module draws from a generator seeded by `seed` and
    its name. So the full weights are the same bits for every number of ranks, every wrapping and
    every order of construction, and each rank still holds no more than one whole unit.

    Local. The random state of the process is left as it was.

    Args:
        model: The unwrapped model on meta.
        seed: Any integer.
        init_fns: Functions that initialise modules of a class, or of its subclasses: for
            classes without `reset_parameters`, or to initialise differently. A function is given
            the module, with memory for what it holds itself, and sets all of that.
        device: Where values are drawn. The CPU gives the same bits on every machine; give
            `device_id` to the constructor to let the units live elsewhere.

    Returns:
        The function to hand to the constructor, and to its policy, as `param_init_fn`.

    Raises:
        NoValuesError: If a module on meta has no `reset_parameters` and no function is given
            for its class, naming all such modules.

    Examples:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
        >>> _ = materialize(model, seeded(model, seed=1), where="the example")
        >>> first = model[0].weight.clone()
        >>> model[0].to("meta").weight.is_meta
        True
        >>> _ = materialize(model[0], seeded(model, seed=1), where="the example")
        >>> torch.equal(model[0].weight, first)
        True
    """
    functions = dict(init_fns or {})
    names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
    unknown = []
    for name, part in model.named_modules():
        names[part] = name
        if _holds_meta(part) and _init_function(part, functions) is None:
            unknown.append(f"'{name}' ({type(part).__name__})" if name else type(part).__name__)
    if unknown:
        raise NoValuesError.at(
            "initialize.seeded",
            expected="a reset_parameters() or a function in init_fns for every module on meta",
            found=f"neither for {', '.join(unknown)}",
            fix="Give init_fns={TheClass: function}; the function sets what the module holds.",
        )
    return partial(_initialize_seeded, names, functions, seed, torch.device(device))


def _initialize_seeded(
    names: Mapping[nn.Module, str],
    functions: Mapping[type[nn.Module], InitFunction],
    seed: int,
    device: torch.device,
    module: nn.Module,
) -> None:
    """Initialise what one module holds on meta, as its name and the seed say."""
    if not _holds_meta(module):
        return
    function = _init_function(module, functions)
    if module not in names or function is None:
        raise NoValuesError.at(
            f"a module of class {type(module).__name__}",
            expected="a module of the model that initialize.seeded was given",
            found="another one",
            fix="Call seeded on the whole model, on meta, right before wrapping it.",
        )
    name = names[module]
    with _own_random_state(f"{seed}/{name}", device):
        fill(module, partial(function, module), device, f"module '{name or type(module).__name__}'")


def _holds_meta(module: nn.Module) -> bool:
    return any(is_deferred(tensor) for _, tensor in tensors_of(module))


def _init_function(
    module: nn.Module, functions: Mapping[type[nn.Module], InitFunction]
) -> InitFunction | None:
    for cls in type(module).__mro__:
        if cls in functions:
            return functions[cls]
    reset: Callable[[Any], Any] | None = getattr(type(module), "reset_parameters", None)
    return reset


@contextmanager
def _own_random_state(text: str, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of ``device`` by a text, and restore them at the end."""
    derived = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
    if device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derived)
            yield
        return
    backend: Any = torch.get_device_module(device)
    index = backend.current_device() if device.index is None else device.index
    with torch.random.fork_rng(devices=[index], device_type=device.type), backend.device(index):
        torch.default_generator.manual_seed(derived)
        backend.manual_seed(derived)
        yield
