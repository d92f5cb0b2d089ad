"""Accumulating gradients, with and without `no_sync`, gives the sum that plain PyTorch gives."""

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import timeline
from fsdp_ref.errors import RootOnlyError
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import (
    WRAPPINGS,
    assert_equal_gradients,
    assert_equal_weights,
    assert_sharded,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)

FACTORS = (1.0, 0.5, 2.0)


def accumulate(wrapping: str, quiet: tuple[bool, ...]) -> None:
    """Three backwards per step, some inside `no_sync`; two steps of AdamW. On ranks."""
    plain, model = seeded(), WRAPPINGS[wrapping](seeded())
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        plain_optimizer.zero_grad()
        optimizer.zero_grad()
        for factor, inside in zip(FACTORS, quiet, strict=True):
            mean_square(plain(factor * whole_batch())).backward()
            if inside:
                with model.no_sync():
                    mean_square(model(factor * my_part(whole_batch()))).backward()
            else:
                mean_square(model(factor * my_part(whole_batch()))).backward()
            assert_sharded(model)
        assert_equal_gradients(model, plain)
        plain_optimizer.step()
        optimizer.step()
    assert_equal_weights(model, plain)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize(
    "quiet",
    [(False, False, False), (True, True, False), (False, True, False)],
    ids=["never", "all but the last", "in the middle"],
)
def test_accumulated_gradients_equal_plain_pytorch(quiet, wrapping, world_size):
    run_ranks(world_size, accumulate, wrapping, quiet)


def collectives_inside() -> tuple[list[str], list[str], list[tuple[int, int]]]:
    model, x = nested(seeded()), my_part(whole_batch())
    with model.no_sync(), timeline() as inside:
        mean_square(model(x)).backward()
    sizes = [(p.grad.numel(), p._layout.padded_numel) for p in model.parameters()]
    with timeline() as outside:
        mean_square(model(x)).backward()
    return inside.lines("reduce-scatter"), outside.lines("reduce-scatter"), sizes


def test_inside_nothing_is_reduced_and_outside_every_unit_once():
    for inside, outside, sizes in run_ranks(2, collectives_inside):
        assert inside == []
        assert all(numel == whole for numel, whole in sizes)  # of the whole unit, unreduced
        assert sorted(outside) == [
            "reduce-scatter layers.0",
            "reduce-scatter layers.1",
            "reduce-scatter layers.2",
            "reduce-scatter root",
        ]


def zero_grad_forgets(how: str) -> None:
    """What was accumulated inside `no_sync` is a gradient like any other: zero_grad drops it."""
    plain, model = seeded(), nested(seeded())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        mean_square(model(5 * my_part(whole_batch()))).backward()
    if how == "optimizer":
        optimizer.zero_grad()
    else:
        model.zero_grad()
    mean_square(model(my_part(whole_batch()))).backward()
    mean_square(plain(whole_batch())).backward()
    assert_equal_gradients(model, plain)


@pytest.mark.parametrize("how", ["optimizer", "model"])
def test_zero_grad_drops_what_no_sync_accumulated(how):
    run_ranks(2, zero_grad_forgets, how)


def a_unit_used_only_inside() -> None:
    """The first backward uses all units, the reducing one stops before the first layer."""

    class Shortcut(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
            return self.inner.head(x) if skip else self.inner(x)

    plain, inner = Shortcut(seeded()), seeded()
    for index, layer in enumerate(inner.layers):
        inner.layers[index] = FSDP(layer)
    model = FSDP(Shortcut(inner))
    mean_square(plain(whole_batch(), False)).backward()
    mean_square(plain(whole_batch(), True)).backward()
    with model.no_sync():
        mean_square(model(my_part(whole_batch()), False)).backward()
    mean_square(model(my_part(whole_batch()), True)).backward()
    assert_equal_gradients(model, plain)


def test_units_that_only_ran_inside_are_reduced_as_well():
    run_ranks(2, a_unit_used_only_inside)


def inner_unit() -> None:
    model = nested(seeded())
    with (
        provokes(FSDP.no_sync, RootOnlyError, match=r"unit 'layers.1': .*no_sync\(\) on the out"),
        model.layers[1].no_sync(),
    ):
        pass


def test_only_the_root_has_it():
    run_ranks(2, inner_unit)


def an_exception_inside() -> None:
    plain, model = seeded(), nested(seeded())
    with pytest.raises(RuntimeError), model.no_sync():
        model(torch.ones(2, 99, dtype=torch.float64))
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert_equal_gradients(model, plain)


def test_after_an_exception_inside_gradients_are_reduced_again():
    run_ranks(2, an_exception_inside)
