"""Calling, generating, copying, and the names that show."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, timeline
from tests.questions.claims import (
    SGD,
    loss,
    on_ranks,
    train,
)
from tests.toy import (
    WIDTH,
    assert_equal_gradients,
    assert_equal_weights,
    assert_near,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)

# ---------------------------------------------------------------- forwards of all kinds


# pytorch/pytorch#136861
@on_ranks(2)
def test_two_forwards_may_be_followed_by_two_backwards_or_by_one_of_the_sum():
    plain = seeded()
    (loss(plain, whole=True) + mean_square(plain(-whole_batch()))).backward()
    for together in (False, True):
        model = nested(seeded())
        first, second = loss(model), mean_square(model(-my_part(whole_batch())))
        for part in [first + second] if together else [first, second]:
            part.backward()
        assert_equal_gradients(model, plain)


# pytorch/pytorch#82461
@on_ranks(2)
def test_generation_with_the_root_gathered_keeps_one_inner_unit_in_memory_at_a_time():
    plain, model = seeded(), nested(seeded())
    with torch.no_grad(), timeline() as seen, model.summon_full_params(recurse=False):
        x = y = whole_batch()[:1]
        for _ in range(8):
            y, x = plain(y).repeat(1, 3)[:, :WIDTH], model.module(x).repeat(1, 3)[:, :WIDTH]
            assert_near(x, y, "state")
    assert seen.peak_unsharded_bytes == 8 * (12 + 36)  # the head and one layer


def grow(model: Callable[[Tensor], Tensor], x: Tensor, steps: int) -> list[Tensor]:
    """Feed a model's output back in, as a decoder does."""
    states = []
    for _ in range(steps):
        x = model(x).repeat(1, 3)[:, :WIDTH]
        states.append(x)
    return states


# huggingface/accelerate#3825
@on_ranks(2)
def test_ranks_that_finish_generating_early_go_on_with_steps_that_nobody_reads():
    plain, model = seeded(), nested(seeded())
    wanted = [3, 6][dist.get_rank()]
    x, states = my_part(whole_batch()), []
    with torch.no_grad(), model.summon_full_params(recurse=False):
        while True:
            unfinished = torch.tensor(int(len(states) < wanted))
            dist.all_reduce(unfinished)
            if not unfinished:
                break
            (x,) = grow(model.module, x, 1)
            states.append(x)
    assert len(states) == 6
    alone = grow(plain, my_part(whole_batch()), wanted)
    for found, expected in zip(states[:wanted], alone, strict=True):
        assert_near(found, expected, "state")


# pytorch/pytorch#131965
@on_ranks(2)
def test_the_root_is_dropped_after_a_forward_without_gradients_and_by_reshard():
    model = nested(seeded())
    (root,) = model.parameters(recurse=False)
    with torch.no_grad():
        loss(model)
    assert root._full_param_padded.untyped_storage().nbytes() == 0
    loss(model)  # a backward may follow: the root stays
    assert root._full_param_padded.untyped_storage().nbytes() == 8 * 12
    model.reshard()
    assert root._full_param_padded.untyped_storage().nbytes() == 0


class Shifted(nn.Linear):
    def forward(self, *, x: Tensor | None = None) -> Tensor:
        return super().forward(torch.ones(2, self.in_features).double() if x is None else x)


# pytorch/pytorch#147531
@on_ranks(2)
def test_calls_without_arguments_or_with_keywords_only_work():
    plain, model = seeded(lambda: Shifted(3, 2)), FSDP(seeded(lambda: Shifted(3, 2)))
    assert_near(model(), plain(), "no argument")
    x = torch.ones(1, 3).double()
    assert_near(model(x=x), plain(x=x), "keyword")


# ---------------------------------------------------------------- names, copies


# pytorch/pytorch#82070
@on_ranks(2)
def test_a_deep_copy_trains_on_its_own_and_can_average_weights():
    plain, model = seeded(), nested(seeded())
    loss(model).backward()
    second, other = copy.deepcopy(model), copy.deepcopy(plain)
    second.zero_grad()
    train(SGD, other, second)
    assert_equal_weights(second, other)
    assert_equal_weights(model, plain)
    averages = AveragedModel(plain), AveragedModel(model)
    for _ in range(3):
        train(SGD, plain, model, steps=1)
        averages[0].update_parameters(plain)
        averages[1].update_parameters(model)
    assert_equal_weights(averages[1].module, averages[0].module)


# pytorch/pytorch#111648
@on_ranks(2)
def test_no_name_shows_the_wrappers():
    model = nested(seeded())
    names = [name for name, _ in model.named_parameters()]
    assert names == ["_flat_param", *(f"layers.{index}._flat_param" for index in range(3))]
    assert list(model.state_dict()) == list(seeded().state_dict())


# pytorch/pytorch#136929
@on_ranks(2)
def test_attributes_of_parameters_are_found_inside_summon_or_on_the_original_parameters():
    def spared(model: nn.Module) -> dict[str, bool]:
        return {name: p.no_decay for name, p in model.named_parameters()}

    for use_orig_params in (False, True):
        plain = seeded()
        for name, parameter in plain.named_parameters():
            parameter.no_decay = name.endswith("bias")
        expected = spared(plain)
        model = FSDP(plain, use_orig_params=use_orig_params)
        loss(model).backward()
        with model.summon_full_params() if not use_orig_params else nullcontext():
            assert spared(model) == expected


def replace_head_weight(model: FSDP) -> None:
    model.head.weight = nn.Parameter(torch.zeros(2, WIDTH).double())
    model(whole_batch())


# pytorch/pytorch#132721
@on_ranks(2)
def test_a_weight_replaced_after_sharding_is_refused_by_name():
    for use_orig_params in (False, True):
        model = FSDP(seeded(), use_orig_params=use_orig_params)
        model(whole_batch())
        with pytest.raises(errors.FSDPError, match=r"head\.weight"):
            replace_head_weight(model)
