"""Inputs and outputs in containers of one's own class, and outputs that are weights."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy
from fsdp_ref.containers import map_tensors, tensors_in
from tests.ranks import run_ranks


class OwnList(list):
    pass


class OwnTuple(tuple):
    __slots__ = ()


class OwnDict(OrderedDict):
    pass


Pair = namedtuple("Pair", ["first", "second"])


class OwnPair(Pair):
    __slots__ = ()


@dataclass(frozen=True)
class Fields:
    first: Any
    second: Any


CONTAINERS = {
    "list": lambda a, b: [a, b],
    "own list": lambda a, b: OwnList([a, b]),
    "own tuple": lambda a, b: OwnTuple([a, b]),
    "own dict": lambda a, b: OwnDict(a=a, b=b),
    "named tuple": Pair,
    "own named tuple": OwnPair,
    "dataclass": Fields,
    "nested": lambda a, b: {"x": OwnList([a, Fields(None, OwnDict(b=b))])},
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_tensors_are_found_and_replaced_in_containers_of_any_class(kind: str) -> None:
    make, first, second = CONTAINERS[kind], torch.zeros(2), torch.ones(2)
    value = make(first, second)
    assert [id(tensor) for tensor in tensors_in(value)] == [id(first), id(second)]
    changed = map_tensors(lambda tensor: tensor + 1, value)
    assert type(changed) is type(value)
    assert [tensor.tolist() for tensor in tensors_in(changed)] == [[1, 1], [2, 2]]
    assert [id(tensor) for tensor in tensors_in(value)] == [id(first), id(second)], "not touched"


def test_a_packed_sequence_is_cast_like_a_tensor() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    low = map_tensors(lambda t: t.bfloat16() if t.is_floating_point() else t, packed)
    assert isinstance(low, PackedSequence)
    assert low.data.dtype is torch.bfloat16
    assert torch.equal(low.batch_sizes, packed.batch_sizes)


class InContainer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)

    def forward(self, given: Any) -> Any:
        first, second = tensors_in(given)
        return CONTAINERS[self.kind](self.linear(first), second * 2)


class Around(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inner = kind, InContainer(kind)

    def forward(self, x: Tensor) -> Tensor:
        return sum(tensors_in(self.inner(CONTAINERS[self.kind](x, x + 1))))


def train_like_plain(kind: str) -> None:
    torch.manual_seed(0)
    plain = Around(kind)
    torch.manual_seed(0)
    policy = ModuleWrapPolicy({InContainer})
    model = FSDP(Around(kind), auto_wrap_policy=policy, use_orig_params=True)
    x = torch.arange(8.0).view(2, 4)
    for _ in range(2):
        outputs = [one(x.clone().requires_grad_()) for one in (plain, model)]
        torch.testing.assert_close(*outputs)
        for output in outputs:
            output.square().mean().backward()
    with FSDP.summon_full_params(model, with_grads=True):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    low = FSDP(InContainer(kind), mixed_precision="pure")
    one, other = tensors_in(low(CONTAINERS[kind](x, x)))
    assert one.dtype is other.dtype is torch.bfloat16


def of_every_kind() -> None:
    for kind in CONTAINERS:
        train_like_plain(kind)


def test_units_pass_containers_of_any_class_in_and_out() -> None:
    run_ranks(2, of_every_kind)


# ---------------------------------------------------------------- weights as outputs


class Positions(nn.Module):
    """Returns a slice of its weight, or all of it, as learned position embeddings do."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.table, self.whole = nn.Parameter(torch.randn(6, 4)), whole

    def forward(self, x: Tensor) -> Any:
        return {"table": self.table if self.whole else self.table[: len(x)]}


class WithPositions(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.positions, self.head = Positions(whole), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(x + self.positions(x)["table"][: len(x)]), self.scale


def weights_as_outputs(arguments: dict[str, Any], whole: bool) -> None:
    torch.manual_seed(0)
    plain = WithPositions(whole)
    torch.manual_seed(0)
    model = FSDP(WithPositions(whole), auto_wrap_policy=ModuleWrapPolicy({Positions}), **arguments)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    x = torch.arange(8.0).view(2, 4) / 8
    for _ in range(3):
        with torch.no_grad():
            shown = [(one(x)[0], one(x)[1] * 1) for one in (plain, model)]
        torch.testing.assert_close(*shown)
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            output, scale = one(x)
            (output * scale).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with FSDP.summon_full_params(model):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)


def in_every_mode() -> None:
    for mode in ({}, {"use_orig_params": True}, {"sharding_strategy": "SHARD_GRAD_OP"}):
        for whole in (False, True):
            weights_as_outputs(mode, whole)
    flat = FSDP(Positions(whole=True))  # without gradients nothing is left of the unit's memory
    with torch.no_grad():
        table = flat(torch.zeros(2, 4))["table"]
    with FSDP.summon_full_params(flat):
        assert torch.equal(table, flat.module.table)


def test_a_module_may_return_its_own_weight_or_a_part_of_it() -> None:
    run_ranks(2, in_every_mode)


# ---------------------------------------------------------------- inference mode first


def first_in_inference_mode() -> None:
    for arguments in ({"mixed_precision": "default"}, {"cpu_offload": True}):
        torch.manual_seed(0)
        model = FSDP(nn.Sequential(nn.Linear(4, 4)), **arguments)
        x = torch.ones(2, 4)
        with torch.inference_mode():
            seen = model(x).clone()
        output = model(x)
        output.square().mean().backward()
        assert torch.equal(seen, output)
        assert all(p.grad is not None for p in model.parameters())


def test_a_first_forward_in_inference_mode_leaves_the_model_trainable() -> None:
    run_ranks(2, first_in_inference_mode)
