"""Full parameters for a while: what `summon_full_params` does.

Inside the context every module holds its parameters again, registered and named as before
wrapping. Writes persist as a whole or not at all: on the way out every rank is asked what it
holds, and a write on some ranks only is reported instead of being cut into a patchwork.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref.collectives import all_reduce, gather_versions_of_my_slice
from fsdp_ref.errors import SummonContextError, SummonDisagreementError
from fsdp_ref.flat_param import FlatParameter
from fsdp_ref.recording import record
from fsdp_ref.states import Phase, ShardState
from fsdp_ref.unit import Unit


class RegisteredNames:
    """Remembers which parameters each module registered, and in which order.

    While sharded, a module finds its parameters in its `__dict__`, so that `parameters()`
    yields flat parameters only.
    """

    def __init__(self, wrapper: nn.Module, flat_params: Sequence[FlatParameter]) -> None:
        """Take the parameters out of their modules' registers; ``wrapper`` registers the flat ones.

        The first is called ``_flat_param``, later ones ``_flat_param_1`` and so on.
        """
        names = ["_flat_param", *(f"_flat_param_{n}" for n in range(1, len(flat_params)))]
        self._wrapper = wrapper
        self._flat = dict(zip(names, flat_params, strict=False))
        self._managed: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._order: dict[nn.Module, list[str]] = {}
        for flat_param in flat_params:
            for original in flat_param._originals:
                for module, attribute, _ in original.places:
                    self._managed.setdefault(module, {})[attribute] = original.parameter
        for module in self._managed:
            self._order[module] = list(module._parameters)
        self.hide()

    def hide(self) -> None:
        """Move the parameters from the registers to the modules' attributes."""
        self._wrapper._parameters.update(self._flat)
        for module, parameters in self._managed.items():
            for attribute, parameter in parameters.items():
                module._parameters.pop(attribute, None)
                module.__dict__[attribute] = parameter

    def show(self) -> None:
        """Register the parameters again, under their old names and in their old order."""
        for name in self._flat:
            self._wrapper._parameters.pop(name, None)
        for module, parameters in self._managed.items():
            registered = {**module._parameters, **parameters}
            for attribute in parameters:
                module.__dict__.pop(attribute, None)
            module._parameters.clear()
            module._parameters.update({name: registered[name] for name in self._order[module]})

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Register the parameters for as long as the context is open."""
        self.show()
        try:
            yield
        finally:
            self.hide()


@contextmanager
def full_parameters(units: Sequence[Unit], *, writeback: bool) -> Iterator[None]:
    """Unshard ``units`` and register their original parameters. Collective.

    Args:
        units: Units of one tree, in the same order on all ranks.
        writeback: Whether edits persist; every rank has to make the same ones.

    Yields:
        Nothing; the parameters are in their modules.

    Raises:
        SummonContextError: If a unit is summoned already, or is inside its forward.
        SummonDisagreementError: If ranks wrote different values; nothing is written then.
    """
    for unit in units:
        _refuse_when_busy(unit)
    kept = [unit for unit in units if unit.state is ShardState.UNSHARDED]
    for unit in units:
        unit.unshard()
        unit.summoned = True
        unit.registered.show()
    with ExitStack() as stack:
        for unit in units:
            stack.callback(_put_back, unit, unit in kept)
        yield
        if writeback:
            write_back(units)


def _put_back(unit: Unit, keep: bool) -> None:
    unit.registered.hide()
    unit.summoned = False
    changed = unit._gathered != unit.generations()
    if changed or not keep:
        unit.reshard()


def _refuse_when_busy(unit: Unit) -> None:
    if unit.summoned or unit.phase is Phase.FORWARD:
        raise SummonContextError.at(
            unit.where,
            expected="a unit that is neither summoned nor inside its forward",
            found="summon_full_params entered again" if unit.summoned else "a forward under way",
            fix="Leave the inner context, or open one context around everything.",
        )


def write_back(units: Sequence[Unit]) -> None:
    """Copy edits into the shards if all ranks of each unit hold the same values. Collective."""
    disagreeing, changed = [], []
    for unit in units:
        for flat_param in unit.flat_params:
            versions = gather_versions_of_my_slice(flat_param._full, unit.group, tag=unit.index * 2)
            record(unit.name, unit.phase.value, "all-to-all",
                   bytes_on_wire=(unit.group.size - 1) * versions[0].nbytes,
                   group=unit.group.ranks, dtype=versions[0].dtype)  # fmt: skip
            mine = versions[unit.group.rank]
            verdict = torch.tensor(
                [
                    int(not all(_same(mine, version) for version in versions)),
                    int(not _same(mine, flat_param.data)),
                ],
                device=flat_param.device,
            )
            all_reduce(verdict, dist.ReduceOp.MAX, unit.group)
            if verdict[0]:
                disagreeing.append(unit)
            if verdict[1]:
                changed.append((flat_param, mine))
    if disagreeing:
        names = sorted({unit.where for unit in disagreeing})
        raise SummonDisagreementError.at(
            "summon_full_params",
            expected="the same values written on every rank",
            found=f"ranks that differ in {', '.join(names)}",
            fix="Make the same edit on every rank (same seed, no `if rank == 0`); the weights "
            "are as they were before the context.",
        )
    for flat_param, mine in changed:
        with torch.no_grad():
            flat_param.copy_(mine)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare bit by bit, so that NaN equals NaN and 0 differs from -0."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
