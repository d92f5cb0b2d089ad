"""With which weights training starts: seeds, the number of ranks, the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, fully_shard

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy, errors
from tests.parity.training import full_weights
from tests.questions.claims import on_ranks
from tests.ranks import run_ranks
from tests.toy import Layer, Stack, assert_equal_weights, nested, seeded, whole_batch


def build(seed: int) -> Stack:
    torch.manual_seed(seed)
    return Stack().double()


def flat(weights: dict[str, Tensor]) -> Tensor:
    return torch.cat([weight.flatten() for weight in weights.values()])


def flat_plain(seed: int) -> Tensor:
    return flat({name: p.detach() for name, p in build(seed).named_parameters()})


def equal_everywhere(weights: Tensor) -> bool:
    every = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(every, weights)
    return all(torch.equal(weights, other) for other in every)


# Lightning-AI/litgpt#269
@on_ranks(2)
def test_ranks_with_seeds_of_their_own_are_refused_unless_rank_0_sends_its_weights():
    rank, share = dist.get_rank(), 59  # rank 0's, of 117 elements
    model = FSDP(build(seed=rank))
    found = flat(full_weights(model))  # a patchwork
    assert torch.equal(found, torch.cat([flat_plain(0)[:share], flat_plain(1)[share:]]))
    with pytest.raises(errors.InitialWeightsDifferError, match="sync_module_states"):
        model(whole_batch())
    found = flat(full_weights(FSDP(build(seed=rank), sync_module_states=True)))
    assert torch.equal(found, flat_plain(0))


HYBRID = {"process_group": ("set2", "mod2"), "sharding_strategy": "HYBRID_SHARD"}


# allenai/OLMo-core#319, mosaicml/llm-foundry#830, pytorch/pytorch#108331
@on_ranks(4)
def test_copies_that_start_differently_are_refused_unless_rank_0_sends_its_weights():
    def wrapped(seed: int, **arguments: Any) -> FSDP:
        policy = ModuleWrapPolicy({Layer})
        return FSDP(build(seed), auto_wrap_policy=policy, **arguments, **HYBRID)

    for seed in (dist.get_rank(), dist.get_rank() // 2):  # within copies, and across only
        with pytest.raises(errors.InitialWeightsDifferError):
            wrapped(seed)(whole_batch())
        model = wrapped(seed, sync_module_states=True)
        model(whole_batch())
        assert torch.equal(flat(full_weights(model)), flat_plain(0))


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("number", torch.zeros(3))
        self.register_buffer("not_saved", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)

    def reset_parameters(self) -> None:
        self.number.fill_(dist.get_rank())
        self.not_saved.fill_(dist.get_rank())


# pytorch/pytorch#178569
@on_ranks(4)
def test_buffers_from_meta_are_rank_0s_on_every_rank_when_it_sends_its_weights():
    with torch.device("meta"):
        model = WithBuffers()
    model = FSDP(model, sync_module_states=True, **HYBRID)
    for buffer in model.buffers():
        assert torch.equal(buffer, torch.zeros(3))


# pytorch/torchtitan#670 (torch's fully_shard)
@on_ranks(4)
def test_for_fully_shard_loading_a_full_state_dict_takes_the_place_of_sync_module_states():
    torch.manual_seed(dist.get_rank())
    model, mesh = Stack().double(), init_device_mesh("cpu", (4,))
    first = model.state_dict() if dist.get_rank() == 0 else {}
    first = {name: value.clone() for name, value in first.items()}
    fully_shard(model, mesh=mesh)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, first, options=options)
    full = flat({name: p.detach().full_tensor() for name, p in model.named_parameters()})
    assert torch.equal(full, flat_plain(0))


def initial_weights() -> Tensor:
    return flat(full_weights(nested(seeded())))


# NVIDIA-NeMo/Automodel#2939
def test_initial_weights_do_not_depend_on_the_number_of_ranks():
    alone = run_ranks(1, initial_weights)[0]
    for world_size in (2, 4):
        assert all(torch.equal(alone, other) for other in run_ranks(world_size, initial_weights))


class Forgotten(nn.Module):
    """Holds a parameter that no method initialises."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.table


# mlfoundations/open_lm#165
@on_ranks(2)
def test_a_module_on_meta_that_nothing_initialises_is_refused_by_name():
    with torch.device("meta"):
        model = nn.Sequential(nn.Tanh(), Forgotten())
    with pytest.raises(errors.FSDPError, match=r"1\.table"):
        FSDP(model)


# mosaicml/composer#3872
@on_ranks(2)
def test_values_on_one_rank_and_meta_on_others_are_refused_unless_they_are_sent():
    def build_mixed() -> nn.Module:
        torch.manual_seed(1 + dist.get_rank())
        with torch.device("meta" if dist.get_rank() else "cpu"):
            return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    with pytest.raises(errors.InitialWeightsDifferError, match=r"rank"):
        FSDP(build_mixed())(torch.ones(1, 3))
    found = full_weights(FSDP(build_mixed(), sync_module_states=True))
    assert equal_everywhere(flat(found))
    if dist.get_rank() == 0:
        plain = build_mixed()
        assert all(torch.equal(found[name], p) for name, p in plain.named_parameters())


# pytorch/torchtitan#3106
@on_ranks(2)
def test_no_two_weights_from_meta_start_with_the_same_numbers():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    torch.manual_seed(0)
    before = torch.get_rng_state()
    policy = ModuleWrapPolicy({nn.Linear})
    model = FSDP(model, auto_wrap_policy=policy, cpu_offload=CPUOffload(offload_params=True))
    assert not torch.equal(torch.get_rng_state(), before)
    assert flat(full_weights(model)).unique().numel() == 32


class Counted(nn.Linear):
    """Counts how often it is initialised."""

    times = 0

    def reset_parameters(self) -> None:
        self.times += 1
        super().reset_parameters()


class Pair(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Counted(4, 4), Counted(4, 4))


# pytorch/pytorch#90465
@on_ranks(2)
def test_nested_units_from_meta_initialise_each_module_once_and_as_without_meta():
    def build_counted() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Pair(), Counted(4, 2))

    plain = build_counted()
    with torch.device("meta"):
        model = build_counted()
    torch.manual_seed(0)
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Pair}))
    layers = [part for part in model.modules() if isinstance(part, Counted)]
    assert [layer.times for layer in layers] == [2, 2, 2]  # on meta, then once
    assert_equal_weights(model, plain)
