"""Training sharded gives the numbers of DistributedDataParallel on the same ranks and data."""

import pytest
import torch

from tests.models import CASES
from tests.parity.training import OPTIMIZERS, Trace, assert_same, ddp, sharded
from tests.ranks import run_ranks

# Two numbers have one sum, whatever the order, so two ranks agree bit for bit with DDP.
# Three and more are added in another order than DDP's ring does.
TOLERANCE = {1: 0.0, 2: 0.0, 3: 3e-5, 4: 3e-5}


def both_ways(case: str, wrapping: str) -> dict[str, tuple[Trace, Trace]]:
    return {
        name: (sharded(case, name, torch.float32, wrapping), ddp(case, name, torch.float32))
        for name in OPTIMIZERS
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("wrapping", ["one unit", "by class"])
@pytest.mark.parametrize("case", [name for name in CASES if name != "dtypes"])
def test_training_sharded_equals_ddp_bit_for_bit_on_up_to_two_ranks(case, wrapping, world_size):
    for traces in run_ranks(world_size, both_ways, case, wrapping):
        for mine, theirs in traces.values():
            assert_same(
                mine,
                theirs,
                tolerance=TOLERANCE[world_size],
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
