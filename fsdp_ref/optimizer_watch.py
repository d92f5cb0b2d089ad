"""Notices optimizer steps: new shards make gathered weights stale, old parameters train nothing.

Both checks hang on torch's own hooks around every optimizer's step. They are needed because
fused optimizers write without touching a tensor's version counter.

An optimizer's state is looked at when it first steps, and again after a load. With
`use_orig_params` it may have made steps before the model was wrapped, or have loaded the state of
a plain one: then it has state of whole weights, on every rank, of which each rank keeps its own
piece. From then on its `state_dict()` says that it is about this rank alone.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_ref.errors import (
    LocalOptimizerStateWarning,
    OptimizerBeforeWrappingError,
    OptimizerStateError,
    UnsynchronizedStepError,
)
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.leaves import shown_by
from fsdp_ref.originals import unit_that_owns
from fsdp_ref.states import Phase
from fsdp_ref.unit import Schedule, Unit


@cache
def watch_optimizers() -> None:
    """Register the two hooks, once per process."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _parameters(optimizer: Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _flat_params(optimizer: Optimizer) -> list[FlatParameter]:
    """Return the flat parameters that an optimizer holds, or holds pieces of, each once."""
    held = (p if isinstance(p, FlatParameter) else shown_by(p) for p in _parameters(optimizer))
    return list({id(p): p for p in held if p is not None}.values())


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse to step an optimizer whose parameters have become views of sharded memory."""
    flat_params = _flat_params(optimizer)
    refuse_unreduced(flat_params, f"{type(optimizer).__name__}.step()")
    for flat_param in flat_params:
        if flat_param._options.use_orig_params:  # its pieces are to be updated, not the whole
            _reshard_if_idle(flat_param)
    owned = [p for p in _parameters(optimizer) if shown_by(p) is None]
    lost = [name for p in owned if (name := unit_that_owns(p)) is not None]
    if lost:
        raise OptimizerBeforeWrappingError.at(
            f"{type(optimizer).__name__}.step()",
            expected="an optimizer built from the parameters of the wrapped model",
            found=f"{len(lost)} parameters from before wrapping, such as '{lost[0]}'",
            fix="Wrap first, then build the optimizer from model.parameters().",
        )
    if flat_params and optimizer not in _looked_at:
        _looked_at.add(optimizer)
        _keep_own_pieces(optimizer)
        _watch_state_dict(optimizer)


def refuse_unreduced(flat_params: Sequence[FlatParameter], where: str) -> None:
    """Raise if a gradient is not reduced yet.

    Args:
        flat_params: The flat parameters that are about to be clipped or updated.
        where: What is about to happen, for the message.

    Raises:
        UnsynchronizedStepError: If one got a gradient inside `no_sync` only.
    """
    for flat_param in flat_params:
        if flat_param.has_gradient:
            unit: Unit | None = flat_param._unit()
            raise UnsynchronizedStepError.at(
                where,
                expected="gradients that are reduced over the ranks",
                found=f"gradients from inside no_sync() only, in {unit.where if unit else '?'}",
                fix="Run the last backward before it outside of no_sync().",
            )


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Drop gathered weights of every unit that the optimizer may have changed."""
    schedules: dict[Schedule, None] = {}  # a model has one, however many units it has
    for flat_param in _flat_params(optimizer):
        flat_param._updates += 1
        unit = _reshard_if_idle(flat_param)
        if unit is not None and unit.schedule is not None:
            schedules[unit.schedule] = None
    for schedule in schedules:
        schedule.weights_changed()


def _reshard_if_idle(flat_param: FlatParameter) -> Unit | None:
    """Drop the full parameters of a flat parameter's unit; return the unit if it was idle."""
    unit: Unit | None = flat_param._unit()
    if unit is None or unit.phase is not Phase.IDLE:
        return None
    unit.reshard()
    return unit


# State

_looked_at: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # since they last loaded anything
_watched: weakref.WeakSet[Optimizer] = weakref.WeakSet()
speaking_for_all: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers whose state dict has the state of all ranks, as `DTensor`s."""
_warned: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_understood: ContextVar[bool] = ContextVar("fsdp_ref_local_state_understood", default=False)


@contextmanager
def local_state_understood() -> Iterator[None]:
    """Let `state_dict()` of optimizers return what this rank has without a word.

    Yields:
        Nothing.
    """
    token = _understood.set(True)
    try:
        yield
    finally:
        _understood.reset(token)


def is_understood() -> bool:
    """Return whether somebody asks for this rank's state who knows what it is."""
    return _understood.get()


def _keep_own_pieces(optimizer: Optimizer) -> None:
    """Cut state of whole weights to this rank's pieces."""
    for parameter in _parameters(optimizer):
        flat_param = parameter if isinstance(parameter, FlatParameter) else shown_by(parameter)
        state = optimizer.state.get(parameter) if flat_param is not None else None
        if state:
            index = None if parameter is flat_param else position(parameter, flat_param)
            state.update(own_pieces(state, flat_param, index))


def position(leaf: Tensor, flat_param: FlatParameter) -> int:
    """Return at which place in a flat parameter an original one lies."""
    originals = enumerate(flat_param._originals)
    return next(index for index, original in originals if original.parameter is leaf)


def own_pieces(
    state: dict[str, Any], flat_param: FlatParameter, index: int | None
) -> dict[str, Any]:
    """Return the state of one parameter with tensors of this rank's piece only. Local.

    Args:
        state: By name. Tensors have the shape of the piece, of the whole weight, or none.
        flat_param: The flat parameter.
        index: Which of its parameters the state is about; `None` for all of it.

    Returns:
        The same values; those of a whole weight are cut.

    Raises:
        OptimizerStateError: If a tensor has another shape.
    """
    shard, layout = flat_param.data, flat_param._layout
    slot = layout.slots[index or 0]
    numel = (shard if index is None else flat_param._leaves.piece(shard, index)).numel()
    own = dict(state)
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape == (numel,):
            continue
        if index is None or tuple(value.shape) != slot.shape:
            raise OptimizerStateError.at(
                f"optimizer state of '{slot.name}'",
                expected=f"one element per element of this rank's shard, ({numel},), or a scalar",
                found=f"'{name}' of shape {tuple(value.shape)}",
                fix="Load whole state through optim_state_dict_to_load(). State that describes a "
                "weight as a whole, such as a factor of its moments, cannot be kept in shards.",
            )
        inner, _, _ = layout.overlap(slot, flat_param._group.rank)
        own[name] = value.reshape(-1)[inner : inner + numel].clone()
    return own


def _watch_state_dict(optimizer: Optimizer) -> None:
    if optimizer not in _watched:
        _watched.add(optimizer)
        optimizer.register_state_dict_post_hook(_say_it_is_local)
        optimizer.register_load_state_dict_post_hook(_looked_at.discard)


def _say_it_is_local(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Refuse to let torch's checkpoints have this rank's state; warn anybody else once.

    `torch.distributed.checkpoint` takes a plain tensor for one that all ranks have alike, and
    keeps one rank's.
    """
    cut = any(flat_param._is_sharded for flat_param in _flat_params(optimizer))
    if (
        is_understood()
        or optimizer in speaking_for_all
        or not cut
        or not any(state_dict["state"].values())
    ):
        return
    where = f"{type(optimizer).__name__}.state_dict()"
    found = "this rank's shards only, by number"
    if _asked_by("torch.distributed.checkpoint"):
        raise OptimizerStateError.at(
            where,
            expected="state that torch.distributed.checkpoint can tell apart by rank",
            found=found,
            fix="Call fsdp_ref.checkpoint.attach(model, optimizer) first, which needs "
            "use_orig_params=True, or fsdp_ref.checkpoint.get_optimizer_state_dict().",
        )
    if optimizer not in _warned:
        _warned.add(optimizer)
        warnings.warn(
            LocalOptimizerStateWarning.at(
                where,
                expected="a call of FullyShardedDataParallel.optim_state_dict(model, optimizer)",
                found=found,
                fix="It loads on this rank, of as many, into the same units, and nowhere else.",
            ),
            stacklevel=3,
        )


def _asked_by(package: str) -> bool:
    frame = sys._getframe(1)
    while (outer := frame.f_back) is not None:
        frame = outer
        if str(frame.f_globals.get("__name__", "")).startswith(package):
            return True
    return False
