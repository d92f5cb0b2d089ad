"""Notices optimizer steps: new shards make gathered weights stale, old parameters train nothing.

Both checks hang on torch's own hooks around every optimizer's step. They are needed because
fused optimizers write without touching a tensor's version counter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fsdp_ref.errors import OptimizerBeforeWrappingError, UnsynchronizedStepError
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
