"""Training sharded gives the numbers of DistributedDataParallel on the same ranks and data."""

import pytest
import torch
import torch.distributed as dist

from tests.models import CASES
from tests.parity.training import OPTIMIZERS, Trace, assert_same, ddp, sharded
from tests.ranks import run_ranks


def settings(world_size: int) -> tuple[torch.dtype, float]:
    """Return dtype and tolerance.

    Two numbers have one sum, whatever the order, so up to two ranks agree with DDP bit for
    bit. Three and more are added in another order than DDP's ring does. There AdamW would blow
    rounding up wherever the true gradient is zero (a key's bias in attention, a bias before
    batch norm), so those runs are in double precision, where rounding stays far below its eps.
    """
    return (torch.float32, 0.0) if world_size <= 2 else (torch.float64, 1e-9)


def both_ways(case: str, wrapping: str) -> dict[str, tuple[Trace, Trace]]:
    dtype, _ = settings(dist.get_world_size())
    return {
        name: (sharded(case, name, dtype, wrapping), ddp(case, name, dtype)) for name in OPTIMIZERS
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("wrapping", ["one unit", "by class"])
@pytest.mark.parametrize("case", [name for name in CASES if name != "dtypes"])
def test_training_sharded_equals_ddp_and_bit_for_bit_on_up_to_two_ranks(case, wrapping, world_size):
    for traces in run_ranks(world_size, both_ways, case, wrapping):
        for mine, theirs in traces.values():
            assert_same(
                mine,
                theirs,
                tolerance=settings(world_size)[1],
                without=CASES[case].unused if wrapping == "one unit" else None,
            )


def sharded_in_single_precision(case: str, optimizer: str) -> Trace:
    return sharded(case, optimizer, torch.float32, "by class")


def test_a_wrong_factor_would_be_noticed():
    """The comparison itself: a gradient off by one in a million must not pass."""
    (trace, same) = run_ranks(2, sharded_in_single_precision, "uneven", "sgd")
    assert_same(trace, same, tolerance=0.0)
    for name, gradient in trace.gradients[0].items():
        if gradient is not None and gradient.numel():
            trace.gradients[0][name] = gradient * (1 + 1e-6)
    with pytest.raises(AssertionError, match="bits differ"):
        assert_same(trace, same, tolerance=0.0)
