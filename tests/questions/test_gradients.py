"""What a gradient is: clipped, accumulated, averaged, seen by hooks."""

from __future__ import annotations

import itertools
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, process_groups, timeline
from tests.parity.training import full_gradients, full_weights, units
from tests.questions.claims import (
    backward_beside,
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
    one_unit,
    seeded,
    whole_batch,
)

# ---------------------------------------------------------------- clipping


# pytorch/pytorch#72548, pytorch/torchtitan#766
@on_ranks(2)
def test_the_models_own_clipping_uses_the_true_norm_on_every_rank():
    plain, model = seeded(), nested(seeded())
    backward_beside(plain, model)
    true = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    local = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert_near(model.clip_grad_norm_(1e9), true, "norm")
    assert local < 0.99 * true


# pytorch/pytorch#149768
@on_ranks(2)
def test_clipping_is_right_for_tiny_norms():
    plain, model = seeded().float(), nested(seeded().float())
    batch = whole_batch().float()
    (1e-6 * mean_square(plain(batch))).backward()
    (1e-6 * mean_square(model(my_part(batch)))).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-7)
    model.clip_grad_norm_(1e-7)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-13)


def clip_beside_experts(group: str) -> None:
    """Experts differ from group to group: each counts, and so does the dense part, once."""
    torch.manual_seed(0)
    dense = nn.Linear(WIDTH, WIDTH)
    members = process_groups.rank_lists(group, 4)
    mine = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
    torch.manual_seed(1 + mine)
    expert = nn.Linear(WIDTH, 3)
    model = FSDP(nn.Sequential(dense, FSDP(expert, process_group=group)))
    x = whole_batch().float()[3 * dist.get_rank() :][:3]
    mean_square(model(x)).backward()
    norms = []
    for unit in FSDP.fsdp_modules(model):
        for flat_param in unit.parameters(recurse=False):
            norms.append(flat_param.grad.double().square().sum())
    total = torch.stack(norms).sum()  # shards do not overlap: within a group, or across groups
    dist.all_reduce(total)
    norm = model.clip_grad_norm_(1e9)
    torch.testing.assert_close(norm.double(), total.sqrt(), rtol=1e-6, atol=0)
    every = [torch.empty_like(norm) for _ in range(4)]
    dist.all_gather(every, norm)
    assert len({value.item() for value in every}) == 1


# pytorch/pytorch#180346 (strided groups), lab:self-expert-clip
@pytest.mark.parametrize("group", ["mod2", "self"])
def test_clipping_beside_experts_gives_one_norm_on_all_ranks(group):
    run_ranks(4, clip_beside_experts, group)


# Lightning-AI/pytorch-lightning#19235
@on_ranks(2)
def test_clipping_by_value_needs_only_the_shards():
    plain, model = seeded(), nested(seeded())
    backward_beside(plain, model)
    limit = 0.01
    for part in (plain, model):
        torch.nn.utils.clip_grad_value_(part.parameters(), limit)
    assert_equal_gradients(model, plain)


# ---------------------------------------------------------------- accumulation, averaging


# pytorch/torchtitan#1710, pytorch/pytorch#73784, huggingface/accelerate#2531
@on_ranks(2)
def test_accumulating_gives_the_same_sum_with_and_without_no_sync_and_costs_reductions():
    plain = seeded()
    for _ in range(3):
        loss(plain, whole=True).backward()
    for quiet, offload in itertools.product((True, False), (None, True)):
        model = FSDP(seeded(), cpu_offload=offload)
        with timeline() as seen:
            for index in range(3):
                with model.no_sync() if quiet and index < 2 else nullcontext():
                    loss(model).backward()
        assert len(seen.lines("reduce-scatter")) == (1 if quiet else 3)
        assert_equal_gradients(model, plain)
        assert [p.grad.numel() for p in model.parameters()] == [59]  # the shard's


# pytorch/pytorch#118298
@on_ranks(2)
def test_a_step_with_unreduced_gradients_only_is_refused():
    model = nested(seeded())
    before = full_weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        loss(model).backward()
    with pytest.raises(errors.UnsynchronizedStepError, match="no_sync"):
        optimizer.step()
    after = full_weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def rows_of_rank(counts: list[int]) -> Tensor:
    """Rank r's tokens, when ranks have unequal numbers of them."""
    return whole_batch()[: sum(counts)].split(counts)[dist.get_rank()]


def token_losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean(dim=1)


def against_token_mean(counts: list[int]) -> None:
    plain, right, naive = seeded(), nested(seeded()), nested(seeded())
    token_losses(plain, whole_batch()[: sum(counts)]).mean().backward()
    mine = rows_of_rank(counts)
    scale = dist.get_world_size() / sum(counts)
    (token_losses(right, mine).sum() * scale).backward()
    token_losses(naive, mine).mean().backward()
    assert_equal_gradients(right, plain)
    gap = (naive.clip_grad_norm_(1e9) - right.clip_grad_norm_(1e9)).abs()
    assert (gap > 1e-3) == (len(set(counts)) > 1)


# meta-pytorch/torchtune#2172, ChenmienTan/RL2#11, pytorch/torchtitan#1803
@pytest.mark.parametrize("counts", [[1, 3], [4, 4], [1, 3, 2, 2]])
def test_a_token_mean_needs_world_size_over_all_tokens_unless_counts_are_equal(counts):
    run_ranks(len(counts), against_token_mean, counts)


# verl-project/verl#5625
@on_ranks(2)
def test_one_token_count_serves_all_micro_batches_of_a_step():
    plain, model = seeded(), nested(seeded())
    batch = whole_batch()[:10]
    token_losses(plain, batch).mean().backward()
    for micro in batch.split([1, 5, 2, 2])[dist.get_rank() :: 2]:
        (token_losses(model, micro).sum() * 2 / 10).backward()
    assert_equal_gradients(model, plain)


# nvidia-cosmos/cosmos-predict1#122
@on_ranks(2)
def test_ranks_with_different_halves_of_a_batch_give_the_gradient_of_the_whole():
    plain, model = seeded(), nested(seeded())
    backward_beside(plain, model)
    assert_equal_gradients(model, plain)


# ---------------------------------------------------------------- hooks, names


# meta-pytorch/torchrec#4268
@on_ranks(2)
def test_only_post_accumulate_hooks_fire_and_see_the_shard_of_the_mean_gradient():
    plain, model = seeded(), one_unit(seeded())
    (flat_param,) = model.parameters()
    seen, never = [], []
    flat_param.register_hook(never.append)
    flat_param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for step in range(1, 3):
        plain.zero_grad()
        model.zero_grad()
        backward_beside(plain, model)
        assert (len(never), len(seen)) == (0, step)
    whole = torch.cat([p.grad.flatten() for p in plain.parameters()])
    mine = whole.split(59)[dist.get_rank()]  # of 117 elements; the last shard ends in padding
    assert_near(seen[-1][: mine.numel()], mine, "shard of the gradient")


# meta-pytorch/torchrec#4268
@on_ranks(2)
def test_hooks_of_original_parameters_fire_before_there_is_a_gradient():
    model, seen = nested(seeded(), use_orig_params=True), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    mean_square(model(my_part(whole_batch()))).backward()
    assert seen
    assert all(gradient is None for gradient in seen)
    assert any(parameter.grad is not None for parameter in model.parameters())


# pytorch/pytorch#120879
@on_ranks(2)
def test_norms_of_single_parameters_come_from_shards_with_one_collective():
    plain, model = seeded(), nested(seeded())
    backward_beside(plain, model)
    names, squares = [], []
    for prefix, unit in units(model):
        for flat_param in unit.parameters(recurse=False):
            layout, rank = flat_param._layout, flat_param._group.rank
            for slot in layout.slots:
                _, start, count = layout.overlap(slot, rank)
                squares.append(flat_param.grad[start : start + count].square().sum())
                names.append(".".join(filter(None, (prefix, slot.name))))
    sums = torch.stack(squares)
    dist.all_reduce(sums)
    found = dict(zip(names, sums.sqrt(), strict=True))
    assert set(found) == {name for name, _ in plain.named_parameters()}
    for name, parameter in plain.named_parameters():
        assert_near(found[name], parameter.grad.norm(), name)


CALLS = re.compile(r"\bmodel\.(\w+)\(")


# facebookresearch/fairscale#455
def test_every_method_that_pages_docstrings_and_snippets_call_on_a_model_exists():
    root = Path(fsdp_ref.__file__).parents[1]
    files = [root / "README.md", *root.glob("fsdp_ref/*.py"), *root.glob("snippets/*/*/*.py")]
    files += [path for path in root.glob("site/**/*.md") if "generated" not in path.parts]
    files = [path for path in files if "_torch_" not in path.name]
    called = {name: path for path in files for name in CALLS.findall(path.read_text())}
    assert {"state_dict", "clip_grad_norm_", "no_sync"} <= set(called)
    of_the_readers = {"encode"}  # an example of what register_fsdp_forward_method is for
    missing = {name for name in called if not hasattr(FSDP, name)} - of_the_readers
    assert {name: called[name] for name in missing} == {}
