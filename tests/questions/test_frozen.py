"""Frozen parameters, adapters, freezing and thawing between steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy
from tests.parity.training import full_weights
from tests.questions.claims import (
    ADAMW,
    SGD,
    loss,
    on_ranks,
    train,
)
from tests.toy import (
    WIDTH,
    Layer,
    assert_equal_gradients,
    assert_equal_weights,
    assert_near,
    nested,
    seeded,
    whole_batch,
)


# facebookresearch/fairscale#721, facebookresearch/audiocraft#260
@on_ranks(2)
def test_frozen_weights_never_change_whether_frozen_before_or_after_wrapping():
    for late in (False, True):
        plain, model = seeded(), seeded()
        plain.layers.requires_grad_(False)
        if not late:
            model.layers.requires_grad_(False)
        model = nested(model)
        if late:
            for layer in model.layers:
                layer.requires_grad_(False)
        before = full_weights(model)
        train(ADAMW, plain, model)
        assert_equal_weights(model, plain)
        after = full_weights(model)
        trunk = [name for name in before if name.startswith("layers.")]
        assert all(torch.equal(before[name], after[name]) for name in trunk)


# pytorch/pytorch#105371
@on_ranks(2)
def test_unfreezing_after_an_evaluation_takes_effect_in_every_strategy():
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        plain, model = seeded(), seeded()
        for part in (plain, model):
            part.layers.requires_grad_(False)
        policy = ModuleWrapPolicy({Layer})
        model = FSDP(model, sharding_strategy=strategy, auto_wrap_policy=policy)
        train(SGD, plain, model, steps=1)
        with torch.no_grad():
            loss(model)
        plain.requires_grad_(True)
        model.requires_grad_(True)
        train(SGD, plain, model, steps=1)
        assert_equal_gradients(model, plain)


# pytorch/pytorch#111958
@on_ranks(2)
def test_freezing_does_not_change_repeated_forwards():
    plain, model = seeded(), seeded()
    model.layers[1].requires_grad_(False)
    model.layers[0].linear.requires_grad_(False)
    model = nested(model)
    for _ in range(3):
        with torch.no_grad():
            assert_near(model(whole_batch()), plain(whole_batch()), "output")


class Adapted(nn.Module):
    """A frozen layer with a trainable detour of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


# pytorch/pytorch#100945
@on_ranks(2)
def test_an_adapter_may_share_a_unit_with_the_frozen_layer_that_it_adapts():
    plain = seeded(lambda: nn.Sequential(Adapted(), Adapted()))
    model = seeded(lambda: nn.Sequential(Adapted(), Adapted()))
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Adapted}))
    before = full_weights(model)
    train(ADAMW, plain, model)
    assert_equal_weights(model, plain)
    after = full_weights(model)
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {f"{index}.base.{name}" for index in (0, 1) for name in ("weight", "bias")}
