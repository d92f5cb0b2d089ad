"""The gradient of a flat parameter: from one rank's whole gradient to the shard of the mean.

The parameters' gradients are gathered in one long tensor, scaled, as autograd completes them. A
reduce-scatter turns it into this rank's shard of the mean, which is added to what was there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_ref.collectives import CommHook, PendingReduction, run_hook, start_reduce_scatter
from fsdp_ref.layout import FlatLayout
from fsdp_ref.leaves import Leaves
from fsdp_ref.options import Options
from fsdp_ref.rank_group import Placement
from fsdp_ref.storage import set_gradient, wait_for_copies

_TENSOR_GRAD: Any = torch.Tensor.grad  # the descriptor, which FlatGradient.grad extends


class FlatGradient(nn.Parameter):
    """What a flat parameter does with gradients."""

    _layout: FlatLayout
    _placement: Placement
    _options: Options
    _leaves: Leaves
    _full: Tensor
    _cpu_grad: Tensor | None
    _divisors: tuple[float, float]  # before and after the reduction
    _comm_hook: CommHook | None
    _pieces_shown: bool  # whether the leaves' gradients are pieces of this one's

    def _reset_step_state(self) -> None:
        self._grad_in_progress: Tensor | None = None
        self._unsharded_grad: Tensor | None = None
        self._filled: set[int] = set()  # slots that already hold an unreduced gradient
        self._shown_version = 0  # of the reduced gradient, when the last backward ended
        self._given: set[int] = set()  # slots of which any rank ever reduced a gradient
        self._unreduced: dict[int, tuple[Tensor, int]] = {}  # what shows for it, and its version

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return self._options.precision.gradient_dtype(self.dtype)

    # From the leaves

    def take_gradient(self, index: int, leaf: Tensor) -> None:
        """Move one original parameter's gradient into the long gradient, scaled for the mean.

        Autograd calls this once per backward and parameter, right after it has accumulated
        into ``leaf.grad``.
        """
        if leaf.grad is None:
            return
        dtype = self.gradient_dtype
        if self._unsharded_grad is None:
            self._unsharded_grad = self._full.new_empty(self._layout.padded_numel, dtype=dtype)
        slot = self._layout.slots[index]
        target = self._unsharded_grad[slot.offset : slot.stop].view(slot.shape)
        scale = 1.0 / self._divisors[0]
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
        """Whether any of its parameters has a gradient that is not reduced yet."""
        self.take_back_gradients(hide=False)
        return bool(self._filled)

    def used(self) -> list[bool]:
        """Say what got an unreduced gradient: each parameter, or if flat, any of them."""
        self.take_back_gradients(hide=False)
        if self._options.use_orig_params:
            return [index in self._filled for index, _ in enumerate(self._layout.slots)]
        return [self.has_gradient]

    # Over the ranks

    def start_reduction(self, tag: int) -> PendingReduction:
        """Hand the long gradient to the reader's hook, or to a reduce-scatter. Collective."""
        gradient = self.hand_over_gradient()
        if self._comm_hook is not None:
            return run_hook(self._comm_hook, gradient, self._placement.shard)
        return start_reduce_scatter(gradient, self._placement.shard, tag)

    def hand_over_gradient(self) -> Tensor:
        """Return the long gradient, ``(padded_numel,)``, zeros where nothing arrived; forget it."""
        self.take_back_gradients()
        gradient = self._unsharded_grad
        if gradient is None:
            gradient = self._full.new_zeros(self._layout.padded_numel, dtype=self.gradient_dtype)
        else:
            for index, slot in enumerate(self._layout.slots):
                if index not in self._filled:
                    gradient[slot.offset : slot.stop].zero_()
            gradient[self._layout.total_numel :].zero_()
        self._unsharded_grad, self._filled = None, set()
        return gradient

    def accumulate(self, shard: Tensor) -> None:
        """Add a reduced gradient shard, ``(shard_numel,)``, to what was there before."""
        if self._divisors[1] != 1:
            shard = shard / self._divisors[1]
        before, shard = self._saved_grad_shard, shard.to(self.kept_gradient_dtype)
        if before is not None:
            shard = before.add_(shard.to(before.device))
        elif self._options.offload.gradients:
            if self._cpu_grad is None or self._cpu_grad.dtype != shard.dtype:
                pin = shard.device.type == "cuda"
                self._cpu_grad = torch.empty_like(shard, device="cpu", pin_memory=pin)
            shard = self._cpu_grad.copy_(shard, non_blocking=True)
        self._grad_in_progress = shard

    @property
    def kept_gradient_dtype(self) -> torch.dtype:
        """The dtype of `.grad`."""
        return self._options.precision.kept_gradient_dtype(self.dtype)

    def publish_gradient(self, used: Sequence[bool]) -> None:
        """Set `.grad` from the accumulated shard; the optimizer may step now.

        Args:
            used: As from the method `used`, but of any rank.
        """
        if self._grad_in_progress is not None:
            wait_for_copies(self._full.device, self._grad_in_progress)
            self.grad = self._grad_in_progress
            self._grad_in_progress = None
            self._given |= {index for index, anywhere in enumerate(used) if anywhere}
            # Autograd never accumulates into this parameter, so its hooks are called from here.
            for hook in list((self._post_accumulate_grad_hooks or {}).values()):
                hook(self)
        self.show_gradients()

    def discard_gradient(self) -> None:
        """Forget everything of an unfinished backward."""
        self._reset_step_state()
        if self._options.use_orig_params:
            # They show no gradient since it began. If an older one came back now, a zero_grad()
            # right after the exception would have had nothing to clear.
            _TENSOR_GRAD.__set__(self, None)
            for _, leaf in self._leaves:
                leaf.grad = None
            self._pieces_shown = True

    # Where others look for it

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
        if gradient is None:
            _TENSOR_GRAD.__set__(self, None)
            self._reset_step_state()
        else:
            set_gradient(self, gradient, _TENSOR_GRAD)

    @property
    def _saved_grad_shard(self) -> Tensor | None:
        reduced: Tensor | None = _TENSOR_GRAD.__get__(self)
        return reduced if self._grad_in_progress is None else self._grad_in_progress

    def show_gradients(self) -> None:
        """With `use_orig_params`, let each parameter's `.grad` be its piece of the shard's.

        A gradient that is not reduced yet shows as NaN; an optimizer step on it is refused.
        """
        shard: Tensor | None = _TENSOR_GRAD.__get__(self)
        self._shown_version = 0 if shard is None else shard._version
        if not self._options.use_orig_params or self._pieces_shown:
            return
        for index, (_, leaf) in enumerate(self._leaves):
            if index in self._filled:
                numel = self._leaves.piece(self.data, index).numel()
                unreduced = torch.full((), float("nan"), dtype=self.dtype, device=self.device)
                shown = unreduced.expand(numel)
                set_gradient(leaf, shown, _TENSOR_GRAD)
                self._unreduced[index] = shown, shown._version
            elif shard is not None and index in self._given:
                set_gradient(leaf, self._leaves.piece(shard, index), _TENSOR_GRAD)
        self._pieces_shown = True

    def take_back_gradients(self, *, hide: bool = True) -> None:
        """Follow what was done to the parameters' gradients since they were shown.

        One that was set to `None` or to zeros, by `zero_grad` for example, is forgotten, also
        what of it was not reduced yet. One that was replaced is copied.

        Args:
            hide: Also clear them, because autograd is about to accumulate into them.
        """
        if not self._options.use_orig_params:
            self._forget_beside_zeros()
        if not self._pieces_shown:
            return
        for index, (_, leaf) in enumerate(self._leaves):
            if leaf.grad is None:
                self._forget(index)
            elif not self._shows_unreduced(index, leaf.grad):
                self._take_back(index, leaf)
            if hide:
                leaf.grad = None
        if hide:
            self._unreduced.clear()
        if not self._given:
            _TENSOR_GRAD.__set__(self, None)
        self._pieces_shown = not hide

    def _forget_beside_zeros(self) -> None:
        """Forget what is not reduced yet if the reduced gradient beside it was set to zeros."""
        shard: Tensor | None = _TENSOR_GRAD.__get__(self)
        if shard is None or shard._version == self._shown_version:
            return
        self._shown_version = shard._version  # what arrives from now on is not meant
        if self._filled and not bool(shard.any()):
            self._unsharded_grad, self._filled = None, set()

    def _forget(self, index: int) -> None:
        shard: Tensor | None = _TENSOR_GRAD.__get__(self)
        if shard is not None and index in self._given:
            self._leaves.piece(shard, index).zero_()
        self._given.discard(index)
        self._filled.discard(index)

    def _shows_unreduced(self, index: int, gradient: Tensor) -> bool:
        """Return whether a gradient is still the NaN that stands for one not reduced yet."""
        shown, version = self._unreduced.get(index, (None, 0))
        return gradient is shown and gradient._version == version

    def _take_back(self, index: int, leaf: nn.Parameter) -> None:
        shard: Tensor | None = _TENSOR_GRAD.__get__(self)
        if shard is None:
            shard = torch.zeros_like(self.data, dtype=self.kept_gradient_dtype)
            set_gradient(self, shard, _TENSOR_GRAD)
        piece, gradient = self._leaves.piece(shard, index), leaf.grad
        if gradient is not None and gradient.data_ptr() != piece.data_ptr():
            piece.copy_(gradient.reshape(-1))
            set_gradient(leaf, piece, _TENSOR_GRAD)  # whoever changes one of the two changes both
        self._filled.discard(index)
        self._given.add(index)
