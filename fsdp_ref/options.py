"""How a unit's parameters are kept between uses, and when they are gathered.

By default a shard stays on the device, a unit is gathered when it is needed or a little before,
and an optimizer sees one flat parameter. Three arguments of the constructor change that. They
change memory, waiting and names; the numbers that training computes stay the same. Each is accepted
in torch's spelling, as a word in either case, or as a dict, and a policy may return others for a
single unit. One more, `gradient_divisor`, says what a gradient is the mean of.

# CPU offload

With `cpu_offload=CPUOffload(offload_params=True)` the shard lives on the CPU, and with it its
gradient and the state of the optimizer. `{"offload_gradients": True}` moves the gradient alone.
[A run shows][offload-to-the-cpu] what lives where in a step, and that page what it costs.

Tip: Offload where the state of the optimizer is the problem
    With `cpu_offload=True` shards, gradients and the state of the optimizer never take memory on
    the device. Full parameters still do, a unit or two at a time, so offloading does not help a
    unit that is too large.

    Proof: options/offload_to_the_cpu

# Prefetch

A backward needs one unit after the other. `backward_prefetch` says when the next one is
gathered: before the gradients of this one are computed (`BACKWARD_PRE`, the default: both
overlap, and two units are in memory), after them and before they are reduced (`BACKWARD_POST`), or
not ahead at all (`None`). `forward_prefetch=True` does the same in the forward, in the order of the
forward before it; for models whose units always run in one order.

`limit_all_gathers` is accepted and changes nothing: never more than one unit, or one bucket of
[small units][fsdp_ref.buckets], is gathered ahead, so there is nothing to limit.

Tip: Choose prefetch by memory: the messages stay the same
    Gathered ahead, weights travel while the layer before still computes. `BACKWARD_PRE` pays with
    memory for one more unit during the backward, and `forward_prefetch` during the forward.
    `BACKWARD_POST` and `None` do not. What is sent, and what comes out, is the same.

    Proof: options/prefetch

# The original parameters

With `use_orig_params=True` the modules keep their own parameters registered, under their own
names. Between steps each of them is this rank's piece of the weight, one-dimensional and perhaps
empty. An optimizer then sees one parameter per weight: groups by name work, weights can be
frozen one by one, a weight that no rank used keeps `None` as its gradient, and an optimizer
from before wrapping goes on working.

Tip: Keep the original parameters if your optimizer tells weights apart
    A rule such as "no decay for biases" finds nothing in a flat parameter, and a weight that no
    rank used decays with the rest. With `use_orig_params=True` each has its name and its own
    gradient, which stays `None` where no rank used the weight.

    Proof: options/original_parameters

# Gradient divisor

A reduction adds up the gradients of the ranks that share a unit, and divides by their number: the
mean. That is the gradient of the mean loss, if each rank's gradient comes from its own part of
the batch. Where it does not, say the divisor: a unit then gets the sum over its own ranks, divided
by `gradient_divisor`.

The rule: *divide by the number of ranks whose losses are in the sum*. Let L be the mean of the
losses of all W ranks, the quantity to minimise.

| whose losses the sum over a unit's G ranks holds | it is | divisor |
| --- | --- | --- |
| those of its own ranks, each with its own tokens | G times their mean | G, the default |
| all ranks': an expert to which tokens travel | W times the gradient of L | W |
| one loss, counted once | the gradient of L | 1 |

The middle row is what a mixture of experts has. The backward of an all-to-all brings each expert
the gradients of all ranks' losses. Its group is smaller than the world; so by default its gradient
is W/G times too large beside the dense layers, and nothing warns: with `'self'` it is the number
of ranks. It looks like a higher learning rate for experts. Give such units
`gradient_divisor=torch.distributed.get_world_size()`, in their constructor or in a policy's dict.

With [batches of unequal size][unequal-batches] the divisor is the number of tokens of all ranks. If
it changes from step to step,
[set_gradient_divide_factors][fsdp_ref.FullyShardedDataParallel.set_gradient_divide_factors] says
it anew.

# Ignored modules and parameters

`ignored_modules`, or `ignored_states`, name what a unit leaves alone: it stays whole, on every
rank, and nobody averages its gradient. That is for weights that each rank trains for itself, or
that something else synchronises.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from numbers import Real
from typing import Any

import torch

from fsdp_ref.errors import OptionError
from fsdp_ref.precision import Precision, as_precision


@dataclass(frozen=True)
class Offload:
    """What lives on the CPU between uses.

    Attributes:
        offload_params: The shard, its gradient, and so the optimizer's state.
        offload_gradients: The gradient shard; always, if the parameters are offloaded.
    """

    offload_params: bool = False
    offload_gradients: bool = False

    @property
    def gradients(self) -> bool:
        """Whether gradient shards go to the CPU."""
        return self.offload_params or self.offload_gradients


class Prefetch(Enum):
    """When the unit that the backward needs next is gathered."""

    BACKWARD_PRE = "backward_pre"
    """Before the gradients of the unit at work are computed."""
    BACKWARD_POST = "backward_post"
    """After they are computed, before they are reduced."""
    NONE = "none"
    """When it is needed."""


@dataclass(frozen=True)
class Options:
    """How the parameters of one unit are kept, and when they are gathered.

    Attributes:
        precision: The dtypes in which they are gathered and reduced.
        offload: What lives on the CPU.
        use_orig_params: Whether modules keep their own parameters registered.
        backward_prefetch: When the next unit is gathered in a backward.
        forward_prefetch: Whether the next unit is gathered ahead in a forward.
        bucket_cap_mb: Bound for units that share messages, in megabytes; `None` for one eighth of
            the model. Only the root's counts.
        gradient_divisor: What the sum of the ranks' gradients is divided by; `None` for the
            number of ranks that share and copy the unit.
    """

    precision: Precision = field(default_factory=Precision)
    offload: Offload = field(default_factory=Offload)
    use_orig_params: bool = False
    backward_prefetch: Prefetch = Prefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    gradient_divisor: float | None = None
    bucket_cap_mb: float | None = None


def as_offload(cpu_offload: Any, where: str) -> Offload:
    """Turn a `cpu_offload` argument into what to offload.

    Args:
        cpu_offload: `None`, a bool, torch's `CPUOffload`, an `Offload`, or a dict.
        where: Who asks, for messages.

    Returns:
        What to offload.

    Raises:
        OptionError: If it is something else, or a setting is unknown.

    Examples:
        >>> as_offload(True, "unit 'layer'").gradients
        True
    """
    if isinstance(cpu_offload, Offload):
        return cpu_offload
    if cpu_offload is None or isinstance(cpu_offload, bool):
        return Offload(offload_params=bool(cpu_offload))
    if hasattr(cpu_offload, "offload_params"):
        return Offload(offload_params=bool(cpu_offload.offload_params))
    known = [setting.name for setting in fields(Offload)]
    if isinstance(cpu_offload, Mapping) and set(cpu_offload) <= set(known):
        return Offload(**{name: bool(value) for name, value in cpu_offload.items()})
    raise OptionError.at(
        f"{where}, cpu_offload",
        expected=f"a bool, torch's CPUOffload, or a dict with {' or '.join(known)}",
        found=repr(cpu_offload),
        fix="For example cpu_offload=True.",
    )


def as_prefetch(backward_prefetch: Any, where: str) -> Prefetch:
    """Turn a `backward_prefetch` argument into the moment that it names.

    Args:
        backward_prefetch: `None`, torch's `BackwardPrefetch`, or a word such as `"pre"` or
            `"BACKWARD_POST"`, in either case.
        where: Who asks, for messages.

    Returns:
        The moment.

    Raises:
        OptionError: If there is no such moment.

    Examples:
        >>> as_prefetch("post", "unit 'layer'").name
        'BACKWARD_POST'
    """
    if backward_prefetch is None:
        return Prefetch.NONE
    given = backward_prefetch
    word = str(given.name if isinstance(given, Enum) else given).upper()
    for name in (word, f"BACKWARD_{word}"):
        if name in Prefetch.__members__:
            return Prefetch[name]
    nearest = difflib.get_close_matches(word, Prefetch.__members__, n=1)
    raise OptionError.at(
        f"{where}, backward_prefetch",
        expected="None, 'BACKWARD_PRE' or 'BACKWARD_POST'",
        found=repr(given),
        fix=f"Did you mean {nearest[0]!r}?" if nearest else "Torch's enum works as well.",
    )


def as_divisor(gradient_divisor: Any, where: str) -> float:
    """Return a number by which gradients can be divided, and refuse what is none. Local.

    Args:
        gradient_divisor: A number above 0.
        where: Who asks, for messages.

    Returns:
        The same.

    Raises:
        OptionError: If it is no number, a bool, not finite, zero or negative.

    Examples:
        >>> as_divisor(8, "unit 'expert'")
        8
    """
    is_number = isinstance(gradient_divisor, Real) and not isinstance(gradient_divisor, bool)
    if is_number and math.isfinite(gradient_divisor) and gradient_divisor > 0:
        number: float = gradient_divisor
        return number
    raise OptionError.at(
        where,
        expected="a finite number above 0 to divide gradients by",
        found=repr(gradient_divisor),
        fix="The number of ranks whose losses are in the sum; 1 keeps the sum as it is.",
    )


def as_bucket_cap(bucket_cap_mb: Any, where: str) -> float | None:
    """Return a number of megabytes up to which units share messages, or `None`. Local.

    Args:
        bucket_cap_mb: `None`, or a number that is not negative.
        where: Who asks, for messages.

    Returns:
        The same.

    Raises:
        OptionError: If it is neither, or not a number at all.

    Examples:
        >>> as_bucket_cap(25, "unit 'root'")
        25
    """
    is_number = isinstance(bucket_cap_mb, Real) and not isinstance(bucket_cap_mb, bool)
    if bucket_cap_mb is None or (is_number and bucket_cap_mb >= 0):
        cap: float | None = bucket_cap_mb
        return cap
    raise OptionError.at(
        f"{where}, bucket_cap_mb",
        expected="None, or a number of megabytes that is not negative",
        found=repr(bucket_cap_mb),
        fix="0 lets every unit send for itself.",
    )


def as_options(arguments: Mapping[str, Any], where: str) -> Options:
    """Turn constructor arguments into the options of a unit.

    Args:
        arguments: All arguments, also those that are no options.
        where: Who asks, for messages.

    Returns:
        The options.

    Raises:
        OptionError: If `cpu_offload`, `backward_prefetch`, `gradient_divisor` or
            `bucket_cap_mb` is not understood.
        PrecisionError: If `mixed_precision` is not understood.
    """
    divisor = arguments.get("gradient_divisor")
    return Options(
        precision=as_precision(arguments.get("mixed_precision"), where),
        offload=as_offload(arguments.get("cpu_offload"), where),
        use_orig_params=bool(arguments.get("use_orig_params")),
        backward_prefetch=as_prefetch(arguments.get("backward_prefetch"), where),
        forward_prefetch=bool(arguments.get("forward_prefetch")),
        gradient_divisor=(
            None if divisor is None else as_divisor(divisor, f"{where}, gradient_divisor")
        ),
        bucket_cap_mb=as_bucket_cap(arguments.get("bucket_cap_mb"), where),
    )


def as_device(device_id: int | torch.device | None) -> torch.device | None:
    """Turn a `device_id` argument into a device.

    Args:
        device_id: A device, its number, or `None`.

    Returns:
        The device; the CPU for a number on a machine without an accelerator.

    Examples:
        >>> as_device(torch.device("cpu"))
        device(type='cpu')
    """
    if isinstance(device_id, int) and not torch.accelerator.is_available():
        return torch.device("cpu")
    return None if device_id is None else torch.device(device_id)
