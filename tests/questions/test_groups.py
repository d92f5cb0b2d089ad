"""Process groups, experts, and copies of shards."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, process_groups, timeline
from tests.parity.training import full_gradients, full_weights
from tests.questions.claims import (
    SGD,
    backward_beside,
    loss,
    numel,
    numel_of,
    on_ranks,
    train,
)
from tests.toy import (
    WIDTH,
    Layer,
    assert_equal_gradients,
    assert_equal_weights,
    assert_near,
    seeded,
    whole_batch,
)


# mosaicml/composer#2006
@on_ranks(4)
def test_words_name_these_ranks():
    def lists(word: str) -> list[list[int]]:
        return [list(ranks) for ranks in process_groups.rank_lists(word, 4, 2)]

    assert lists("set2") == [[0, 1], [2, 3]] == lists("node")
    assert lists("mod2") == [[0, 2], [1, 3]] == lists("local_rank_across_nodes")
    assert lists("self") == [[0], [1], [2], [3]]
    with pytest.raises(errors.GroupWordError, match="divides the world size"):
        lists("set3")


# pytorch/pytorch#149396
@on_ranks(4)
def test_a_parent_leaves_out_experts_that_have_a_group_of_their_own():
    model = seeded()
    model.layers[0] = FSDP(model.layers[0], process_group="set2")
    model = FSDP(model)
    assert numel_of(model) == numel(seeded()) - numel(Layer())


# facebookresearch/fairscale#1039
@on_ranks(4)
def test_small_groups_train_different_models_unless_they_have_copies():
    sums = {}
    for name, arguments in (
        ("alone", {"process_group": "set2"}),
        ("copies", {"process_group": ("set2", "mod2"), "sharding_strategy": "HYBRID_SHARD"}),
    ):
        plain, model = seeded(), FSDP(seeded(), **arguments)
        train(SGD, plain, model, steps=1)
        mine = full_weights(model)["head.weight"]
        sums[name] = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(sums[name], mine)
        if name == "copies":
            assert_equal_weights(model, plain)
    assert not torch.allclose(sums["alone"][0], sums["alone"][2])
    assert torch.equal(sums["copies"][0], sums["copies"][2])


# pytorch/pytorch#124019
@on_ranks(2)
def test_calling_the_module_inside_a_unit_says_what_to_call_instead():
    model = FSDP(seeded())
    with pytest.raises(errors.NotGatheredError, match=r"Call the (wrapped )?module"):
        model.module(whole_batch())


# RLinf/RLinf#1522
@on_ranks(2)
def test_copies_of_one_rank_each_are_averaged():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    plain = seeded()
    model = FSDP(seeded(), device_mesh=mesh, sharding_strategy="HYBRID_SHARD")
    backward_beside(plain, model)
    assert_equal_gradients(model, plain)


# pytorch/pytorch#104081
@on_ranks(4)
def test_the_second_copy_can_export_too():
    arguments = {"process_group": ("set2", "mod2"), "sharding_strategy": "HYBRID_SHARD"}
    exported = FSDP(seeded(), **arguments).state_dict()
    assert all(torch.equal(exported[name], value) for name, value in seeded().state_dict().items())


# discuss.pytorch.org/t/200913
@on_ranks(4)
def test_across_copies_travels_the_shard_and_not_the_model():
    model = FSDP(seeded(), process_group=("set2", "mod2"), sharding_strategy="HYBRID_SHARD")
    with timeline() as seen:
        loss(model).backward()
    sent = [e for e in seen.events if e.operation == "all-reduce" and e.dtype == torch.float64]
    copies, shard = 2, 59  # half of the 117 elements
    assert [e.bytes_on_wire for e in sent] == [8 * shard * 2 * (copies - 1) // copies]
    assert sent[0].group == (dist.get_rank() % 2, dist.get_rank() % 2 + 2)


def two_experts() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(2))


# NVIDIA/Megatron-LM#5956
@on_ranks(4)
def test_an_experts_gradient_has_to_be_divided_by_the_world_and_not_by_its_group():
    # Two experts on four ranks. A rank computes its expert on the tokens of both ranks of its
    # block; the copy of the expert in the other block does so for the tokens there.
    index, block = dist.get_rank() % 2, dist.get_rank() // 2
    plain, experts, batch = seeded(two_experts), seeded(two_experts), whole_batch()
    (sum(plain[i](batch[i::2]).square().mean(1).sum() for i in range(2)) / 12).backward()
    true = torch.nn.utils.get_total_norm([p.grad for p in plain[index].parameters()])

    model = FSDP(nn.Sequential(FSDP(experts[index], process_group="mod2")))
    mine = batch[6 * block :][:6][index::2]

    def ratio() -> float:
        model.zero_grad()
        (model(mine).square().mean(1).sum() / 3).backward()  # 3 tokens per rank
        found = torch.nn.utils.get_total_norm(list(full_gradients(model).values()))
        return (found / true).item()

    assert ratio() == pytest.approx(2.0, rel=1e-9)
    model[0].set_gradient_divide_factors(dist.get_world_size(), 1)
    assert ratio() == pytest.approx(1.0, rel=1e-9)


# pytorch/pytorch#98281
@on_ranks(2)
def test_gradients_of_ignored_modules_are_the_users_to_average():
    plain, inner = seeded(), seeded()
    model = FSDP(inner, ignored_modules=[inner.head])
    backward_beside(plain, model)
    gradient = inner.head.weight.grad
    every = [torch.empty_like(gradient) for _ in range(2)]
    dist.all_gather(every, gradient)
    assert not torch.allclose(*every)
    dist.all_reduce(gradient)
    assert_near(gradient / 2, plain.head.weight.grad, "averaged by hand")
