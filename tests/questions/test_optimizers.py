"""Optimizers and averages of weights, on shards."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, timeline
from tests.parity.training import full_weights, mean_over_ranks
from tests.questions.claims import (
    SGD,
    backward_beside,
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


# mosaicml/composer#3493
@on_ranks(2)
def test_an_optimizer_of_some_parameters_changes_those_and_no_others():
    model = seeded()
    model.head = FSDP(model.head)
    model = nested(model)
    before = full_weights(model)
    optimizer = torch.optim.AdamW(model.head.parameters(), lr=0.1)
    loss(model).backward()
    optimizer.step()
    after = full_weights(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}


def normalised_step(parameters: Iterable[Tensor]) -> None:
    """Move each tensor by the direction of its gradient: a norm over all of its elements."""
    with torch.no_grad():
        for parameter in parameters:
            parameter -= 0.5 * parameter.grad / parameter.grad.norm()


# lab:per-norm-fsdp2, facebookresearch/fairscale#767 (optimizers that need norms)
@on_ranks(2)
def test_an_optimizer_that_needs_norms_differs_on_flat_shards_and_not_on_fully_shards_tensors():
    plain, flat, other = seeded(), nested(seeded()), seeded()
    fully_shard(other, mesh=init_device_mesh("cpu", (2,)))
    backward_beside(plain, flat)
    loss(other).backward()
    for model in (plain, flat, other):
        normalised_step(model.parameters())
    weights = full_weights(flat)
    gaps = []
    for (name, expected), tensor in zip(plain.named_parameters(), other.parameters(), strict=True):
        assert_near(tensor.full_tensor(), expected, name)
        gaps.append((weights[name] - expected).abs().max())
    assert max(gaps) > 1e-2


# huggingface/accelerate#2665
@on_ranks(2)
def test_an_optimizer_from_after_wrapping_lowers_the_loss_as_in_plain_pytorch():
    plain, model = seeded(), nested(seeded())
    losses = []
    for part in (plain, model):
        optimizer, values = torch.optim.AdamW(part.parameters(), lr=0.05), []
        for _ in range(3):
            optimizer.zero_grad()
            value = loss(part, whole=part is plain)
            value.backward()
            optimizer.step()
            values.append(mean_over_ranks(value))
        losses.append(values)
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert losses[1][2] < losses[1][0]
