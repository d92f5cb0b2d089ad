"""Weights in and out of a wrapped module: whole ones for a while, state dicts, `apply`, `to`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

from torch import Tensor, nn

from fsdp_ref.full_params import full_parameters
from fsdp_ref.state_dict import (
    clean_name,
    fill_in_full_values,
    insert_wrapped,
    restore_dtypes,
    strip_wrapped,
    take_own_values,
)
from fsdp_ref.unit_module import UnitModule


class WeightAccess(UnitModule):
    """A wrapper whose weights can be seen, edited, saved and loaded as a whole."""

    @contextmanager
    def summon_full_params(self, recurse: bool = True, writeback: bool = True) -> Iterator[None]:
        """Give every module its full parameters back while the context is open. Collective.

        Inside, names, shapes and order are those of the model before wrapping. It gathers all
        units at once, so the whole model has to fit in memory. Also callable on the class, with
        any module that contains units: `FullyShardedDataParallel.summon_full_params(model)`.

        Args:
            recurse: Include the inner units.
            writeback: Keep edits. All ranks have to make the same ones.

        Yields:
            Nothing; the parameters are in their modules.

        Raises:
            SummonContextError: If entered again inside itself, or during a forward.
            SummonDisagreementError: If ranks wrote different values; nothing is kept then.

        Tip: Make the same edit on every rank
            Each rank keeps only its own part of what it wrote. An edit on one rank alone would
            leave a weight that is half old and half new; here it raises, and nothing is kept.

            Proof: tips/edit_inside_summon
        """
        parts = UnitModule.fsdp_modules(self)
        parts = [part for part in parts if recurse or part is self]
        groups = [part._set_up().groups for part in parts]
        units = [part._unit for part in parts]
        with full_parameters(units, groups[0] if groups else [], writeback=writeback):
            yield

    def state_dict(  # type: ignore[override]  # torch declares overloads, one deprecated
        self,
        *,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return the full weights under the plain model's names. Collective.

        Every rank calls it and every rank gets the whole dict; it gathers one unit at a time
        and leaves the model as it was. Values own their memory.

        Args:
            destination: Fill this dict instead of a new one.
            prefix: Put this before every key.
            keep_vars: Leave `requires_grad` as it is on the values.

        Returns:
            A dict that loads into the plain model, and back into this one at any number of
            ranks.

        Tip: Call state_dict on every rank, write on one
            The full weights exist nowhere until all ranks bring their shards together. Calling
            `state_dict` on one rank only waits for the others until the process group's time
            limit.

            Proof: tips/save_on_every_rank
        """
        self._set_up()
        into: dict[str, Any] = {} if destination is None else {"destination": destination}
        with self._unit.registered.names_shown():
            result: dict[str, Any] = super().state_dict(prefix=prefix, keep_vars=True, **into)
        strip_wrapped(result, prefix)
        fill_in_full_values(self._unit, result, prefix)
        restore_dtypes(result, prefix, self._buffer_dtypes)
        if not keep_vars:
            for key, value in result.items():
                if isinstance(value, Tensor) and key.startswith(prefix):
                    result[key] = value.detach()
        return result

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load full weights under the plain model's names, on every rank. Local.

        Each rank copies its own part of every value. It works at any number of ranks. Give all
        ranks the same values: nothing compares them.

        Args:
            state_dict: Full values, as from the plain model or from `state_dict`.
            strict: Raise if keys are missing or unexpected.
            assign: Take over buffers instead of copying them; parameters are copied always.

        Returns:
            The missing and the unexpected keys.

        Raises:
            RuntimeError: If `strict` and the keys differ, or if a shape differs.
        """
        result = super().load_state_dict(state_dict, strict=False, assign=assign)
        for keys in (result.missing_keys, result.unexpected_keys):
            keys[:] = [clean_name(key) for key in keys]
        if strict and (result.missing_keys or result.unexpected_keys):
            raise RuntimeError(
                f"{self._unit.where}: missing keys {result.missing_keys}, unexpected keys "
                f"{result.unexpected_keys}. With strict=False what fits is loaded."
            )
        return result

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # torch calls this before it descends into the wrapped module, which then finds only
        # its buffers and the keys of inner units.
        take_own_values(self._unit, state_dict, prefix, missing_keys, error_msgs)
        insert_wrapped(state_dict, prefix)

    # Behaving like the module inside

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call ``fn`` on every module, with full parameters, and keep what it writes. Collective.

        Args:
            fn: Called on each module, as by `nn.Module.apply`; must do the same on all ranks.

        Returns:
            The model itself.
        """
        if self._unit.summoned:  # by the enclosing unit, whose apply has come down to here
            return super().apply(fn)
        with self.summon_full_params():
            return super().apply(fn)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # What `to`, `half`, `cuda` and their like call, with a function of one tensor. The
        # shards follow it as parameters do; the full tensors are then made anew to match.
        self.reshard()
        # torch leaves `_apply` untyped
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for flat_param in self._unit.flat_params:
            flat_param.point_originals_at_full()
        self._unit.registered.follow_dtype_and_device()
        return self
