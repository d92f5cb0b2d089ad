"""Optimizers and averages of weights, on shards."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
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


def decay_of(name: str) -> float:
    return 0.0 if name.endswith("bias") else 0.5


# pytorch/pytorch#101343
@on_ranks(2)
def test_weight_decay_may_depend_on_the_name_with_original_parameters_and_on_the_unit_without():
    def steps(model: nn.Module, groups: list[dict]) -> None:
        optimizer = torch.optim.AdamW(groups, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss(model, whole=not isinstance(model, FSDP)).backward()
            optimizer.step()

    def by_name(model: nn.Module) -> list[dict]:
        named = model.named_parameters()
        return [{"params": [p], "weight_decay": decay_of(name)} for name, p in named]

    def by_unit(model: nn.Module) -> list[dict]:
        spared = list(model.head.parameters())
        rest = [p for p in model.parameters() if all(p is not other for other in spared)]
        return [{"params": rest, "weight_decay": 0.5}, {"params": spared, "weight_decay": 0.0}]

    plain, model = seeded(), FSDP(seeded(), use_orig_params=True)
    for part in (plain, model):
        steps(part, by_name(part))
    assert_equal_weights(model, plain)
    plain, model = seeded(), seeded()
    model.head = FSDP(model.head)
    model = nested(model)
    for part in (plain, model):
        steps(part, by_unit(part))
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
def test_the_loss_falls_as_in_plain_pytorch_in_either_form_of_parameters():
    def losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        values = []
        for _ in range(3):
            optimizer.zero_grad()
            value = loss(model, whole=not isinstance(model, FSDP))
            value.backward()
            optimizer.step()
            values.append(mean_over_ranks(value))
        return values

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    plain, early = seeded(), seeded()
    expected = losses(plain, sgd(plain))
    assert expected[2] < expected[0]
    for use_orig_params in (False, True):
        model = FSDP(seeded(), use_orig_params=use_orig_params)
        assert losses(model, sgd(model)) == pytest.approx(expected, rel=1e-9)
    optimizer = sgd(early)  # before wrapping: the original parameters go on being trained
    found = losses(FSDP(early, use_orig_params=True), optimizer)
    assert found == pytest.approx(expected, rel=1e-9)


# pytorch/pytorch#136314
@on_ranks(2)
def test_original_parameters_are_pieces_that_together_hold_every_element():
    plain = seeded()
    model = FSDP(seeded(), use_orig_params=True)
    assert [name for name, _ in model.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    assert {p.dim() for p in model.parameters()} == {1}
    mine = torch.tensor([p.numel() for p in model.parameters()])
    total, smallest = mine.clone(), mine.clone()
    dist.all_reduce(total)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    assert total.tolist() == [p.numel() for p in plain.parameters()]
    assert 0 in smallest
