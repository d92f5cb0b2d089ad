"""What happens when ranks do different things."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors
from tests.parity.training import full_gradients, full_weights
from tests.questions.claims import (
    loss,
    on_ranks,
)
from tests.ranks import run_ranks
from tests.toy import (
    WIDTH,
    assert_equal_gradients,
    assert_near,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)


class Branches(nn.Module):
    """Each half of the batch may take another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return self.head(torch.tanh(self.branches[choice](x)))


def branch_units(model: Branches) -> FSDP:
    for index, branch in enumerate(model.branches):
        model.branches[index] = FSDP(branch)
    return FSDP(model)


# pytorch/pytorch#132068, pytorch/pytorch#84175
@on_ranks(2)
def test_alternating_branches_on_all_ranks_alike_train_like_plain_pytorch():
    plain, model = seeded(Branches), branch_units(seeded(Branches))
    for choice in (0, 1, 1, 0):
        plain.zero_grad()
        model.zero_grad()
        mean_square(plain(whole_batch(), choice)).backward()
        mean_square(model(my_part(whole_batch()), choice)).backward()
        assert_equal_gradients(model, plain)


def different_branches() -> None:
    model = branch_units(seeded(Branches))
    model(whole_batch(), 0)
    model.reshard()
    with pytest.raises(errors.SilentRanksError, match=r"unit 'branches\.[01]'"):
        model(my_part(whole_batch()), dist.get_rank())


# pytorch/pytorch#75902
def test_ranks_in_different_branches_get_an_error_instead_of_wrong_numbers():
    run_ranks(2, different_branches, dist_timeout=3.0)


def export_on_one_rank() -> None:
    model = nested(seeded())
    model(whole_batch())
    if dist.get_rank() == 0:
        with pytest.raises(errors.SilentRanksError, match="no answer"):
            model.state_dict()
    else:
        time.sleep(4)


# pytorch/pytorch#73383
def test_state_dict_on_one_rank_only_ends_in_an_error_after_the_time_limit():
    run_ranks(2, export_on_one_rank, dist_timeout=4.0)


# deepspeedai/DeepSpeed#4808
@on_ranks(2)
def test_experts_chosen_per_rank_work_when_the_whole_block_is_one_unit():
    plain, model = seeded(Branches), FSDP(seeded(Branches))
    halves = whole_batch().chunk(2)
    (sum(mean_square(plain(half, choice)) for choice, half in enumerate(halves)) / 2).backward()
    rank = dist.get_rank()
    mean_square(model(halves[rank], rank)).backward()
    assert_equal_gradients(model, plain)


def with_original_parameters(model: nn.Module) -> FSDP:
    return FSDP(model, use_orig_params=True)


# pytorch/pytorch#87308
@on_ranks(2)
def test_an_unused_parameter_decays_as_part_of_a_flat_parameter_and_not_otherwise():
    rate, decay = 0.1, 0.5
    wraps = {FSDP: 1 - rate * decay, branch_units: 1.0, with_original_parameters: 1.0}
    for wrap, factor in wraps.items():
        model = wrap(seeded(Branches))
        before = full_weights(model)["branches.1.weight"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
        mean_square(model(my_part(whole_batch()), 0)).backward()
        optimizer.step()
        assert_near(full_weights(model)["branches.1.weight"], factor * before, "unused")


def ranks_have_a_batch(batch: Tensor | None) -> bool:
    """Return whether every rank still has one. Collective."""
    flag = torch.tensor(int(batch is not None))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


@torch.no_grad()
def validate_uneven() -> None:
    plain, model = seeded(), nested(seeded())
    rank = dist.get_rank()
    batches = iter(whole_batch()[: 3 + 2 * rank].split(1))
    seen = 0
    while ranks_have_a_batch(batch := next(batches, None)):
        assert_near(model(batch), plain(batch), "output")
        seen += 1
    assert seen == 3
    for batch in batches:  # rank 1 alone has one left
        with pytest.raises(errors.SilentRanksError):
            model(batch)


# PrimeIntellect-ai/prime-rl#2515
def test_ranks_with_unequal_numbers_of_batches_stop_together_when_they_ask_or_time_out():
    run_ranks(2, validate_uneven, dist_timeout=4.0)


class WithImages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.vision = FSDP(nn.Linear(3, WIDTH).double())
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, image: Tensor | None) -> Tensor:
        if image is None:  # take part all the same, without effect
            return self.head(x + 0.0 * self.vision(torch.zeros(1, 3).double()).sum())
        return self.head(x + self.vision(image))


# pytorch/pytorch#152964
@on_ranks(2)
def test_a_rank_without_images_takes_part_with_a_dummy_that_counts_as_zero():
    torch.manual_seed(0)
    model = FSDP(WithImages().double())
    weights = full_weights(model)
    halves, image = whole_batch().chunk(2), whole_batch(3)[:6]
    mean_square(model(halves[dist.get_rank()], image if dist.get_rank() == 0 else None)).backward()
    leaf = {name: weight.requires_grad_() for name, weight in weights.items()}
    seen = nn.functional.linear(image, leaf["vision.weight"], leaf["vision.bias"])
    output = nn.functional.linear(halves[0] + seen, leaf["head.weight"], leaf["head.bias"])
    mean_square(output).backward()  # what rank 0 does, alone
    for name in ("vision.weight", "vision.bias"):
        assert_near(full_gradients(model)[name], leaf[name].grad / 2, name)


# Tencent-Hunyuan/UniRL#45
@on_ranks(2)
def test_a_step_takes_as_long_on_every_rank_as_on_the_slowest():
    model, delay = nested(seeded()), 0.2
    loss(model).backward()
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == 0:
        time.sleep(delay)
    loss(model).backward()
    assert time.monotonic() - start >= delay
