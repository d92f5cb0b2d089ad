"""Activation checkpointing by mark: a forward that is run again in the backward.

A forward keeps what its backward will need. A marked module keeps its inputs only, and its forward
runs a second time when the backward arrives. The results are the same, also with dropout: the
state of the random numbers is kept for the second run.

The module's `forward` is replaced on the instance. No wrapper module comes in between, so the
names of parameters are what they were, in state dicts, in optimizers and in every message, and
classes are found by policies as before.

# Why inside of the unit

If the module becomes a unit, the unit is around the recomputation: the second run is that of
the plain module inside. The backward of a unit begins when the gradient of its output is there. It
gathers the parameters, and only then asks for the first activation. So the second run finds
them gathered, and the hooks of the unit do not run twice. That costs as many gathers as without
checkpointing. With the older form of checkpointing, called re-entrant, and the unit inside of it,
torch's class gathers more often; that form is not used here.

A unit *inside* of a marked module is called again in the second run, and gathered for it. So mark
the layers that are units, or modules inside them, rather than modules that contain units.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp_ref.errors import PolicyError
from fsdp_ref.marks import root_says_recompute, should_recompute
from fsdp_ref.naming import where_is
from fsdp_ref.originals import NOTHING_IGNORED, Ignored, has_forward


class Recomputed:
    """What stands in place of a module's `forward` and runs it under activation checkpointing.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.own: Any = vars(module).get("forward")  # if somebody has replaced it before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; keep its inputs only, and run it again when the backward asks."""
        if self.own is not None:
            return checkpoint(self.own, *args, use_reentrant=False, **kwargs)
        forward = type(self.module).forward
        return checkpoint(forward, self.module, *args, use_reentrant=False, **kwargs)


def recompute(module: nn.Module) -> None:
    """Let a module's forward be recomputed in the backward. Local; a second call changes nothing.

    Args:
        module: The module, changed in place.

    Examples:
        >>> import torch
        >>> calls = []
        >>> layer = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        >>> _ = layer[0].register_forward_hook(lambda *_: calls.append("forward"))
        >>> recompute(layer)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> calls
        ['forward', 'forward']
        >>> list(layer.state_dict())
        ['0.weight', '0.bias']
    """
    if not isinstance(vars(module).get("forward"), Recomputed):
        vars(module)["forward"] = Recomputed(module)


def marked_for_recomputing(root: nn.Module, ignored: Ignored = NOTHING_IGNORED) -> list[nn.Module]:
    """Return the modules in a tree whose forward is to be recomputed. Changes nothing. Local.

    Args:
        root: The tree; its `activation_checkpointing_fn` is asked about each module that does
            not say it itself.
        ignored: What is left alone.

    Returns:
        The modules, outer before inner.

    Raises:
        PolicyError: If an answer is no bool, or a module without a forward is marked.
    """
    says, found = root_says_recompute(root), []
    for name, module in root.named_modules():
        if module in ignored.modules:
            continue
        where = f"{where_is(name)} ({type(module).__name__})"
        said = should_recompute(module, where)
        if not has_forward(type(module)):
            _refuse_container(said, where)
        elif says(module, where) if said is None else said:
            found.append(module)
    return found


def _refuse_container(said: bool | None, where: str) -> None:
    if said:
        raise PolicyError.at(
            where,
            expected="_activation_checkpointing on a module with a forward to run again",
            found="a container without one",
            fix="Mark its elements.",
        )
