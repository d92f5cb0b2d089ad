"""The original parameters of one flat parameter, which autograd sees as its leaves.

They are the module's own parameter objects. Only what they are views of changes: the full
tensor while the unit is unsharded, and otherwise nothing, or this rank's pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_ref.errors import NotGatheredError, SummonContextError
from fsdp_ref.layout import FlatLayout, ParameterSlot
from fsdp_ref.originals import OriginalParameter
from fsdp_ref.storage import not_a_number

# Which flat parameter's pieces an original parameter shows. Weak, and no attribute of the
# parameter: that would be pickled together with it.
_shown_by: Any = WeakIdKeyDictionary()


def shown_by(parameter: Tensor) -> Any:
    """Return the flat parameter of which an original parameter shows a piece, or `None`."""
    reference = _shown_by.get(parameter)
    return None if reference is None else reference()


class Leaves:
    """Points original parameters at full values, at this rank's pieces, or at nothing."""

    def __init__(
        self, originals: Sequence[OriginalParameter], layout: FlatLayout, group_rank: int
    ) -> None:
        """Take the parameters over, as they are.

        Args:
            originals: The parameters.
            layout: Where they lie in the flat parameter.
            group_rank: This rank's position among those that share it.
        """
        self.originals = list(originals)
        self._layout, self._group_rank = layout, group_rank
        self._whole: Tensor | None = None  # what they are views of while the unit can compute
        self._noted: list[tuple[int, int]] = []  # memory and version of each, to find edits

    def __iter__(self) -> Iterator[tuple[ParameterSlot, nn.Parameter]]:
        """Yield each parameter with its place."""
        for slot, original in zip(self._layout.slots, self.originals, strict=True):
            yield slot, original.parameter

    def piece(self, shard: Tensor, index: int) -> Tensor:
        """Return the part of a shard that belongs to one parameter, `(numel,)`, perhaps empty."""
        slot = self._layout.slots[index]
        _, start, numel = self._layout.overlap(slot, self._group_rank)
        return shard[start : start + numel]

    def own(self, when_accumulated: Callable[[int, nn.Parameter], None]) -> None:
        """Mark the parameters as taken, and ask autograd for their gradients.

        Args:
            when_accumulated: Called with a parameter's position and the parameter, right
                after autograd has accumulated into its `.grad`.
        """
        for index, original in enumerate(self.originals):
            leaf, trainable = original.parameter, original.parameter.requires_grad
            leaf._fsdp_owner = original.name  # type: ignore[attr-defined]  # a mark of ours
            leaf.requires_grad_(True)  # torch refuses the hook otherwise
            # torch leaves the registration untyped
            hook = partial(when_accumulated, index)
            leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            leaf.requires_grad_(trainable)

    def show_pieces_of(self, reference: Callable[[], Any]) -> None:
        """Note whose pieces the parameters show from now on; see `shown_by`."""
        for original in self.originals:
            _shown_by[original.parameter] = reference

    def any_trainable(self) -> bool:
        """Return whether any of them needs a gradient."""
        return any(original.parameter.requires_grad for original in self.originals)

    def freeze_or_thaw(self, requires_grad: bool) -> None:
        """Let all of them need a gradient, or none."""
        for original in self.originals:
            original.parameter.requires_grad_(requires_grad)

    # What they are views of

    def point_at(self, full: Tensor, *, to_compute: bool = False) -> None:
        """Let them be views of the full tensor.

        Args:
            full: The full tensor.
            to_compute: Whether it is the one that the unit computes with; edits of others are
                taken back by those who show them.
        """
        for slot, leaf in self:
            # `.data`: a plain view would share the version counter, and refilling the full
            # tensor would then look to autograd like an edit of the weights that it saved.
            leaf.data = full.data[slot.offset : slot.stop].view(slot.shape)
        self._noted, self._whole = [], full.data if to_compute else None
        if to_compute:
            self._note()

    def point_at_nothing(self, dtype: torch.dtype, device: torch.device) -> None:
        """Let them read as NaN, from one element, while they are sharded.

        Whoever kept a reference to one from before wrapping then reads NaN, and is refused by
        torch when writing. Views of an empty storage would crash the process instead.
        """
        nothing = not_a_number(dtype, device)
        for slot, leaf in self:
            leaf.data = nothing.expand(slot.shape)
        self._noted, self._whole = [], None

    def point_at_pieces(self, shard: Tensor) -> None:
        """Let each be this rank's piece of it, one-dimensional."""
        for index, (_, leaf) in enumerate(self):
            leaf.data = self.piece(shard.data, index)
        self._whole = None
        self._note()

    def _note(self) -> None:
        self._noted = [(leaf.data_ptr(), leaf._version) for _, leaf in self]

    # What was done to them

    def take_back_edits(self, shard: Tensor) -> None:
        """Copy what was edited since, in place or by setting `.data`, into the shard.

        Args:
            shard: This rank's shard.

        Raises:
            NotGatheredError: If `.data` was set to a tensor of another size than the piece.
        """
        for index, noted in enumerate(self._noted):
            slot, leaf = self._layout.slots[index], self.originals[index].parameter
            if (leaf.data_ptr(), leaf._version) == noted:
                continue
            self._noted[index] = leaf.data_ptr(), leaf._version
            if self._whole is not None and leaf.numel() == slot.numel:
                self._take_back_whole(index, shard, self._whole)
                continue
            piece = self.piece(shard.data, index)
            if leaf.numel() != piece.numel():
                raise NotGatheredError.at(
                    f"'{slot.name}'",
                    expected=f"this rank's piece of it, of shape {tuple(piece.shape)}",
                    found=f"data of shape {tuple(leaf.shape)}",
                    fix="Set whole weights inside summon_full_params().",
                )
            if leaf.data_ptr() != piece.data_ptr():
                piece.copy_(leaf.data.reshape(-1))
                leaf.data = piece

    def _take_back_whole(self, index: int, shard: Tensor, full: Tensor) -> None:
        """Copy what was edited of one whole parameter into the shard, and into the full tensor."""
        slot, leaf = self._layout.slots[index], self.originals[index].parameter
        inner, _, numel = self._layout.overlap(slot, self._group_rank)
        view, found = full[slot.offset : slot.stop], leaf.data.reshape(-1)
        if found.data_ptr() != view.data_ptr():
            view.copy_(found)
        piece, mine = self.piece(shard.detach(), index), found[inner : inner + numel]
        kept = mine == piece.to(mine)
        if not bool(kept.all()):
            with torch.no_grad():  # what was not edited keeps digits that `full` may not have
                piece.copy_(torch.where(kept, piece.to(mine.device), mine))

    def take_back_data(self, full: Tensor) -> None:
        """Copy the values of parameters whose `.data` was set to another tensor.

        Args:
            full: The full tensor that they were views of.

        Raises:
            SummonContextError: If one has another shape than before.
        """
        for slot, leaf in self:
            view, found = full[slot.offset : slot.stop], leaf.data
            if found.shape != slot.shape:
                raise SummonContextError.at(
                    f"'{slot.name}'",
                    expected=f"the shape {slot.shape}, as before",
                    found=f"{tuple(found.shape)}",
                    fix="Inside summon_full_params values may change, shapes may not.",
                )
            if slot.numel and found.data_ptr() != view.data_ptr():
                view.copy_(found.reshape(-1))
        self.point_at(full)
