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
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fsdp_ref.collectives import PendingGather, start_all_gather
from fsdp_ref.errors import CopyError
from fsdp_ref.flat_gradient import FlatGradient
from fsdp_ref.layout import FlatLayout
from fsdp_ref.leaves import Leaves, shown_by
from fsdp_ref.options import Options
from fsdp_ref.originals import OriginalParameter
from fsdp_ref.precision import Precision
from fsdp_ref.rank_group import Placement, RankGroup
from fsdp_ref.storage import allocate, empty, refuse_lost_writes

DEFAULTS = Options()


def _cannot_be_copied() -> CopyError:
    return CopyError.at(
        "a flat parameter",
        expected="a tensor that belongs to nobody",
        found="a shard that belongs to a unit and its process group",
        fix="Copy its values, flat_param.detach().clone(), or the model's state_dict().",
    )


class FlatParameter(FlatGradient):
    """A unit's parameters of one dtype and `requires_grad`, concatenated, padded and sharded.

    The tensor itself is this rank's shard, one-dimensional, `shard_numel` elements. The units
    of a model register it, so `model.parameters()` yields flat parameters and an optimizer
    built from them updates shards. You do not construct it yourself.

    Args:
        originals: The parameters to lay end to end, all of one dtype and `requires_grad`.
        placement: The ranks that share it and that hold copies.
        device: Where the full parameters live, and the shard unless it is offloaded.
        options: Dtypes, offload, and whether modules keep their own parameters.
        shard: This rank's shard, if it was cut already; the originals need no values then.

    Attributes:
        _is_sharded: Whether more than one rank shares it; `False` when its group has one rank.
            Exists from construction.
        _orig_size: Size before sharding, without padding: `(total_numel,)`. Exists from
            construction.
        _fp32_shard: This rank's shard in full precision, the memory that the optimizer
            updates. `None` before first use.
        _fp16_shard: This rank's shard in the compute dtype, where it is sent from, when that dtype
            (fp16 or bf16) differs from the parameter's or the shard is offloaded; its storage is
            empty except while it is being gathered. `None` otherwise, and before first use.
        _full_param_padded: The unsharded, padded parameter, `(padded_numel,)`; its storage is
            empty except while the unit is unsharded. `None` before first use.
        _cpu_grad: Buffer on the CPU for the shard's gradient when gradients are offloaded;
            `None` otherwise.
        _saved_grad_shard: The gradient shard accumulated so far, `(shard_numel,)`, in the
            parameter's dtype, or with `keep_low_precision_grads` in that of the reduction;
            `.grad` is set from it at the end of backward. `None` until the
            first reduction has arrived, and again once the gradient was cleared.
    """

    _is_sharded: bool
    _orig_size: torch.Size
    _fp32_shard: Tensor | None
    _fp16_shard: Tensor | None
    _full_param_padded: Tensor | None
    _unit: weakref.ref[Any]
    _group: RankGroup
    _updates: int

    def __new__(
        cls,
        originals: Sequence[OriginalParameter],
        placement: Placement,
        device: torch.device,
        options: Options = DEFAULTS,
        shard: Tensor | None = None,
    ) -> FlatParameter:
        """Shard `originals` as `placement` says; their memory becomes views of the full tensor."""
        first, group = originals[0].parameter, placement.shard
        layout = FlatLayout.of([(o.name, o.shape) for o in originals], group.size)
        if shard is None:
            at_rest = torch.device("cpu") if options.offload.offload_params else device
            shard = cut(originals, layout, group.rank, at_rest)
        if options.offload.offload_params and device.type == "cuda":
            shard = shard.pin_memory()
        self: FlatParameter = torch.Tensor._make_subclass(cls, shard, first.requires_grad)
        self._layout, self._placement, self._group = layout, placement, group
        self._options = options
        self._leaves = Leaves(originals, layout, group.rank)
        self._is_sharded = group.size > 1
        self._orig_size = torch.Size([layout.total_numel])
        self._fp32_shard = self._fp16_shard = self._full_param_padded = self._cpu_grad = None
        self._divisors, self._comm_hook = self.own_divisors, None
        self._updates, self._pieces_shown = 0, options.use_orig_params
        self._reset_step_state()
        self._own_leaves()
        self.renew_memory(device)
        return self

    def __init__(
        self,
        originals: Sequence[OriginalParameter],
        placement: Placement,
        device: torch.device,
        options: Options = DEFAULTS,
        shard: Tensor | None = None,
    ) -> None:
        """Nothing left to do: `__new__` did the work, as for every tensor subclass."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: a copy would belong to no unit."""
        raise _cannot_be_copied()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a process group cannot be pickled."""
        raise _cannot_be_copied()

    @property
    def own_divisors(self) -> tuple[float, float]:
        """The divisors before and after the reduction, as constructed: by default for the mean."""
        return self._options.gradient_divisor or self._placement.size, 1

    def _own_leaves(self) -> None:
        """Ask autograd for the original parameters' gradients."""
        myself = weakref.ref(self)  # the hooks must not keep the flat parameter alive

        def take_gradient(index: int, leaf: nn.Parameter) -> None:
            owner = myself()
            if owner is not None:
                owner.take_gradient(index, leaf)

        self._leaves.own(take_gradient)
        if self._options.use_orig_params:
            self._leaves.show_pieces_of(myself)

    def follow_requires_grad(self) -> None:
        """Freeze or thaw what was frozen or thawed since: the whole, or with it its parameters."""
        if self._options.use_orig_params:
            self.requires_grad_(self._leaves.any_trainable())
        else:
            self._leaves.freeze_or_thaw(self.requires_grad)

    def renew_memory(self, device: torch.device) -> None:
        """Make a new full tensor in the compute dtype on ``device``, still without memory.

        Called at construction, and again when the shard has changed its dtype or device.
        """
        self._exact: Tensor | None = None  # full parameters in their own dtype, when summoned
        self._full = self.data.new_empty(0, dtype=self.compute_dtype, device=device)
        self._leave_full()  # let go of the old memory before asking for new
        self._full = self._full.new_empty(self._layout.padded_numel)
        empty(self._full)

    def follow_move(self) -> None:
        """Make everything match the shard after its dtype or device was changed from outside."""
        moved_to = self.device
        if self._options.offload.offload_params:  # it stays at rest where it was
            self.data = self.data.cpu()
            moved_to = self.compute_device if moved_to.type == "cpu" else moved_to
        self._fp32_shard = self._fp16_shard = self._full_param_padded = self._cpu_grad = None
        self.renew_memory(moved_to)

    def _leave_full(self) -> None:
        """Let the original parameters show what they show while sharded."""
        if self._options.use_orig_params:
            self._leaves.point_at_pieces(self)
        else:
            self._leaves.point_at_nothing(self.compute_dtype, self._full.device)

    def use_precision(self, precision: Precision) -> None:
        """Gather and reduce in other dtypes from now on; the unit is sharded."""
        self._options = replace(self._options, precision=precision)
        self._updates += 1  # what an open forward has saved is lost: its backward has to raise
        self._fp16_shard = None
        self.renew_memory(self.compute_device)

    @property
    def _precision(self) -> Precision:
        return self._options.precision

    @property
    def _originals(self) -> list[OriginalParameter]:
        return self._leaves.originals

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of the full parameters, in which the module computes."""
        return self._options.precision.compute_dtype(self.dtype)

    @property
    def compute_device(self) -> torch.device:
        """Where the full parameters are, and messages start; the shard may be offloaded."""
        return self._full.device

    # Memory, in the order of a step

    @property
    def unsharded_bytes(self) -> int:
        """Bytes of the unsharded parameter now in memory."""
        exact = 0 if self._exact is None else self._exact.untyped_storage().nbytes()
        return self._full.untyped_storage().nbytes() + exact

    def prepare(self) -> None:
        """Fill in the attributes that exist from first use; take back or refuse stray writes."""
        self.take_back_edits()
        if not self._options.use_orig_params:
            refuse_lost_writes(self.compute_dtype, self.compute_device)
        self._fp32_shard = self.data
        self._full_param_padded = self._full
        differs = self.compute_dtype != self.dtype or self._options.offload.offload_params
        if differs and self._fp16_shard is None:
            with torch.inference_mode(False):  # it outlives a context around this call
                self._fp16_shard = self._full.new_empty(self.numel())
            empty(self._fp16_shard)

    def start_unshard(self, tag: int) -> PendingGather:
        """Allocate the full tensor and start the all-gather into it. Collective."""
        allocate(self._full)
        return start_all_gather(self._full, self.shard_to_send(), self._group, tag)

    def shard_to_send(self) -> Tensor:
        """Return the shard in the compute dtype, where messages start, until it was gathered."""
        if self._fp16_shard is None:
            return self.data
        allocate(self._fp16_shard)
        return self._fp16_shard.copy_(self.data, non_blocking=True)

    def finish_unshard(self, gather: PendingGather) -> None:
        """Wait for the all-gather, and let the original parameters be views of its result."""
        gather.wait()
        if gather.parcel is not None:
            allocate(self._full)
            gather.unpack(self._full)
        self._leaves.point_at(self._full, to_compute=True)
        self.drop_sent_shard()

    def drop_sent_shard(self) -> None:
        """Free the shard in the compute dtype, once messages no longer need it."""
        if self._fp16_shard is not None:
            empty(self._fp16_shard)

    def free(self) -> None:
        """Drop the full parameters; tensors that autograd saved stay valid for the next time."""
        # Autograd saved views of this storage for backward, so the tensor must survive:
        # emptying its storage frees the memory and keeps every view valid after refilling.
        self.take_back_edits()
        self.drop_sent_shard()
        empty(self._full)
        self._leave_full()

    def take_back_edits(self) -> None:
        """With `use_orig_params`, copy edits of the parameters into the shard, if there are any.

        Raises:
            NotGatheredError: If the `.data` of a piece was set to a tensor of another size.
        """
        if self._options.use_orig_params:
            self._leaves.take_back_edits(self)

    def take_back_data(self) -> None:
        """Copy the values of original parameters whose `.data` was set to another tensor.

        Raises:
            SummonContextError: If one has another shape than before.
        """
        self._leaves.take_back_data(self.shown)

    @property
    def shown(self) -> Tensor:
        """The full tensor that the original parameters are views of at this moment."""
        return self._full if self._exact is None else self._exact

    @property
    def generation(self) -> tuple[int, int]:
        """Changes whenever the shard may have changed: compare two to find stale weights."""
        # Fused optimizers write without touching the version counter; hence the second number.
        # What writes to an original parameter, whole or a piece, counts at that parameter only.
        versions = self._version + sum(leaf._version for _, leaf in self._leaves)
        return versions, self._updates

    # Single parameters

    def write_slice(self, index: int, value: Tensor) -> None:
        """Copy this rank's part of one original parameter from its full ``value``. Local."""
        slot = self._layout.slots[index]
        inner, outer, numel = self._layout.overlap(slot, self._group.rank)
        self.take_back_edits()  # or an older one would come after this one
        with torch.no_grad():
            self[outer : outer + numel].copy_(value.reshape(-1)[inner : inner + numel])


def is_sharded(parameter: nn.Parameter) -> bool:
    """Return whether a parameter of a model is a flat one, or shows a piece of one."""
    return isinstance(parameter, FlatParameter) or shown_by(parameter) is not None


def cut(
    originals: Sequence[OriginalParameter],
    layout: FlatLayout,
    group_rank: int,
    device: torch.device,
) -> Tensor:
    """Return this rank's shard of the parameters, `(shard_numel,)`, on ``device``. Local."""
    shard = originals[0].parameter.detach().new_zeros(layout.shard_numel, device=device)
    for slot, original in zip(layout.slots, originals, strict=True):
        inner, outer, numel = layout.overlap(slot, group_rank)
        piece = original.parameter.detach().reshape(-1)[inner : inner + numel]
        shard[outer : outer + numel].copy_(piece)
    return shard


def flatten(
    originals: Sequence[OriginalParameter],
    placement: Placement,
    device: torch.device | None,
    options: Options,
) -> list[FlatParameter]:
    """Make one flat parameter per dtype and `requires_grad`; on ``device``, or where they are."""
    by_kind: dict[Any, list[OriginalParameter]] = {}
    for original in originals:
        by_kind.setdefault(original.kind, []).append(original)
    return [
        FlatParameter(same_kind, placement, device or same_kind[0].parameter.device, options)
        for same_kind in by_kind.values()
    ]
