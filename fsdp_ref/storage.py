"""Memory that comes and goes under tensors that stay.

Autograd keeps tensors from the forward for the backward. They stay valid while their storage is
empty, and are right again once it was refilled.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fsdp_ref.errors import NotGatheredError


@cache
def not_a_number(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the one element that all sharded parameters of this kind read as."""
    return torch.full((), float("nan"), dtype=dtype, device=device)


def refuse_lost_writes(dtype: torch.dtype, device: torch.device) -> None:
    """Raise if someone filled sharded parameters through references from before wrapping.

    Torch refuses all other writes to them by itself.

    Args:
        dtype: Of the parameters.
        device: Of the parameters; only the CPU is asked, others would have to be waited for.

    Raises:
        NotGatheredError: If so; once, as the element is a NaN again afterwards.
    """
    nothing = not_a_number(dtype, device)
    if device.type == "cpu" and not nothing.isnan():
        nothing.fill_(float("nan"))
        raise NotGatheredError.at(
            "a sharded parameter",
            expected="writes to weights that are in memory",
            found="a fill_() or zero_() through a reference from before wrapping; it is lost",
            fix="Write inside summon_full_params(), to the parameters found there.",
        )


def allocate(tensor: Tensor) -> None:
    """Give a tensor its memory back; the contents are undefined."""
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def empty(tensor: Tensor) -> None:
    """Free a tensor's memory; the tensor and its views stay usable after `allocate`."""
    tensor.untyped_storage().resize_(0)


def set_gradient(tensor: Tensor, gradient: Tensor, descriptor: Any) -> None:
    """Set a tensor's `.grad`, also to one of another dtype, device or shape than its own.

    Args:
        tensor: The tensor, a leaf.
        gradient: Its gradient.
        descriptor: Torch's own `Tensor.grad`, which subclasses may hide.
    """
    alike = (gradient.dtype, gradient.device, gradient.shape)
    if alike == (tensor.dtype, tensor.device, tensor.shape):
        descriptor.__set__(tensor, gradient)
        return
    # Torch compares the two when `.grad` is set, and not when the data behind it changes.
    descriptor.__set__(tensor, tensor.detach().new_zeros(()).expand(tensor.shape))
    descriptor.__get__(tensor).data = gradient


def wait_for_copies(source: torch.device, target: Tensor) -> None:
    """Wait until copies from ``source`` have arrived in ``target``, if it lies elsewhere."""
    if source.type not in ("cpu", target.device.type):
        torch.accelerator.current_stream(source).synchronize()
