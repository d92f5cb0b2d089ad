"""Weights that exist in several versions are refused by name, or all returned, never dropped."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref.errors import ReplicasDifferError
from fsdp_ref.small_groups import Versions
from fsdp_ref.state_dict import Exporting
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import Layer, Stack, mean_square, my_part, seeded, whole_batch


class Expert(Layer):
    """A layer that counts, in a buffer, what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))


class Experts(Stack):
    """The middle layer is an expert."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Expert()


def with_experts(group: object, strategy: str = "FULL_SHARD", **arguments: object) -> FSDP:
    """The middle layer is in a group of its own, the rest over all ranks."""
    model = seeded(Experts)
    expert = model.layers[1]
    model.layers[1] = FSDP(expert, process_group=group, sharding_strategy=strategy, **arguments)
    return FSDP(model, **arguments)


def drift(model: FSDP) -> None:
    """One step on each rank's own data: the experts part ways."""
    mean_square(model(my_part(whole_batch()))).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    model.layers[1].seen += dist.get_rank() // (dist.get_world_size() // 2)


GROUPS = [
    ("self", "FULL_SHARD", [0, 1, 2, 3]),
    ("set2", "FULL_SHARD", [0, 0, 2, 2]),
    ("set2", "NO_SHARD", [0, 0, 2, 2]),
    ("mod2", "SHARD_GRAD_OP", [0, 1, 0, 1]),
]
NAMES = ["layers.1.scale", "layers.1.linear.weight", "layers.1.linear.bias"]


def refused_or_returned(group: object, strategy: str, firsts: list[int], orig: bool) -> None:
    rank, versions = dist.get_rank(), sorted(set(firsts))
    model = with_experts(group, strategy, use_orig_params=orig)
    plain = seeded(Experts).state_dict()
    fresh = model.state_dict()  # equal versions are one version
    assert list(fresh) == list(plain)
    drift(model)
    with provokes(FSDP.state_dict, ReplicasDifferError) as caught:
        model.state_dict()
    assert f"{len(versions)} versions of 'layers.1.scale', 'layers.1.linear.weight'" in str(
        caught.message
    )
    assert f"{'ranks' if len(versions) == 2 else 'rank'} {versions[0]}" in caught.message
    with provokes(Versions.refuse_differences, ReplicasDifferError, match='replicas="all"'):
        model.state_dict()
    with provokes(Exporting.finish, ReplicasDifferError):
        model.state_dict()

    with FSDP.state_dict_type(model, "full", replicas="mine"):
        mine = model.state_dict()
        assert list(mine) == list(plain)
        own = model.layers[1].state_dict()  # of the unit itself: its group is the whole
    assert all(torch.equal(mine[f"layers.1.{name}"], value) for name, value in own.items())
    assert list(model.layers[1].state_dict()) == list(own)

    with FSDP.state_dict_type(model, "full", replicas="all"):
        every = model.state_dict()
    expected = []
    for name in plain:
        inside = name.startswith("layers.1.")
        expected += [f"{name}@rank{first}" for first in versions] if inside else [name]
    assert list(every) == expected
    gathered: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    for name in plain:
        for first in versions if name.startswith("layers.1.") else [0]:
            key = f"{name}@rank{first}" if name.startswith("layers.1.") else name
            holder = firsts.index(first) if name.startswith("layers.1.") else 0
            if "seen" in name:
                holder = first
            assert torch.equal(every[key], gathered[holder][name]), key
    assert not torch.equal(*(every[f"layers.1.scale@rank{first}"] for first in versions[:2]))

    # And back: each group takes its own version; a rank is not told the others'.
    for state in (every, mine):
        other = with_experts(group, strategy, use_orig_params=orig)
        other.load_state_dict(state)
        with FSDP.state_dict_type(other, "full", replicas="mine"):
            for name, value in other.state_dict().items():
                if "seen" in name and state is every:
                    assert torch.equal(value, gathered[firsts[rank]][name])
                else:
                    assert torch.equal(value, mine[name]), name


@pytest.mark.parametrize(("group", "strategy", "firsts"), GROUPS)
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_versions_are_compared_and_returned_with_the_first_rank_in_their_names(
    group, strategy, firsts, use_orig_params
):
    run_ranks(4, refused_or_returned, group, strategy, firsts, use_orig_params)


def on_the_first_rank() -> None:
    model = with_experts("set2")
    drift(model)
    with FSDP.state_dict_type(model, "full", replicas="mine"):
        mine = model.state_dict()
    for replicas in ("refuse", "all", "mine"):
        with FSDP.state_dict_type(model, "full", {"rank0_only": True}, replicas=replicas):
            if replicas == "refuse":
                with provokes(FSDP.state_dict, ReplicasDifferError, match="ranks? 0"):
                    model.state_dict()
                continue
            state = model.state_dict()
        if dist.get_rank() > 0:
            assert state == {}
        elif replicas == "mine":
            assert all(torch.equal(state[name], value) for name, value in mine.items())
        else:
            assert [key for key in state if "@" in key and "scale" in key] == [
                "layers.1.scale@rank0",
                "layers.1.scale@rank2",
            ]
            assert torch.equal(state["layers.1.scale@rank0"], mine["layers.1.scale"])


def test_the_first_rank_alone_hears_of_all_versions_and_no_difference_is_missed():
    run_ranks(4, on_the_first_rank)


def who_compares() -> None:
    """Copies of a hybrid pair are one version; inside a summon nothing is sent."""
    hybrid = with_experts(("set2", "mod2"), "HYBRID_SHARD")
    drift(hybrid)
    assert list(hybrid.state_dict()) == list(seeded(Experts).state_dict())
    model = with_experts("self")
    drift(model)
    with model.summon_full_params(writeback=False):
        state = model.state_dict()
        assert torch.equal(state["layers.1.scale"], model.layers[1].scale)
    # Where no unit is around the experts, there is nobody to compare with: as for plain modules.
    plain = seeded(Experts)
    plain.layers[1] = FSDP(plain.layers[1], process_group="self")
    assert list(plain.state_dict()) == list(seeded(Experts).state_dict())


def test_only_real_versions_are_compared():
    run_ranks(4, who_compares)


def nothing_new_is_loaded_by_half() -> None:
    model = with_experts("set2")
    drift(model)
    with FSDP.state_dict_type(model, "full", replicas="all"):
        state = model.state_dict()
    for key in [key for key in state if key.startswith("layers.1.scale")]:
        del state[key]
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["layers.1.scale"]
    assert result.unexpected_keys == []
    other = nn.ModuleDict({"inner": with_experts("set2")})
    other.load_state_dict({f"inner.{name}": v for name, v in state.items()}, strict=False)
    with FSDP.state_dict_type(model, "full", replicas="mine"):
        mine = model.state_dict()
    with FSDP.state_dict_type(other, "full", replicas="mine"):
        theirs = other.state_dict()
    for name in ("layers.1.linear.weight", "head.weight"):
        assert torch.equal(theirs[f"inner.{name}"], mine[name]), name


def test_versions_are_found_by_name_when_loaded_also_in_a_model_around():
    run_ranks(4, nothing_new_is_loaded_by_half)
