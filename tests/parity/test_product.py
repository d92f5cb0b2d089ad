"""Whatever a reader chooses, training gives the numbers of plain PyTorch, DDP and torch's FSDP.

A selection in which any three choices occur together runs always; the whole product with `--full`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp as torch_fsdp

from fsdp_ref.flat_gradient import FlatGradient
from tests.models import part
from tests.parity import product
from tests.parity.product import CHOICES, MODELS, PRECISIONS, Config, Report
from tests.ranks import run_ranks

SELECTION = sorted((Config(*row) for row in product.covering(3, CHOICES)), key=str)
LONG = {"timeout": 900.0, "dist_timeout": 60.0}  # many trainings in one set of ranks


def test_the_selection_has_any_three_choices_together_and_is_small():
    columns = list(CHOICES.values())
    for where in itertools.combinations(range(len(columns)), 3):
        rows = {
            tuple(list(vars(config).values())[column] for column in where) for config in SELECTION
        }
        assert rows == set(itertools.product(*(columns[column] for column in where)))
    whole = set(product.whole_product())
    assert len(whole) == 5 * 6 * 5 * 2 * 3 * 3 * 2 * 4
    assert len(SELECTION) < len(whole) / 100


# ---------------------------------------------------------------- close to all of them


def assert_all_right(reports: list[Report], configs: list[Config]) -> None:
    for report in reports:
        assert report.trained == len(configs)
        assert not report.wrong, "\n".join(report.wrong)
    assert sum(reports[0].compared.values()) >= len(configs)


@pytest.mark.parametrize("world_size", CHOICES["world_size"])
def test_training_sharded_equals_the_references_for_any_three_choices(world_size):
    configs = [config for config in SELECTION if config.world_size == world_size]
    reports = run_ranks(world_size, product.compare_all, configs, **LONG)
    assert_all_right(reports, configs)
    for name in ("plain", "DDP", "FSDP1", "FSDP2"):
        assert reports[0].compared[name], f"nothing was compared with {name}"


WHOLE = list(itertools.product(CHOICES["world_size"], CHOICES["model"], CHOICES["precision"]))


@pytest.mark.full
@pytest.mark.parametrize(("world_size", "model", "precision"), WHOLE)
def test_training_sharded_equals_the_references_for_all_choices(
    world_size, model, precision, capsys
):
    fixed = {"world_size": world_size, "model": model, "precision": precision}
    configs = list(product.whole_product(**fixed))
    reports = run_ranks(world_size, product.compare_all, configs, **LONG)
    with capsys.disabled():
        number = 1 + WHOLE.index((world_size, model, precision))
        print(
            f"\n[{number} of {len(WHOLE)}] {world_size} rank(s), {model}, {summary(reports)}",
            end=" ",
        )
    assert_all_right(reports, configs)


def summary(reports: list[Report]) -> str:
    """Say in one line what was compared, and how far the furthest was off."""
    gaps: Counter[tuple[str, str]] = Counter()
    for report in reports:
        gaps |= Counter(report.gaps)  # the larger of two
    ((precision, reference), gap), *_ = gaps.most_common(1) or [(next(iter(report.gaps)), 0.0)]
    return (
        f"{precision}: {reports[0].trained} trained, {sum(reports[0].compared.values())} compared, "
        f"the furthest {gap:.1e} off {reference} (limit {PRECISIONS[precision].tolerance:g})"
    )


# ---------------------------------------------------------------- equal to DDP, bit for bit

# Every parameter of these models is used by every rank.
BITS: dict[str, tuple[Any, ...]] = {
    **CHOICES,
    "world_size": (2,),
    "model": ("mlp", "transformer", "conv"),
    "precision": ("single",),
    "optimizer": ("sgd", "adamw, default eps"),
}


def assert_same_bits(configs: list[Config]) -> None:
    for wrong in run_ranks(2, product.compare_bits, configs, **LONG):
        assert not wrong, "\n".join(wrong)


def test_at_two_ranks_in_single_precision_all_bits_are_those_of_ddp():
    assert_same_bits([Config(*row) for row in product.covering(3, BITS)])


@pytest.mark.full
@pytest.mark.parametrize("model", BITS["model"])
@pytest.mark.parametrize("strategy", BITS["strategy"])
def test_at_two_ranks_in_single_precision_all_bits_are_those_of_ddp_for_all_choices(
    strategy, model
):
    choices = {**BITS, "model": (model,), "strategy": (strategy,)}
    assert_same_bits([Config(*row) for row in itertools.product(*choices.values())])


# ---------------------------------------------------------------- the comparison itself


def train_wrongly(factors: dict[str, float]) -> dict[str, tuple[Report, int]]:
    """Compare with every reduced gradient scaled by a factor, for each precision."""
    accumulate, found = FlatGradient.accumulate, {}
    for precision, factor in factors.items():
        FlatGradient.accumulate = lambda self, shard, f=factor: accumulate(self, shard * f)
        configs = [
            Config(2, model, precision, strategy, False, "off", None, False, "sgd")
            for model, strategy in (("mlp", "FULL_SHARD"), ("transformer", "NO_SHARD"))
        ]
        found[precision] = product.compare_all(configs), len(product.compare_bits(configs))
    return found


def test_a_wrong_factor_would_be_noticed():
    factors = {precision: 1 + 10 * dtypes.tolerance for precision, dtypes in PRECISIONS.items()}
    found = run_ranks(2, train_wrongly, factors, **LONG)[0]
    assert found.keys() == PRECISIONS.keys()
    for precision, (report, different_bits) in found.items():
        assert len(report.wrong) == sum(report.compared.values()) >= 2, precision
        assert different_bits == 2


def test_a_difference_in_names_or_a_nan_would_be_noticed():
    first = {"a": torch.zeros(3), "b": torch.zeros(2)}
    moved = {"a": torch.ones(3), "b": torch.zeros(2)}
    expected = product.Outcome([1.0], moved)
    assert product.largest_gap(expected, expected, first) == ("weight a", 0.0)
    lacking = product.Outcome([1.0], {"a": torch.ones(3)})
    assert product.largest_gap(lacking, expected, first)[1] == float("inf")
    assert product.largest_gap(lacking, expected, first, without="b")[1] == 0.0
    where, gap = product.largest_gap(product.Outcome([float("nan")], moved), expected, first)
    assert where == "loss"
    assert not gap <= 1.0


def how_low() -> dict[str, float]:
    """How far each low precision ends from single precision, as a part of the way."""
    single = product.plain("mlp", "sgd", torch.float32)
    initial = product.initial_weights("mlp", torch.float32)
    return {
        precision: product.largest_gap(
            product.sharded(
                Config(2, "mlp", precision, "FULL_SHARD", False, "off", None, False, "sgd")
            ),
            single,
            initial,
        )[1]
        for precision in PRECISIONS
        if precision != "double"
    }


def test_each_low_precision_is_in_use():
    gaps = run_ranks(2, how_low)[0]
    assert gaps.pop("single") < PRECISIONS["single"].tolerance
    assert len(gaps) == 4
    for precision, gap in gaps.items():
        assert gap > PRECISIONS["single"].tolerance, f"{precision} is single precision"


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_some_rank_never_uses_some_expert_and_each_is_used_somewhere(world_size):
    (batch,) = MODELS["experts"].batches(1, torch.float64)
    used = [set(part(batch, rank, world_size)[:, 0].tolist()) for rank in range(world_size)]
    assert set.union(*used) == {0.0, 1.0, 2.0}
    assert any(len(mine) < 3 for mine in used)


# ---------------------------------------------------------------- what references cannot do


def refusals() -> list[str]:
    """What torch's first FSDP says to arguments that this package accepts on a CPU."""
    said = []
    for arguments, _ in product.REFUSED_BY_FSDP1:
        try:
            model = torch_fsdp.FullyShardedDataParallel(
                MODELS["mlp"].model(torch.float32),
                **{"device_id": torch.device("cpu"), **arguments},
            )
            product.run_steps(model, "mlp", "sgd", torch.float32)
            said.append("nothing")
        except Exception as error:  # it raises many kinds
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_what_is_left_out_for_torchs_first_fsdp_is_what_it_refuses():
    for said, (arguments, expected) in zip(
        run_ranks(2, refusals)[0], product.REFUSED_BY_FSDP1, strict=True
    ):
        assert expected in said, f"{arguments}: {said}"


def batch_norm_in_bf16() -> str:
    try:
        product.torch_fsdp2("conv", "sgd", "bf16, reduced in fp32", "FULL_SHARD")
    except RuntimeError as error:
        return str(error)
    return f"nothing, on rank {dist.get_rank()}"


def test_what_is_left_out_for_torchs_second_fsdp_is_what_it_refuses():
    assert "BFloat16" in run_ranks(1, batch_norm_in_bf16)[0]


def test_every_reason_to_leave_out_a_comparison_is_needed_and_never_leaves_out_all():
    for gap in product.GAPS:
        assert any(gap.concerns(config) for config in SELECTION), gap.reason
    for config in SELECTION:
        lacking = [gap.references for gap in product.GAPS if gap.concerns(config)]
        assert len({name for names in lacking for name in names}) < 4, config
