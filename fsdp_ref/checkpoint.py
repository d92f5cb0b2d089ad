"""State of a model and its optimizers, out and in, under torch's names.

Torch's helpers of the same names, in `torch.distributed.checkpoint.state_dict`, ask whether a
module is of torch's own class. The functions here know the units of this package, in every mode:
flat or with original parameters, copied, hybrid, in small groups. They take torch's
`StateDictOptions`. A model without units is handed to torch's helpers.

By default both dicts have the sharded form, which `torch.distributed.checkpoint` saves and loads at
any number of ranks:

    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)

To resume, ask for both once more, let `dcp.load` fill them, and hand them to `set_state_dict`.
`full_state_dict=True` asks for whole tensors; with `cpu_offload=True` too, they are on the first
rank only, and other ranks get an empty dict. `broadcast_from_rank0=True` is the way back: the first
rank alone has whole tensors, and sends them one at a time.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from torch.optim import Optimizer

from fsdp_ref.errors import StateDictTypeError
from fsdp_ref.fully_sharded import FullyShardedDataParallel
from fsdp_ref.optim_beginning import beginning_of
from fsdp_ref.optim_keys import Names, entries_of, groups_of
from fsdp_ref.optim_state import attach
from fsdp_ref.sent_values import SentValue, fetched, sent_by_first
from fsdp_ref.state_dict import clean_name

if TYPE_CHECKING:  # it takes long to import, and whoever has one has imported it
    from torch.distributed.checkpoint.state_dict import StateDictOptions

__all__ = [
    "attach",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]

_TORCHS = "torch.distributed.checkpoint.state_dict"
Optimizers = Optimizer | Iterable[Optimizer]
"""One optimizer, or several, each of other parameters of the model."""


def __getattr__(name: str) -> Any:
    """Return torch's `StateDictOptions`, so that changing the package in an import is enough."""
    if name == "StateDictOptions":
        return getattr(importlib.import_module(_TORCHS), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Out


def get_model_state_dict(
    model: nn.Module, *, options: StateDictOptions | None = None, replicas: str = "refuse"
) -> dict[str, Any]:
    """Return the weights and buffers of a model. Collective.

    Args:
        model: The model; a unit, or any module with units inside.
        options: Torch's options: `full_state_dict`, `cpu_offload`, `ignore_frozen_params`.
        replicas: For whole tensors, what to do about weights that exist in several versions; see
            [fsdp_ref.state_dict_types][].

    Returns:
        The dict, by default with `DTensor`s, in memory of its own.

    Raises:
        ReplicasDifferError: For whole tensors, if groups hold different versions of a weight.
        SilentRanksError: If a rank does not take part within the time limit.
    """
    if not _units(model):
        return cast(dict[str, Any], _torchs("get_model_state_dict")(model, options=options))
    options = _checked(options)
    with _form(model, options, replicas=replicas):
        state: dict[str, Any] = model.state_dict()
    if options.ignore_frozen_params:
        frozen = _frozen(model)
        return {k: v for k, v in state.items() if re.sub(r"@rank\d+$", "", k) not in frozen}
    return state


def get_optimizer_state_dict(
    model: nn.Module, optimizers: Optimizers, *, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the state of a model's optimizers, by the names of weights. Collective.

    Args:
        model: The model.
        optimizers: One optimizer or several, each of other parameters of the model.
        options: Torch's options: `full_state_dict`, `cpu_offload`,
            `flatten_optimizer_state_dict`.

    Returns:
        `"state"` and `"param_groups"` of all optimizers, one after the other; flattened, one level
        of names such as `"state.head.weight.exp_avg"`. In the sharded form a weight that never had
        a gradient has the state that its first step would begin with, so that `dcp.load` finds and
        fills all there is; so has every weight in both forms if the optimizer never stepped.

    Raises:
        OptimizerStateError: If state cannot be told by name; see
            [optim_state_dict][fsdp_ref.FullyShardedDataParallel.optim_state_dict].
        SilentRanksError: If a rank does not take part within the time limit.
    """
    if not _units(model):
        theirs = _torchs("get_optimizer_state_dict")
        return cast(dict[str, Any], theirs(model, optimizers, options=options))
    options = _checked(options)
    state: dict[str, Any] = {}
    groups: list[Any] = []
    with _form(model, options):
        for optimizer in _listed(optimizers):
            one = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            mine = one.get("state", {})
            if not (options.full_state_dict and optimizer.state):
                mine = _with_beginning(model, optimizer, mine)
            state |= mine
            groups += one.get("param_groups", [])
    if options.flatten_optimizer_state_dict:
        return _flattened(state, groups)
    return {"state": state, "param_groups": groups} if groups else {}


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    options: StateDictOptions | None = None,
    replicas: str = "refuse",
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state of a model, and that of its optimizers. Collective.

    Args:
        model: The model.
        optimizers: One optimizer or several.
        options: Torch's options, such as `full_state_dict` and `cpu_offload`.
        replicas: As for `get_model_state_dict`.

    Returns:
        What `get_model_state_dict` and `get_optimizer_state_dict` return.

    Raises:
        ReplicasDifferError: For whole tensors, if groups hold different versions of a weight.
        OptimizerStateError: If state cannot be told by name.
        SilentRanksError: If a rank does not take part within the time limit.
    """
    optimizers = _listed(optimizers)
    return (
        get_model_state_dict(model, options=options, replicas=replicas),
        get_optimizer_state_dict(model, optimizers, options=options),
    )


# In


def set_model_state_dict(
    model: nn.Module,
    model_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> Any:
    """Load the weights and buffers of a model, all of them or nothing. Collective.

    Args:
        model: The model.
        model_state_dict: Whole tensors or `DTensor`s, whatever `full_state_dict` says. With
            `broadcast_from_rank0` only the first rank's is looked at.
        options: Torch's options: `strict`, `broadcast_from_rank0`.

    Returns:
        The missing and the unexpected keys.

    Raises:
        LoadError: If it does not fit, as for `load_state_dict`; an empty dict does not either.
        StateDictTypeError: If `broadcast_from_rank0` comes without `full_state_dict`.
        SilentRanksError: If a rank does not take part within the time limit.
    """
    units = _units(model)
    if not units:
        return _torchs("set_model_state_dict")(model, model_state_dict, options=options)
    options = _checked(options)
    found: Any = model_state_dict
    if options.broadcast_from_rank0:
        for part in units:
            part._set_up()
        found = sent_by_first(found, units[0]._unit.placement.groups)
        outermost = [
            clean_name(f"{name}." if name else "")
            for name, part in model.named_modules()
            if part in units and part.check_is_root()
        ]
        for key in found:  # what torch loads by itself, around the units
            if isinstance(found[key], SentValue) and not key.startswith(tuple(outermost)):
                found[key] = fetched(found[key])
    with FullyShardedDataParallel.state_dict_type(model, "full"):
        return model.load_state_dict(found, strict=options.strict)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load the state of a model's optimizers. Collective.

    Args:
        model: The model.
        optimizers: One optimizer or several, as for `get_optimizer_state_dict`.
        optim_state_dict: State by name, of whole tensors or `DTensor`s, flattened or not. With
            `broadcast_from_rank0` only the first rank's is looked at.
        options: Torch's options: `broadcast_from_rank0`, `flatten_optimizer_state_dict`.

    Raises:
        OptimizerStateError: If it does not fit; nothing is loaded into that optimizer then.
        StateDictTypeError: If `broadcast_from_rank0` comes without `full_state_dict`.
        SilentRanksError: If a rank does not take part within the time limit.
    """
    if not _units(model):
        _torchs("set_optimizer_state_dict")(model, optimizers, optim_state_dict, options=options)
        return
    options = _checked(options)
    several = _listed(optimizers)
    with _form(model, options, sent=options.broadcast_from_rank0):
        for optimizer in several:
            mine: Any = optim_state_dict
            if options.flatten_optimizer_state_dict:
                mine = _unflattened(mine, _names_by_group(model, optimizer), optimizer)
            elif len(several) > 1:
                mine = _part_of(mine, _names_by_group(model, optimizer))
            FullyShardedDataParallel.optim_state_dict_to_load(
                model, optimizer, mine, load_directly=True
            )


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Load the state of a model, then that of its optimizers. Collective.

    Args:
        model: The model.
        optimizers: One optimizer or several.
        model_state_dict: As for `set_model_state_dict`.
        optim_state_dict: As for `set_optimizer_state_dict`.
        options: Torch's options: `strict`, `broadcast_from_rank0`.

    Returns:
        The missing and the unexpected keys of the model.

    Raises:
        LoadError: If the model's state does not fit.
        OptimizerStateError: If that of an optimizer does not; the model is loaded by then.
        StateDictTypeError: If `broadcast_from_rank0` comes without `full_state_dict`.
        SilentRanksError: If a rank does not take part within the time limit.
    """
    optimizers = _listed(optimizers)
    keys = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, optimizers, optim_state_dict, options=options)
    return keys


# What the options mean


def _torchs(name: str) -> Any:
    return getattr(importlib.import_module(_TORCHS), name)


def _units(model: nn.Module) -> list[FullyShardedDataParallel]:
    return [part for part in model.modules() if isinstance(part, FullyShardedDataParallel)]


def _listed(optimizers: Optimizers) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def _checked(options: StateDictOptions | None) -> StateDictOptions:
    checked: StateDictOptions = _torchs("StateDictOptions")() if options is None else options
    if checked.broadcast_from_rank0 and not checked.full_state_dict:
        raise StateDictTypeError.at(
            "StateDictOptions",
            expected="full_state_dict=True with broadcast_from_rank0=True",
            found="full_state_dict=False",
            fix="The first rank can send whole tensors only: set both.",
        )
    return checked


def _form(
    model: nn.Module, options: StateDictOptions, *, replicas: str = "refuse", sent: bool = False
) -> AbstractContextManager[None]:
    """Set the form that options ask for; `sent` if the first rank alone brings what is loaded."""
    config: dict[str, Any] = {"offload_to_cpu": options.cpu_offload}
    if not options.full_state_dict:
        return FullyShardedDataParallel.state_dict_type(model, "sharded", config, config)
    config["rank0_only"] = options.cpu_offload
    optim_config = {**config, "rank0_only": options.cpu_offload or sent}
    return FullyShardedDataParallel.state_dict_type(
        model, "full", config, optim_config, replicas=replicas
    )


def _with_beginning(
    model: nn.Module, optimizer: Optimizer, state: dict[str, Any]
) -> dict[str, Any]:
    """Return state by name in which no weight lacks any that could have some. Collective.

    Args:
        model: The model.
        optimizer: Its optimizer.
        state: What it has by now.
    """
    entries = entries_of(groups_of(model, optimizer), Names(model))
    lacking = [entry for entry in entries if not state.get(entry.names[0])]
    own = beginning_of(optimizer, lacking)
    begun = FullyShardedDataParallel.optim_state_dict(model, optimizer, own).get("state", {})
    merged = {**begun, **{name: values for name, values in state.items() if values}}
    ordered = [name for entry in entries for name in entry.names if name in merged]
    return {name: merged.pop(name) for name in ordered} | merged


def _frozen(model: nn.Module) -> set[str]:
    """Return the plain names of parameters that are not trained."""
    frozen = {clean_name(name) for name, p in model.named_parameters() if not p.requires_grad}
    for path, part in model.named_modules():
        if isinstance(part, FullyShardedDataParallel):
            prefix = clean_name(f"{path}." if path else "")
            for flat_param in part._unit.flat_params:
                flat_param.follow_requires_grad()
                for original in flat_param._originals:
                    if not original.parameter.requires_grad:
                        frozen |= {prefix + name for _, _, name in original.places}
    return frozen


# Several optimizers, and flattened state


def _names_by_group(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Return the names of the weights in each of an optimizer's groups."""
    groups = groups_of(model, optimizer)
    names: list[list[str]] = [[] for _ in groups]
    for entry in entries_of(groups, Names(model)):
        names[entry.group] += entry.names
    return names


def _part_of(optim_state_dict: Mapping[str, Any], names: list[list[str]]) -> dict[str, Any]:
    wanted = {name for group in names for name in group}
    state = {k: v for k, v in optim_state_dict.get("state", {}).items() if k in wanted}
    groups = [g for g in optim_state_dict.get("param_groups", ()) if wanted & set(g["params"])]
    return {"state": state, "param_groups": groups}


def _flattened(state: Mapping[str, Any], groups: list[Any]) -> dict[str, Any]:
    flat = {f"state.{name}.{k}": v for name, values in state.items() for k, v in values.items()}
    for group in groups:
        for name in group["params"]:
            settings = {k: v for k, v in group.items() if k not in ("params", "param_names")}
            flat |= {f"param_groups.{name}.{k}": v for k, v in settings.items()}
    return flat


def _unflattened(
    flat: Mapping[str, Any], names: list[list[str]], optimizer: Optimizer
) -> dict[str, Any]:
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for inside, own in zip(names, optimizer.param_groups, strict=True):
        for name in inside:
            start = f"state.{name}."
            keys = [k for k in flat if k.startswith(start) and "." not in k.removeprefix(start)]
            if keys:
                state[name] = {key.removeprefix(start): flat[key] for key in keys}
        settings = {
            k: flat[f"param_groups.{inside[0]}.{k}"]
            for k in own
            if inside and f"param_groups.{inside[0]}.{k}" in flat
        }
        groups.append({**settings, "params": inside})
    return {"state": state, "param_groups": groups}
