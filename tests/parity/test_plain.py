"""Training sharded gives the numbers of plain PyTorch in one process on the whole batch."""

import functools

import pytest
import torch

from tests.models import CASES
from tests.parity.training import OPTIMIZERS, Trace, assert_same, plain, sharded
from tests.ranks import run_ranks

# Sums run in another order on ranks. In double precision that is all that may differ.
TOLERANCE = 1e-10

RUNS = [
    (case, wrapping, world_size)
    for case in CASES
    for wrapping in ("one unit", "by class", "by size", "by hand")
    for world_size in (1, 2, 3, 4)
    if not (case == "dtypes" and wrapping != "one unit")  # it names no classes
    if not (case == "tied" and wrapping == "by size")  # would split the tie: refused
    # Batch norm normalises each rank's part by itself; test_ddp.py compares the rest.
    if not (case == "conv" and world_size > 1)
    # These two make units in another way than by class, not other units.
    if not (wrapping in ("by size", "by hand") and world_size in (1, 4))
]


@functools.cache
def reference(case: str, optimizer: str) -> Trace:
    return plain(case, optimizer, torch.float64)


def both_optimizers(case: str, wrapping: str) -> dict[str, Trace]:
    return {name: sharded(case, name, torch.float64, wrapping) for name in OPTIMIZERS}


@pytest.mark.parametrize(("case", "wrapping", "world_size"), RUNS)
def test_training_sharded_equals_training_in_one_process(case, wrapping, world_size):
    per_rank = run_ranks(world_size, both_optimizers, case, wrapping)
    for name in OPTIMIZERS:
        for trace in per_rank:
            assert_same(
                trace[name],
                reference(case, name),
                tolerance=1e-5 if case == "dtypes" else TOLERANCE,
                without=CASES[case].unused if wrapping == "one unit" else None,
                buffers=True,
            )
