"""The sharded form goes through torch's checkpoints, to any number of ranks and any wrapping."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import loading, timeline
from fsdp_ref.errors import SilentRanksError
from fsdp_ref.row_shards import whole
from tests.models import CASES
from tests.parity.training import WRAPPINGS as CASE_WRAPPINGS
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.test_small_groups import Experts, drift, with_experts
from tests.toy import (
    assert_equal_gradients,
    assert_sharded,
    mean_square,
    my_part,
    nested,
    one_unit,
    seeded,
    three_deep,
    whole_batch,
)


def shifted(state: dict[str, Any]) -> dict[str, Any]:
    """Other values for every weight, equal on all ranks and unlike any other."""
    return {
        name: (value + 0.5 + index).to(value.dtype)
        for index, (name, value) in enumerate(state.items())
    }


# ---------------------------------------------------------------- what is in it


def values(strategy: str, group: Any, orig: bool) -> None:
    plain = seeded()
    arguments = {"process_group": group, "sharding_strategy": strategy, "use_orig_params": orig}
    model = nested(seeded(), **arguments)
    placements = {"NO_SHARD": (Replicate(),), "HYBRID_SHARD": (Replicate(), Shard(0))}
    with FSDP.state_dict_type(model, "sharded"):
        state = model.state_dict()
        kept = model.state_dict(keep_vars=True)
        prefixed = model.state_dict(prefix="model.")
    assert list(state) == list(plain.state_dict())
    assert list(prefixed) == list(plain.state_dict(prefix="model."))
    for name, value in plain.state_dict().items():
        found = state[name]
        assert type(found) is DTensor, name
        assert found.placements == placements.get(strategy, (Shard(0),))
        assert not found.requires_grad
        assert (found.shape, found.dtype) == (value.shape, value.dtype)
        local = found.to_local()
        assert local.untyped_storage().nbytes() == local.nbytes  # its own memory
        assert torch.equal(whole(found), value), name
        assert type(kept[name]) is nn.Parameter or isinstance(kept[name], DTensor)
        assert kept[name].requires_grad


def hooks_on_rows() -> None:
    """They run on the modules inside, with plain keys, and may change what they find."""
    model, seen = nested(seeded()), []

    def halve(module: nn.Module, state: dict, prefix: str, _: dict) -> None:
        seen.append((prefix, sorted(key for key in state if key.startswith(prefix))))
        assert type(state[prefix + "weight"]) is DTensor
        state[prefix + "weight"] = state[prefix + "weight"] / 2
        state[prefix + "bias_too"] = state.pop(prefix + "bias")

    model.layers[1].linear.register_state_dict_post_hook(halve)
    state = sharded(model)
    assert seen == [("layers.1.linear.", ["layers.1.linear.bias", "layers.1.linear.weight"])]
    expected = seeded().state_dict()
    assert torch.equal(
        whole(state["layers.1.linear.weight"]), expected["layers.1.linear.weight"] / 2
    )
    assert "layers.1.linear.bias_too" in state
    assert "layers.1.linear.bias" not in state


def test_hooks_of_inner_modules_see_and_change_rows():
    run_ranks(2, hooks_on_rows)


STRATEGIES = [
    ("FULL_SHARD", None),
    ("NO_SHARD", None),
    ("HYBRID_SHARD", ("set2", "mod2")),
]


@pytest.mark.parametrize(("strategy", "group"), STRATEGIES)
@pytest.mark.parametrize("orig", [False, True])
def test_values_are_rows_as_dtensors_under_the_plain_names(strategy, group, orig):
    run_ranks(4, values, strategy, group, orig)


def export_is_a_read(form: str) -> None:
    """Bit-equal twice; no unit stays gathered; nothing that training sees has changed."""
    plain, model = seeded(), nested(seeded())
    mean_square(plain(whole_batch())).backward()
    loss = mean_square(model(my_part(whole_batch())))
    versions = [(p._version, p.generation, p.data_ptr()) for p in model.parameters()]
    with FSDP.state_dict_type(model, form):
        before = model.state_dict()
    loss.backward()
    assert_equal_gradients(model, plain)
    assert_sharded(model)
    with FSDP.state_dict_type(model, form), timeline() as recorded:
        after = model.state_dict()
    assert [(p._version, p.generation, p.data_ptr()) for p in model.parameters()] == versions
    assert_sharded(model)
    gathered = [] if form == "local" else recorded.lines("all-gather")
    units = () if form == "local" else ("root", "layers.0", "layers.1", "layers.2")
    assert gathered == [f"all-gather {unit}" for unit in units]
    largest = max((event.live_unsharded_bytes for event in recorded.events), default=0)
    assert largest <= 8 * 36  # one unit at a time: 35 elements, padded to 36
    for name, value in before.items():
        mine, again = (v.to_local() if form == "sharded" else v for v in (value, after[name]))
        assert torch.equal(mine, again), name
        mine.fill_(7)  # the dict is the caller's
    with FSDP.state_dict_type(model, "full"):
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), name


@pytest.mark.parametrize("form", ["full", "sharded", "local"])
def test_export_in_every_form_is_a_read_of_one_unit_at_a_time(form):
    run_ranks(2, export_is_a_read, form)


# ---------------------------------------------------------------- through torch's checkpoints


def sharded(model: nn.Module) -> dict[str, Any]:
    with FSDP.state_dict_type(model, "sharded"):
        return model.state_dict()


def by_rows(model: nn.Module) -> nn.Module:
    """Torch's FSDP2."""
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def as_torchs_fsdp1(model: nn.Module) -> nn.Module:
    one = TorchFSDP(model, device_id=torch.device("cpu"))
    with warnings.catch_warnings(action="ignore"):
        TorchFSDP.set_state_dict_type(one, fsdp_ref.StateDictType.SHARDED_STATE_DICT)
    return one


def hybrid(model: nn.Module) -> FSDP:
    return nested(model, sharding_strategy="HYBRID_SHARD", process_group=("set2", "mod2"))


def copied(model: nn.Module) -> FSDP:
    return one_unit(model, sharding_strategy="NO_SHARD")


def with_originals(model: nn.Module) -> FSDP:
    return nested(model, use_orig_params=True)


def plainly(model: nn.Module) -> nn.Module:
    return model


WAYS = {
    "nested": nested,
    "one unit": one_unit,
    "three deep": three_deep,
    "hybrid": hybrid,
    "copied": copied,
    "original parameters": with_originals,
    "fully_shard": by_rows,
    "torch's FSDP1": as_torchs_fsdp1,
    "plain": plainly,
}


def state_of(model: nn.Module) -> dict[str, Any]:
    return sharded(model) if isinstance(model, FSDP) else model.state_dict()


def wholes_of(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, TorchFSDP):
        with warnings.catch_warnings(action="ignore"):
            TorchFSDP.set_state_dict_type(model, fsdp_ref.StateDictType.FULL_STATE_DICT)
            return model.state_dict()
    return {name: whole(value) for name, value in state_of(model).items()}


def save(way: str, path: str, asynchronously: bool = False) -> None:
    plain = seeded()
    plain.load_state_dict(shifted(plain.state_dict()))
    model = WAYS[way](plain)
    state = state_of(model)
    if asynchronously:
        # A group of its own, so that its messages never meet those of the training.
        saved = dcp.async_save(state, checkpoint_id=path, process_group=dist.new_group())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):  # training goes on meanwhile
            mean_square(model(my_part(whole_batch()))).backward()
            optimizer.step()
            optimizer.zero_grad()
        saved.result()
    else:
        dcp.save(state, checkpoint_id=path)


def load(ways: list[str], path: str) -> None:
    expected = shifted(seeded().state_dict())
    for way in ways:
        model = WAYS[way](seeded())
        state = state_of(model)
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state)
        found = wholes_of(model)
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert torch.equal(found[name], value), f"{way}: {name}"


THEIRS = ["fully_shard", "torch's FSDP1", "plain"]
OURS = ["nested", "one unit", "three deep", "copied", "original parameters"]


@pytest.mark.parametrize("way", ["nested", "copied"])
def test_a_checkpoint_loads_at_every_number_of_ranks_and_wrapping(way, tmp_path):
    run_ranks(2, save, way, str(tmp_path))
    for world_size in (1, 2, 3, 4):
        even = ["hybrid"] if world_size == 4 else []
        run_ranks(world_size, load, [*OURS, *even, *THEIRS], str(tmp_path))


@pytest.mark.parametrize("way", ["hybrid", "original parameters", *THEIRS])
def test_a_checkpoint_of_every_kind_of_model_loads_here(way, tmp_path):
    run_ranks(4, save, way, str(tmp_path))
    for world_size in (2, 3):
        run_ranks(world_size, load, OURS, str(tmp_path))


@pytest.mark.parametrize("way", ["nested", "original parameters"])
def test_an_asynchronous_save_has_what_was_there_when_it_began(way, tmp_path):
    run_ranks(2, save, way, str(tmp_path), True)
    run_ranks(3, load, ["nested"], str(tmp_path))


def every_case(step: str, names: list[str], path: str) -> None:
    """Odd shapes, several dtypes, tied and frozen weights, batch norm."""
    for name in names:
        case, where = CASES[name], str(Path(path) / name)
        model = CASE_WRAPPINGS["one unit"](
            case.model(torch.float32, seed=int(step != "save")), case
        )
        state = sharded(model)
        if step == "save":
            dcp.save(state, checkpoint_id=where)
            continue
        expected = case.model(torch.float32, seed=0).state_dict()
        assert list(state) == list(expected)
        dcp.load(state, checkpoint_id=where)
        model.load_state_dict(state)
        for key, value in model.state_dict().items():
            assert torch.equal(value, expected[key]), f"{name}: {key}"
            assert value.dtype == expected[key].dtype


def test_every_model_goes_through_a_checkpoint(tmp_path):
    run_ranks(3, every_case, "save", list(CASES), str(tmp_path))
    run_ranks(2, every_case, "load", list(CASES), str(tmp_path))


# ---------------------------------------------------------------- what may be loaded


def any_form(form: str) -> None:
    """DTensors on another mesh, cut another way, in any form that is set, and for buffers too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh, expected = init_device_mesh("cpu", (2,)), shifted(seeded().state_dict())
    model = nested(seeded())
    columns = {
        name: distribute_tensor(value, mesh, [Shard(value.dim() - 1)])
        for name, value in expected.items()
    }
    with FSDP.state_dict_type(model, form):
        model.load_state_dict(columns)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    around = nn.ModuleDict({"inner": nested(seeded())})
    around.load_state_dict({f"inner.{name}": value for name, value in columns.items()})
    for name, value in around.state_dict().items():
        assert torch.equal(value, expected[name.removeprefix("inner.")]), name
    case = CASES["conv"]
    convolution = FSDP(case.model(torch.float32))
    wanted = shifted(case.model(torch.float32).state_dict())
    convolution.load_state_dict(
        {
            name: distribute_tensor(value, mesh, [Replicate()]) if value.dim() else value
            for name, value in wanted.items()
        }
    )
    for name, value in convolution.state_dict().items():
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("form", ["full", "sharded"])
def test_dtensors_of_any_kind_are_loaded_whatever_form_is_set(form):
    run_ranks(2, any_form, form)


def alone() -> None:
    """Nothing is left half loaded where the pieces of others do not come."""
    model = nested(seeded())
    state, before = sharded(model), model.state_dict()
    if dist.get_rank() == 0:
        plain = {name: before[name] + 1 for name in list(before)[:2]}  # written before it fails
        with provokes(FSDP.load_state_dict, SilentRanksError, match="load_state_dict"):
            model.load_state_dict({**state, **plain})
        local = model.local_state_dict()
        fresh = nested(seeded()).local_state_dict()
        assert all(torch.equal(value, fresh[name]) for name, value in local.items())
        with provokes(loading.Loading.finish, SilentRanksError):
            model.load_state_dict(state)


def test_a_rank_that_loads_pieces_alone_hears_of_it_and_keeps_what_it_had():
    run_ranks(2, alone, dist_timeout=2)


# ---------------------------------------------------------------- groups smaller than the world


def experts(path: str, group: str) -> None:
    model = with_experts(group)
    drift(model)
    before = sharded(model)
    first = {"self": dist.get_rank(), "set2": dist.get_rank() // 2 * 2}[group]
    assert [name for name in before if "@" in name] == [
        f"{name}@rank{first}" for name in seeded(Experts).state_dict() if "layers.1." in name
    ]
    dcp.save(before, checkpoint_id=path)
    other = with_experts(group)
    state = sharded(other)
    dcp.load(state, checkpoint_id=path)
    other.load_state_dict(state)
    after = sharded(other)
    assert list(after) == list(before)
    for name, value in before.items():
        mine, theirs = (v.to_local() if isinstance(v, DTensor) else v for v in (value, after[name]))
        assert torch.equal(mine, theirs), name
    alone = one_unit(seeded(Experts))  # all ranks share the expert: no version is theirs
    with pytest.raises(CheckpointException, match=r"Missing key.*layers\.1\."):
        dcp.load(sharded(alone), checkpoint_id=path)
    # The versions really differ, so a file with one of them would have been noticed.
    scales: list[Any] = [None] * dist.get_world_size()
    scale = whole(before[f"layers.1.scale@rank{first}"])
    dist.all_gather_object(scales, scale)
    assert not torch.equal(scales[0], scales[-1])


@pytest.mark.parametrize("group", ["self", "set2"])
def test_each_groups_version_of_a_weight_is_saved_and_comes_back_to_its_group(group, tmp_path):
    run_ranks(4, experts, str(tmp_path), group)


def offloaded() -> None:
    model = nested(seeded())
    with FSDP.state_dict_type(model, "sharded", {"offload_to_cpu": True}):
        state = model.state_dict()
    assert {value.to_local().device.type for value in state.values()} == {"cpu"}


def test_the_sharded_form_can_be_on_the_cpu():
    run_ranks(2, offloaded)
