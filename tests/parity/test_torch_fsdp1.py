"""Training sharded gives the numbers of torch's own FullyShardedDataParallel.

torch's class runs on the CPU when it is given `device_id=torch.device("cpu")`.
"""

import pytest
import torch

from tests.models import CASES
from tests.parity.training import OPTIMIZERS, Trace, assert_same, sharded, torch_fsdp1
from tests.ranks import run_ranks

# torch divides before and after the reduction and adds in another order. In double precision
# that is all that may differ.
TOLERANCE = 1e-9


def both_ways(case: str, nested: bool) -> dict[str, tuple[Trace, Trace]]:
    wrapping = "by class" if nested else "one unit"
    return {
        name: (
            sharded(case, name, torch.float64, wrapping),
            torch_fsdp1(case, name, torch.float64, nested),
        )
        for name in OPTIMIZERS
    }


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("nested", [False, True], ids=["one unit", "nested"])
@pytest.mark.parametrize("case", [name for name in CASES if name != "dtypes"])
def test_training_sharded_equals_torch_fsdp1(case, nested, world_size):
    for traces in run_ranks(world_size, both_ways, case, nested):
        for mine, theirs in traces.values():
            assert_same(mine, theirs, tolerance=TOLERANCE, without=CASES[case].unused)
