"""With which weights training starts: seeds, the number of ranks, the meta device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors
from tests.parity.training import full_weights
from tests.questions.claims import on_ranks
from tests.ranks import run_ranks
from tests.toy import Stack, nested, one_unit, seeded


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
def test_ranks_with_seeds_of_their_own_start_from_a_patchwork():
    found = flat(full_weights(one_unit(build(seed=dist.get_rank()))))
    share = 59  # rank 0's, of 117 elements
    assert torch.equal(found, torch.cat([flat_plain(0)[:share], flat_plain(1)[share:]]))


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
