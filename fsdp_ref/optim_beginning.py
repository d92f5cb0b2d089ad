"""The state that an optimizer's first step would begin with, for weights that have none yet.

`torch.distributed.checkpoint` loads what the dict it is given asks for, and nothing else. A weight
without state in that dict would lose what the file has for it, and nobody would notice; one
without state in the file could not be loaded at all. So the dict for a file says zeros for weights
that never had a gradient: a step from there is a first step. Only SGD with `dampening` tells the
two apart: it takes the first gradient of all whole, and from zeros the dampened part.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp_ref.optim_keys import Entry
from fsdp_ref.optimizer_watch import local_state_understood

State = dict[nn.Parameter, dict[str, Any]]


def beginning_of(optimizer: Optimizer, entries: Iterable[Entry]) -> dict[str, Any]:
    """Return the state dict of an optimizer that has only just begun with some parameters. Local.

    Args:
        optimizer: The optimizer, which stays as it is.
        entries: Those of its parameters.

    Returns:
        Its own groups, and zeros as state; none if it cannot step without a closure, or where it
        keeps nothing.
    """
    wanted = {entry.parameter: entry.key for entry in entries}
    with local_state_understood():
        groups = optimizer.state_dict()["param_groups"]
    begun = _begun(optimizer, list(wanted)) if wanted else {}
    state = {wanted[parameter]: values for parameter, values in begun.items() if values}
    return {"state": state, "param_groups": groups}


def _begun(optimizer: Optimizer, parameters: list[nn.Parameter]) -> State:
    """Let a stand-in take a step without a gradient, for weights of zero."""
    stand_ins = {parameter: _zeros(parameter) for parameter in parameters}
    beginner: Any = object.__new__(type(optimizer))
    beginner.__dict__.update(optimizer.__dict__)
    beginner.state = defaultdict(dict)
    for hooks in [name for name in beginner.__dict__ if name.endswith("_hooks")]:
        setattr(beginner, hooks, OrderedDict())
    groups = [
        {**group, "params": [stand_ins[p] for p in group["params"] if p in stand_ins]}
        for group in optimizer.param_groups
    ]
    beginner.param_groups = [group for group in groups if group["params"]]
    try:
        type(optimizer).step(beginner)  # a scheduler may have put another one on the object
    except TypeError:  # it wants a closure
        return {}
    for values in beginner.state.values():
        if "step" in values:
            values["step"] = values["step"] * 0
    return {p: beginner.state[one] for p, one in stand_ins.items() if one in beginner.state}


def _zeros(parameter: nn.Parameter) -> nn.Parameter:
    zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    stand_in = nn.Parameter(zeros, requires_grad=parameter.requires_grad)
    stand_in.grad = torch.zeros_like(stand_in) if parameter.requires_grad else None
    return stand_in
