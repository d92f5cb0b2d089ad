"""The local form is this rank's memory, comes back to its rank only, and says what it holds."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import loading, local_shards, timeline
from fsdp_ref.errors import LoadError, SilentRanksError, SummonContextError
from tests.models import CASES
from tests.parity.training import WRAPPINGS as CASE_WRAPPINGS
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.test_small_groups import drift, with_experts
from tests.toy import mean_square, my_part, nested, seeded, whole_batch


def trained(orig: bool = False) -> FSDP:
    """The experts and their buffer differ from rank to rank."""
    model = with_experts("self", use_orig_params=orig)
    drift(model)
    return model


def flat(model: nn.Module) -> list[Tensor]:
    return [p.data for part in FSDP.fsdp_modules(model) for p in part._unit.flat_params]


def tag() -> str:
    return f"@rank{dist.get_rank()}of{dist.get_world_size()}"


def memory(orig: bool) -> None:
    model = trained(orig)
    with timeline() as recorded:
        state = model.local_state_dict()
    assert recorded.events == []  # nothing is sent, nothing gathered
    assert list(state) == [
        f"{name}{tag()}" for name in ("_flat_param", "layers.1._flat_param", "layers.1.seen")
    ]
    for part, name in ((model, "_flat_param"), (model.layers[1], "layers.1._flat_param")):
        value = state[name + tag()]
        assert type(value) is Tensor
        assert torch.equal(value, part._unit.flat_params[0].data)
        assert value.shape == (part._unit.flat_params[0]._layout.shard_numel,)
        assert value.untyped_storage().nbytes() == value.nbytes
    with FSDP.state_dict_type(model, "local"):
        under_type = model.state_dict(prefix="model.")
        assert list(under_type) == [f"model.{name}" for name in state]
        inner = model.layers[1].local_state_dict()
    assert list(inner) == [f"_flat_param{tag()}", f"seen{tag()}"]

    other = with_experts("self", use_orig_params=orig)
    mean_square(other(my_part(whole_batch()))).backward()
    result = other.load_local_state_dict(state)
    assert (result.missing_keys, result.unexpected_keys) == ([], [])
    for mine, theirs in zip(flat(model), flat(other), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(other.layers[1].seen, model.layers[1].seen)
    with FSDP.state_dict_type(model, "local"), FSDP.state_dict_type(other, "local"):
        other.load_state_dict(inner_renamed(inner), strict=False)
        again = with_experts("self", use_orig_params=orig)
        FSDP.set_state_dict_type(again, "local")
        again.load_state_dict(state)
    with torch.no_grad():
        first, second, third = (one(whole_batch()) for one in (model, other, again))
    assert torch.equal(first, second)
    assert torch.equal(first, third)


def inner_renamed(state: dict[str, Any]) -> dict[str, Any]:
    return {f"layers.1.{name}": value for name, value in state.items()}


@pytest.mark.parametrize("orig", [False, True])
def test_local_shards_are_copied_without_a_message_and_come_back(orig):
    run_ranks(2, memory, orig)


def around() -> None:
    """In a model around units, through torch's own methods."""
    model = nn.ModuleDict({"inner": trained()})
    model.register_buffer("count", torch.ones(1))
    FSDP.set_state_dict_type(model, "local")
    state = model.state_dict()
    assert sorted(state) == sorted(
        ["count", *(f"inner.{name}" for name in model["inner"].local_state_dict())]
    )
    other = nn.ModuleDict({"inner": with_experts("self")})
    other.register_buffer("count", torch.zeros(1))
    FSDP.set_state_dict_type(other, "local")
    other.load_state_dict(state)
    assert other.count == 1
    for mine, theirs in zip(flat(model), flat(other), strict=True):
        assert torch.equal(mine, theirs)
    del state[f"inner._flat_param{tag()}"]
    with pytest.raises(RuntimeError, match="missing names"):
        other.load_state_dict(state)


def test_local_shards_inside_another_model_are_saved_and_loaded_by_torch():
    run_ranks(2, around)


# ---------------------------------------------------------------- what is refused


def of_rank(rank: int, size: int) -> dict[str, Any]:
    state = nested(seeded()).local_state_dict()
    return {name.replace(tag(), f"@rank{rank}of{size}"): value for name, value in state.items()}


def strangers() -> None:
    model = nested(seeded())
    before = model.local_state_dict()
    for rank, size in ((1 - dist.get_rank(), 2), (dist.get_rank(), 4)):
        wrong = of_rank(rank, size)
        with provokes(
            FSDP.load_local_state_dict, LoadError, match=f"@rank{rank}of{size}"
        ) as caught:
            model.load_local_state_dict(wrong)
        assert f"'{tag()}'" in caught.message
        assert "another rank or world size" in caught.message
    with provokes(local_shards.load_local_state, LoadError, match="'layers.0.scale'"):
        model.load_local_state_dict(seeded().state_dict())
    with provokes(FSDP.load_state_dict, LoadError, match="LOCAL_STATE_DICT"):
        model.load_state_dict(before)
    with provokes(loading.Loading.refuse_local, LoadError, match="load_local_state_dict"):
        model.load_state_dict(before)

    incomplete = dict(before)
    del incomplete[f"layers.2._flat_param{tag()}"]
    incomplete[f"layers.9._flat_param{tag()}"] = torch.ones(18)
    incomplete[f"_flat_param{tag()}"] = torch.ones(3)
    incomplete[f"layers.0._flat_param{tag()}"] = torch.ones(18)
    with provokes(FSDP.load_local_state_dict, LoadError) as caught:
        model.load_local_state_dict(incomplete)
    assert f"missing names ['layers.2._flat_param{tag()}']" in caught.message
    assert f"unexpected names ['layers.9._flat_param{tag()}']" in caught.message
    assert f"'_flat_param{tag()}' of shape [3] for [6]" in caught.message
    with provokes(FSDP.load_local_state_dict, LoadError):  # a shape counts in any case
        model.load_local_state_dict(incomplete, strict=False)
    assert all(torch.equal(v, before[name]) for name, v in model.local_state_dict().items())
    del incomplete[f"_flat_param{tag()}"]
    result = model.load_local_state_dict(incomplete, strict=False)
    assert result.missing_keys == [f"{n}_flat_param{tag()}" for n in ("", "layers.2.")]
    assert (model.local_state_dict()[f"layers.0._flat_param{tag()}"] == 1).all()

    with model.summon_full_params():
        with provokes(FSDP.local_state_dict, SummonContextError, match="older than what is"):
            model.local_state_dict()
        with provokes(local_shards.local_state, SummonContextError):
            model.local_state_dict()
        with provokes(FSDP.load_local_state_dict, SummonContextError):
            model.load_local_state_dict(before)
        with provokes(local_shards.load_local_state, SummonContextError):
            model.load_local_state_dict(before)


def test_shards_of_another_rank_or_number_of_ranks_are_refused_by_name():
    run_ranks(2, strangers)


# ---------------------------------------------------------------- torch's checkpoints


def through_a_checkpoint(path: str) -> None:
    """Saved, changed and loaded: every rank has its own again. Plain names would lose them."""
    model = trained()
    state = model.local_state_dict()
    dcp.save(state, checkpoint_id=path)
    kept = {name: value.clone() for name, value in state.items()}
    for value in state.values():
        value.fill_(7)
    dcp.load(state, checkpoint_id=path)
    model.load_local_state_dict(state)
    for name, value in model.local_state_dict().items():
        assert torch.equal(value, kept[name]), name
    # What would be lost without ranks in the names:
    plain = {name.removesuffix(tag()): value.clone() for name, value in kept.items()}
    dcp.save(plain, checkpoint_id=f"{path}/plain")
    dcp.load(plain, checkpoint_id=f"{path}/plain")
    lost = [name for name, value in plain.items() if not torch.equal(value, kept[name + tag()])]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, lost)
    assert any(everywhere)


def test_a_checkpoint_of_local_shards_gives_each_rank_its_own(tmp_path):
    run_ranks(4, through_a_checkpoint, str(tmp_path))


# ---------------------------------------------------------------- what it says


def written_down(name: str, wrapping: str, directory: str) -> None:
    case = CASES[name]
    model = CASE_WRAPPINGS[wrapping](case.model(torch.float32), case)
    where = Path(directory) / f"{name}-{dist.get_rank()}"
    torch.save(model.local_state_dict(), f"{where}.pt")
    Path(f"{where}.json").write_text(json.dumps(model.local_metadata_dict()))


def put_together(directory: Path, name: str, size: int) -> dict[str, Tensor]:
    """Make whole weights of local ones, by what the metadata says and nothing else."""
    states, notes = [], []
    for rank in range(size):
        states.append(torch.load(directory / f"{name}-{rank}.pt", weights_only=True))
        notes.append(json.loads((directory / f"{name}-{rank}.json").read_text()))
    assert [(note["rank"], note["world_size"]) for note in notes] == [
        (r, size) for r in range(size)
    ]
    result: dict[str, Tensor] = {}
    for number, unit in enumerate(notes[0]["units"]):
        for place, flat in enumerate(unit["flat_parameters"]):
            theirs = {rank: notes[rank]["units"][number] for rank in unit["ranks"]}
            shards = [
                states[rank][one["flat_parameters"][place]["key"]] for rank, one in theirs.items()
            ]
            assert [one["position"] for one in theirs.values()] == list(range(len(theirs)))
            assert all(shard.numel() == flat["shard_numel"] for shard in shards)
            whole = torch.cat(shards)
            assert str(whole.dtype) == f"torch.{flat['dtype']}"
            assert whole.numel() == flat["numel"] + flat["padding"]
            for slot in flat["slots"]:
                piece = whole[slot["offset"] :][: torch.Size(slot["shape"]).numel()]
                for alias in (slot["name"], *slot["aliases"]):
                    result[alias] = piece.view(slot["shape"])
    for plain, key in (notes[0]["buffers"] | notes[0]["parameters"]).items():
        result[plain] = states[0][key]
    return result


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 3])
def test_metadata_says_enough_to_put_whole_weights_together(name, size, tmp_path):
    run_ranks(size, written_down, name, "one unit", str(tmp_path))
    found = put_together(tmp_path, name, size)
    expected = CASES[name].model(torch.float32).state_dict()
    assert set(found) == set(expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


class Remembers(nn.Linear):
    """Extra state, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.steps = dist.get_rank()

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def extra_state_and_copies() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    ignored = Remembers()
    model = FSDP(
        nn.Sequential(FSDP(Remembers(), ("set2", "mod2"), "HYBRID_SHARD"), ignored),
        ignored_modules=[ignored],
    )
    notes, state = model.local_metadata_dict(), model.local_state_dict()
    keys = [flat["key"] for unit in notes["units"] for flat in unit["flat_parameters"]]
    for group in ("buffers", "parameters", "extra_state"):
        keys += notes[group].values()
    assert sorted(keys) == sorted(state)
    assert list(notes["parameters"]) == ["1.weight", "1.bias"]
    assert list(notes["extra_state"]) == ["0._extra_state", "1._extra_state"]
    assert notes["buffers"] == {}
    assert notes["units"][1]["copies"] == [[0, 1], [2, 3]]
    assert notes["units"][1]["ranks"] == [[0, 1], [2, 3]][rank // 2]
    model.module[0].module.steps = 9
    model.load_local_state_dict(state)
    assert model.module[0].module.steps == rank


def test_extra_state_ignored_parameters_and_copies_are_told_too():
    run_ranks(4, extra_state_and_copies)


def rank_1_is_silent() -> None:
    model = nested(seeded())
    if dist.get_rank() == 0:
        with provokes(FSDP.local_metadata_dict, SilentRanksError):
            model.local_metadata_dict()


def test_metadata_of_a_model_that_was_never_used_needs_all_ranks():
    run_ranks(2, rank_1_is_silent, dist_timeout=3)
