"""The flat parameter: a unit's parameters laid end to end, of which each rank keeps one shard.

# What each attribute holds

A unit holds one [FlatParameter][fsdp_ref.flat_param.FlatParameter] per original dtype and
`requires_grad`. Its `data` is always this rank's shard, so the optimizer only ever sees the
shard and its gradient. The full weights live in a second tensor, `_full_param_padded`, whose
memory exists only while the unit is unsharded.

The original parameters, which the module computes with, are views of `_full_param_padded` while
the unit is unsharded. So are the tensors that autograd saves in the forward. Emptying the storage
frees the memory and leaves those tensors in place; filling it again brings them back to life for
the backward.

`module.weight` leads to the original parameter while the unit is unsharded. While it is sharded,
it leads to a stand-in, which has a shape and a dtype and refuses to compute. An original parameter
that somebody kept from before wrapping reads as NaN then.

When a parameter's gradient is complete it is divided by the number of ranks and copied into
one long gradient. The sum of those over the ranks is the mean over the global batch, if the
ranks see equally much of it.

Tip: Read the shard, not the full weight
    Between steps the full weights are not in memory. `module.weight` still tells its shape,
    but to compute with it raises [NotGatheredError][fsdp_ref.errors.NotGatheredError]. What is
    always there is the shard: `flat_param.data`, and `flat_param._fp32_shard` once the unit has
    been used. Open [summon_full_params][fsdp_ref.FullyShardedDataParallel.summon_full_params]
    to see whole weights.

    Proof: attributes/walk_one_step
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp_ref.collectives import (
    PendingGather,
    PendingReduction,
    start_all_gather,
    start_reduce_scatter,
)
from fsdp_ref.errors import CopyError, SummonContextError
from fsdp_ref.layout import FlatLayout
from fsdp_ref.originals import OriginalParameter
from fsdp_ref.precision import Precision
from fsdp_ref.rank_group import Placement, RankGroup
from fsdp_ref.storage import allocate, empty, not_a_number, refuse_lost_writes

FULL_PRECISION = Precision()
_TENSOR_GRAD: Any = torch.Tensor.grad  # the descriptor, which FlatParameter.grad extends


def _cannot_be_copied() -> CopyError:
    return CopyError.at(
        "a flat parameter",
        expected="a tensor that belongs to nobody",
        found="a shard that belongs to a unit and its process group",
        fix="Copy its values, flat_param.detach().clone(), or the model's state_dict().",
    )


def _take_gradient(flat_param: weakref.ref[FlatParameter], index: int, leaf: torch.Tensor) -> None:
    """What autograd calls when a parameter's gradient is complete."""
    owner = flat_param()
    if owner is not None:
        owner.take_gradient(index, leaf)


class FlatParameter(nn.Parameter):
    """A unit's parameters of one dtype and `requires_grad`, concatenated, padded and sharded.

    The tensor itself is this rank's shard, one-dimensional, `shard_numel` elements. The units
    of a model register it, so `model.parameters()` yields flat parameters and an optimizer
    built from them updates shards. You do not construct it yourself.

    Args:
        originals: The parameters to lay end to end, all of one dtype and `requires_grad`.
        placement: The ranks that share it and that hold copies.
        device: Where the shard lives.
        precision: The dtypes in which it is gathered and its gradient reduced.

    Attributes:
        _is_sharded: Whether more than one rank shares it; `False` when its group has one rank.
            Exists from construction.
        _orig_size: Size before sharding, without padding: `(total_numel,)`. Exists from
            construction.
        _fp32_shard: This rank's shard in full precision, the memory that the optimizer
            updates. `None` before first use.
        _fp16_shard: This rank's shard in the compute dtype (fp16 or bf16) when that differs from
            the parameter's; its storage is empty except while it is being gathered. `None` in
            full precision, and before first use.
        _full_param_padded: The unsharded, padded parameter, `(padded_numel,)`; its storage is
            empty except while the unit is unsharded. `None` before first use.
        _cpu_grad: Buffer on the CPU for the shard's gradient when gradients are offloaded;
            `None` otherwise.
        _saved_grad_shard: The gradient shard accumulated so far, `(shard_numel,)`, in the
            parameter's dtype; `.grad` is set from it at the end of backward. `None` until the
            first reduction has arrived, and again once the gradient was cleared.
    """

    _is_sharded: bool
    _orig_size: torch.Size
    _fp32_shard: Tensor | None
    _fp16_shard: Tensor | None
    _full_param_padded: Tensor | None
    _cpu_grad: Tensor | None
    _unit: weakref.ref[Any]
    _layout: FlatLayout
    _group: RankGroup
    _placement: Placement
    _precision: Precision
    _originals: list[OriginalParameter]
    _updates: int

    def __new__(
        cls,
        originals: Sequence[OriginalParameter],
        placement: Placement,
        device: torch.device,
        precision: Precision = FULL_PRECISION,
    ) -> FlatParameter:
        """Shard `originals` as `placement` says; their memory becomes views of the full tensor."""
        first, group = originals[0].parameter, placement.shard
        layout = FlatLayout.of([(o.name, o.parameter.shape) for o in originals], group.size)
        shard = first.detach().new_zeros(layout.shard_numel, device=device)
        for slot, original in zip(layout.slots, originals, strict=True):
            inner, outer, numel = layout.overlap(slot, group.rank)
            piece = original.parameter.detach().reshape(-1)[inner : inner + numel]
            shard[outer : outer + numel].copy_(piece)
        self: FlatParameter = torch.Tensor._make_subclass(cls, shard, first.requires_grad)
        self._originals = list(originals)
        self._layout = layout
        self._group, self._placement, self._precision = group, placement, precision
        self._is_sharded = group.size > 1
        self._orig_size = torch.Size([layout.total_numel])
        self._fp32_shard = self._fp16_shard = self._full_param_padded = self._cpu_grad = None
        self._reset_step_state()
        self._updates = 0
        self._own_originals()
        self.point_originals_at_full()
        return self

    def __init__(
        self,
        originals: Sequence[OriginalParameter],
        placement: Placement,
        device: torch.device,
        precision: Precision = FULL_PRECISION,
    ) -> None:
        """Nothing left to do: `__new__` did the work, as for every tensor subclass."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: a copy would belong to no unit."""
        raise _cannot_be_copied()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a process group cannot be pickled."""
        raise _cannot_be_copied()

    def _reset_step_state(self) -> None:
        self._grad_in_progress: Tensor | None = None
        self._unsharded_grad: Tensor | None = None
        self._filled: set[int] = set()  # slots that already hold a gradient

    def _own_originals(self) -> None:
        """Mark the original parameters as taken, and ask autograd for their gradients."""
        myself = weakref.ref(self)  # the hooks must not keep the flat parameter alive
        for index, original in enumerate(self._originals):
            leaf = original.parameter
            leaf._fsdp_owner = original.name  # type: ignore[attr-defined]  # a mark of ours
            hook = partial(_take_gradient, myself, index)
            leaf.requires_grad_(True)  # torch refuses the hook otherwise
            # torch leaves the registration untyped
            leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """Freeze or thaw the original parameters as this flat parameter was since."""
        for original in self._originals:
            original.parameter.requires_grad_(self.requires_grad)

    def point_originals_at_full(self) -> None:
        """Make a new full tensor in the compute dtype, still without memory.

        Called at construction, and again when the shard has changed its dtype or device.
        """
        self._exact: Tensor | None = None  # full parameters in their own dtype, when summoned
        self._point_originals_at_nothing()  # let go of the old memory before asking for new
        self._full = self.data.new_empty(self._layout.padded_numel, dtype=self.compute_dtype)
        empty(self._full)

    def _point_originals_at_nothing(self) -> None:
        """Let the original parameters read as NaN, from one element, while they are sharded.

        Whoever kept a reference to one from before wrapping then reads NaN, and is refused by
        torch when writing. Views of an empty storage would crash the process instead.
        """
        nothing = not_a_number(self.compute_dtype, self.device)
        for slot, original in zip(self._layout.slots, self._originals, strict=True):
            original.parameter.data = nothing.expand(slot.shape)

    def _point_originals_at(self, full: Tensor) -> None:
        for slot, original in zip(self._layout.slots, self._originals, strict=True):
            # `.data`: a plain view would share the version counter, and refilling the full
            # tensor would then look to autograd like an edit of the weights that it saved.
            original.parameter.data = full.data[slot.offset : slot.stop].view(slot.shape)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the full parameters, in which the module computes."""
        return self._precision.compute_dtype(self.dtype)

    # Memory, in the order of a step

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded parameter now in memory."""
        exact = 0 if self._exact is None else self._exact.untyped_storage().nbytes()
        return self._full.untyped_storage().nbytes() + exact

    def prepare(self) -> None:
        """Fill in the attributes that exist from first use; refuse to go on after a lost write."""
        refuse_lost_writes(self.compute_dtype, self.device)
        self._fp32_shard = self.data
        self._full_param_padded = self._full
        if self.compute_dtype != self.dtype and self._fp16_shard is None:
            self._fp16_shard = torch.empty_like(self.data, dtype=self.compute_dtype)

    def start_unshard(self, tag: int) -> PendingGather:
        """Allocate the full tensor and start the all-gather into it. Collective."""
        allocate(self._full)
        return start_all_gather(self._full, self._shard_to_send(), self._group, tag)

    def _shard_to_send(self) -> Tensor:
        if self._fp16_shard is None:
            return self.data
        allocate(self._fp16_shard)
        return self._fp16_shard.copy_(self.data)

    def finish_unshard(self) -> None:
        """The all-gather is complete: let the original parameters be views of its result."""
        self._point_originals_at(self._full)
        if self._fp16_shard is not None:
            empty(self._fp16_shard)

    def free(self) -> None:
        """Drop the full parameters; tensors that autograd saved stay valid for the next time."""
        # Autograd saved views of this storage for backward, so the tensor must survive:
        # emptying its storage frees the memory and keeps every view valid after refilling.
        empty(self._full)
        self._point_originals_at_nothing()

    def start_exact_unshard(self, tag: int) -> PendingGather:
        """Gather the parameters in their own dtype, beside those to compute with. Collective."""
        self._exact = self.data.new_empty(self._layout.padded_numel)
        self._point_originals_at(self._exact)
        return start_all_gather(self._exact, self.data, self._group, tag)

    def free_exact(self) -> None:
        """Drop the parameters in their own dtype, and compute with the others again."""
        self._exact = None
        self._point_originals_at(self._full)

    def take_back_data(self) -> None:
        """Copy the values of original parameters whose `.data` was set to another tensor.

        Raises:
            SummonContextError: If one has another shape than before.
        """
        for slot, original in zip(self._layout.slots, self._originals, strict=True):
            view, found = self.shown[slot.offset : slot.stop], original.parameter.data
            if found.shape != slot.shape:
                raise SummonContextError.at(
                    f"'{slot.name}'",
                    expected=f"the shape {slot.shape}, as before",
                    found=f"{tuple(found.shape)}",
                    fix="Inside summon_full_params values may change, shapes may not.",
                )
            if slot.numel and found.data_ptr() != view.data_ptr():
                view.copy_(found.reshape(-1))
        self._point_originals_at(self.shown)

    @property
    def shown(self) -> Tensor:
        """The full tensor that the original parameters are views of at this moment."""
        return self._full if self._exact is None else self._exact

    @property
    def generation(self) -> tuple[int, int]:
        """Changes whenever the shard may have changed: compare two to find stale weights."""
        # Fused optimizers write without touching the version counter; hence the second number.
        return self._version, self._updates

    # The gradient

    def take_gradient(self, index: int, leaf: Tensor) -> None:
        """Move one original parameter's gradient into the long gradient, scaled for the mean.

        Autograd calls this once per backward and parameter, right after it has accumulated
        into ``leaf.grad``.
        """
        if leaf.grad is None:
            return
        dtype = self._precision.gradient_dtype(self.dtype)
        if self._unsharded_grad is None:
            self._unsharded_grad = self._full.new_empty(self._layout.padded_numel, dtype=dtype)
        slot = self._layout.slots[index]
        target = self._unsharded_grad[slot.offset : slot.stop].view(slot.shape)
        scale = 1.0 / self._placement.size
        gradient = leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad
        gradient = gradient.to(dtype)
        if index in self._filled:  # inside no_sync(), or used again in the same backward
            target.add_(gradient, alpha=scale)
        else:
            torch.mul(gradient, scale, out=target)
        self._filled.add(index)
        leaf.grad = None

    @property
    def has_gradient(self) -> bool:
        """Whether any of its parameters got a gradient that is not reduced yet."""
        return bool(self._filled)

    def start_reduction(self, tag: int) -> PendingReduction:
        """Hand the long gradient to a reduce-scatter; zeros where nothing arrived. Collective."""
        gradient = self._unsharded_grad
        if gradient is None:
            dtype = self._precision.gradient_dtype(self.dtype)
            gradient = self._full.new_zeros(self._layout.padded_numel, dtype=dtype)
        else:
            for index, slot in enumerate(self._layout.slots):
                if index not in self._filled:
                    gradient[slot.offset : slot.stop].zero_()
            gradient[self._layout.total_numel :].zero_()
        self._unsharded_grad, self._filled = None, set()
        return start_reduce_scatter(gradient, self._group, tag)

    def accumulate(self, shard: Tensor) -> None:
        """Add a reduced gradient shard, ``(shard_numel,)``, to what was there before."""
        before, shard = self._saved_grad_shard, shard.to(self.dtype)
        if before is None:
            self._grad_in_progress = shard
        else:
            self._grad_in_progress = before.add_(shard)

    def publish_gradient(self) -> None:
        """Set `.grad` from the accumulated shard; the optimizer may step now."""
        if self._grad_in_progress is None:
            return
        self.grad = self._grad_in_progress
        self._grad_in_progress = None
        # Autograd never accumulates into this parameter, so its hooks are called from here.
        for hook in list((self._post_accumulate_grad_hooks or {}).values()):
            hook(self)

    @property
    def grad(self) -> Tensor | None:
        """This rank's shard of the mean gradient, `(shard_numel,)`.

        Inside `no_sync` nothing is reduced yet: then it is the gradient of the whole unit,
        `(padded_numel,)`. Setting it to `None`, as `zero_grad` does, forgets both.
        """
        reduced: Tensor | None = _TENSOR_GRAD.__get__(self)
        return self._unsharded_grad if reduced is None and self.has_gradient else reduced

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        _TENSOR_GRAD.__set__(self, gradient)
        if gradient is None:
            self._reset_step_state()

    @property
    def _saved_grad_shard(self) -> Tensor | None:
        reduced: Tensor | None = _TENSOR_GRAD.__get__(self)
        return reduced if self._grad_in_progress is None else self._grad_in_progress

    # Single parameters

    def write_slice(self, index: int, value: Tensor) -> None:
        """Copy this rank's part of one original parameter from its full ``value``. Local."""
        slot = self._layout.slots[index]
        inner, outer, numel = self._layout.overlap(slot, self._group.rank)
        with torch.no_grad():
            self[outer : outer + numel].copy_(value.reshape(-1)[inner : inner + numel])

    def discard_gradient(self) -> None:
        """Forget everything of an unfinished backward."""
        self._reset_step_state()


def flatten(
    originals: Sequence[OriginalParameter],
    placement: Placement,
    device: torch.device | None,
    precision: Precision,
) -> list[FlatParameter]:
    """Make one flat parameter per dtype and `requires_grad`; on ``device``, or where they are."""
    by_kind: dict[Any, list[OriginalParameter]] = {}
    for original in originals:
        by_kind.setdefault(original.kind, []).append(original)
    return [
        FlatParameter(same_kind, placement, device or same_kind[0].parameter.device, precision)
        for same_kind in by_kind.values()
    ]
