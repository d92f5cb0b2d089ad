"""Copies of a sharded model train like the model, by deepcopy and through pickle."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy, errors
from tests.parity.training import full_weights
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import Layer, Stack, mean_square, my_part, nested, seeded, whole_batch


def train(model: nn.Module, steps: int = 2) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        loss = mean_square(model(my_part(whole_batch())))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Tied(nn.Module):
    """Ties a weight inside one unit, holds a buffer and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5)
        self.outer.weight = self.inner.weight
        self.inner.bias.requires_grad_(False)
        self.register_buffer("offset", torch.arange(5.0))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.outer(self.inner(x)) + self.offset


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_torch_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "pickle": by_pickle, "torch.save": by_torch_save}
ARGUMENTS = {
    "flat": {},
    "original parameters": {"use_orig_params": True},
    "hybrid": {"sharding_strategy": "HYBRID_SHARD", "process_group": ("self", [0, 1])},
    "low precision, offloaded": {
        "mixed_precision": {"param_dtype": torch.bfloat16},
        "cpu_offload": True,
    },
}


def a_copy_of(build, way, arguments):
    model = build_model(build, arguments)
    train(model, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    twin = WAYS[way](model)
    assert type(twin) is FSDP
    assert [name for name, _ in twin.named_parameters()] == [
        name for name, _ in model.named_parameters()
    ]
    assert list(twin.state_dict()) == list(before)
    ours, theirs = {*map(id, model.parameters())}, {*map(id, twin.parameters())}
    assert not ours & theirs
    losses = train(twin)  # which leaves the model alone
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert train(model) == losses
    assert losses[0] > losses[1]
    for name, value in full_weights(twin).items():
        assert torch.equal(value, full_weights(model)[name]), name
    again = WAYS[way](twin)  # a copy of a copy, and a copy of an inner unit
    assert train(again, 1) == train(twin, 1)


def build_model(build, arguments):
    policy = ModuleWrapPolicy({Layer})
    return FSDP(seeded(build), auto_wrap_policy=policy, **arguments)


def every_copy(build):
    for arguments in ARGUMENTS.values():
        for way in WAYS:
            a_copy_of(build, way, arguments)


@pytest.mark.parametrize("build", [Stack, Tied])
def test_a_copy_trains_like_the_model_and_leaves_it_alone(build):
    run_ranks(2, every_copy, build)


def an_inner_unit():
    model = nested(seeded())
    train(model, 1)
    layer = copy.deepcopy(model.layers[1])
    assert layer.check_is_root()
    x = my_part(whole_batch())
    with torch.no_grad(), FSDP.summon_full_params(layer):
        expected = x + layer.scale * torch.tanh(
            layer.linear.module(x) if False else layer.linear(x)
        )
    assert torch.equal(layer(x).detach(), expected)
    average = torch.optim.swa_utils.AveragedModel(model)
    average.update_parameters(model)
    train(model, 1)
    average.update_parameters(model)
    assert not torch.equal(
        average.module.state_dict()["head.weight"], model.state_dict()["head.weight"]
    )


def test_an_inner_unit_can_be_copied_alone_and_a_model_averaged():
    run_ranks(2, an_inner_unit)


def busy():
    model = nested(seeded())
    refused = provokes(fsdp_ref.copying.record_unit, errors.CopyError, match="between steps")
    with model.summon_full_params(), refused:
        copy.deepcopy(model)
    with pytest.raises(errors.CopyError, match="deepcopy"):
        copy.copy(model)
    assert train(copy.deepcopy(model)) == train(model)


def test_a_busy_model_is_not_copied_and_none_is_copied_by_halves():
    run_ranks(2, busy)
