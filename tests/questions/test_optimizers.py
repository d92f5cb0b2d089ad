"""Optimizers and averages of weights, on shards."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, timeline
from tests.parity.training import full_weights
from tests.questions.claims import (
    SGD,
    loss,
    on_ranks,
    train,
)
from tests.toy import (
    assert_equal_weights,
    assert_near,
    nested,
    seeded,
    whole_batch,
)


# intelligent-machine-learning/dlrover#584
@on_ranks(2)
def test_an_optimizer_from_before_wrapping_is_refused_and_changes_nothing():
    plain = seeded()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = nested(plain)
    before = full_weights(model)
    loss(model).backward()
    with pytest.raises(errors.OptimizerBeforeWrappingError, match="Wrap first"):
        optimizer.step()
    after = full_weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


# facebookresearch/fairscale#767
@on_ranks(2)
def test_adagrad_works_element_by_element_and_so_on_shards():
    plain, model = seeded(), nested(seeded())
    train((torch.optim.Adagrad, {"lr": 0.1}), plain, model)
    assert_equal_weights(model, plain)


# pytorch/pytorch#101343
@on_ranks(2)
def test_units_of_their_own_allow_other_weight_decay_for_some_parameters():
    def groups(model: nn.Module) -> list[dict]:
        spared = list(model.head.parameters())
        rest = [p for p in model.parameters() if all(p is not other for other in spared)]
        return [{"params": rest}, {"params": spared, "weight_decay": 0.0}]

    plain, model = seeded(), seeded()
    model.head = FSDP(model.head)
    model = nested(model)
    pair = [(m, torch.optim.AdamW(groups(m), lr=0.1, weight_decay=0.5)) for m in (plain, model)]
    for _ in range(2):
        for part, optimizer in pair:
            optimizer.zero_grad()
            loss(part, whole=part is plain).backward()
            optimizer.step()
    assert_equal_weights(model, plain)


# facebookresearch/fairscale#789
@on_ranks(2)
def test_an_average_of_the_weights_can_be_kept_on_shards_without_collectives():
    plain, model, average = seeded(), nested(seeded()), nested(seeded())
    expected = copy.deepcopy(plain)
    for _ in range(3):
        train(SGD, plain, model, steps=1)
        with torch.no_grad(), timeline() as seen:
            for mean, weight in zip(expected.parameters(), plain.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
        assert seen.events == []
    assert_equal_weights(average, expected)


# pytorch/pytorch#117742
@on_ranks(2)
def test_a_shard_edited_between_two_evaluations_changes_the_second():
    plain, model = seeded(), nested(seeded())
    with torch.no_grad():
        before = loss(model)
        for part in (plain, model):
            for parameter in part.parameters():
                parameter.mul_(0.5)
        assert_near(model(whole_batch()), plain(whole_batch()), "output")
        assert not torch.equal(loss(model), before)
