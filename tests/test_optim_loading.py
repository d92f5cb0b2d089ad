"""State that does not fit is refused before an optimizer is touched; other state finds its way."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors
from fsdp_ref.optim_names import OlderOptimizerNames
from fsdp_ref.optim_state import attach
from fsdp_ref.optimizer_watch import own_pieces
from tests.models import CASES
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.test_optim_state import (
    OPTIMIZERS,
    assert_same_state,
    assert_unchanged,
    own_state,
    state_by_name,
    step,
    two_groups,
    with_head,
)
from tests.toy import assert_equal_weights, my_part, nested, one_unit, seeded, three_deep

# ---------------------------------------------------------------- refusals


def adam_after(steps: int, model: nn.Module, **arguments: Any) -> torch.optim.Adam:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, **arguments)
    for _ in range(steps):
        step(model, optimizer)
    return optimizer


def changed(exported: dict[str, Any], name: str, to: Any) -> dict[str, Any]:
    """A copy in which one weight is called otherwise, or is gone."""
    result = copy.deepcopy(exported)
    values = result["state"].pop(name)
    (group,) = result["param_groups"]
    group["params"] = [to if one == name else one for one in group["params"]]
    if to is None:
        group["params"] = [one for one in group["params"] if one is not None]
    else:
        result["state"][to] = values
    return result


def refusals(use_orig_params: bool) -> None:
    model = nested(seeded(), use_orig_params=use_orig_params)
    optimizer = adam_after(2, model)
    exported = FSDP.optim_state_dict(model, optimizer)
    before, groups = own_state(optimizer), copy.deepcopy(optimizer.param_groups[0]["lr"])
    shapes = copy.deepcopy(exported)
    shapes["state"]["layers.1.scale"]["exp_avg"] = torch.zeros(6)
    kinds = copy.deepcopy(exported)
    kinds["state"]["head.weight"]["exp_avg"] = torch.zeros(2, 5).T
    cases = {
        "nothing for 'head.bias'": changed(exported, "head.bias", None),
        "'head.shift', not in the model": changed(exported, "head.bias", "head.shift"),
        r"'layers.1.scale'.*'exp_avg' of shape \(5,\).*found \(6,\)": shapes,
        r"of shape \(2, 5\), found \(5, 2\)": kinds,
        "the keys \\['state'\\]": {"state": exported["state"]},
        "a dict with the keys.*found int": 3,
        "the key 0.*rekey_optim_state_dict": {"state": {0: {}}, "param_groups": [{"params": [0]}]},
    }
    for match, given in cases.items():
        with provokes(FSDP.optim_state_dict_to_load, errors.OptimizerStateError, match=match):
            FSDP.optim_state_dict_to_load(model, optimizer, given, load_directly=True)
        with provokes(FSDP.shard_full_optim_state_dict, errors.OptimizerStateError, match=match):
            FSDP.shard_full_optim_state_dict(given, model)
    head = torch.optim.Adam(model.head.parameters() if use_orig_params else [model._flat_param])
    with provokes(
        FSDP.optim_state_dict_to_load, errors.OptimizerStateError, "not in the optimizer"
    ):
        FSDP.optim_state_dict_to_load(model, head, exported)
    steps = copy.deepcopy(exported)
    steps["state"]["head.bias"]["step"] += 1
    if use_orig_params:  # every weight has its own
        FSDP.optim_state_dict_to_load(model, optimizer, steps)
    else:
        match = "the same 'step' as 'head.weight'.*use_orig_params"
        with provokes(FSDP.optim_state_dict_to_load, errors.OptimizerStateError, match=match):
            FSDP.optim_state_dict_to_load(model, optimizer, steps, load_directly=True)
    assert_unchanged(optimizer, before)
    assert optimizer.param_groups[0]["lr"] == groups


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_loaded(use_orig_params):
    run_ranks(2, refusals, use_orig_params)


# ---------------------------------------------------------------- from before wrapping


def from_before_wrapping() -> None:
    """With original parameters the optimizer may be older than the units, and its state whole."""
    plain, other = seeded(), seeded()
    alone, optimizer = (OPTIMIZERS["adamw"](m.parameters()) for m in (plain, other))
    step(plain, alone)
    step(other, optimizer)
    model = nested(other, use_orig_params=True)
    exported = FSDP.optim_state_dict(model, optimizer)  # before it has stepped again
    assert_same_state(exported["state"], state_by_name(plain, alone), exact=True)
    for _ in range(2):
        step(plain, alone)
        step(model, optimizer)
    assert_equal_weights(model, plain)
    for parameter, values in optimizer.state.items():
        assert values["exp_avg"].shape == parameter.shape  # this rank's piece
    theirs = copy.deepcopy(alone.state_dict())  # or the two would count their steps in one tensor
    optimizer.load_state_dict(theirs)  # whole tensors, in the same order
    step(plain, alone)
    step(model, optimizer)
    assert_equal_weights(model, plain)

    flat = seeded()
    older = torch.optim.SGD(flat.parameters(), lr=0.1)
    wrapped = nested(flat)
    for call in (FSDP.optim_state_dict, FSDP.full_optim_state_dict):
        with pytest.raises(errors.OptimizerBeforeWrappingError, match="before wrapping"):
            call(wrapped, older)
    with provokes(FSDP.optim_state_dict, errors.OptimizerBeforeWrappingError):
        FSDP.optim_state_dict(wrapped, older)
    with provokes(FSDP.optim_state_dict_to_load, errors.OptimizerBeforeWrappingError):
        FSDP.optim_state_dict_to_load(wrapped, older, exported)
    newer = adam_after(1, wrapped)
    newer.state[wrapped._flat_param]["exp_avg"] = torch.zeros(3, 4)
    newer.load_state_dict({**newer.state_dict()})
    with pytest.raises(errors.OptimizerStateError, match="'exp_avg' of shape \\(3, 4\\)"):
        step(wrapped, newer)
    with provokes(own_pieces, errors.OptimizerStateError, "head.weight"):
        own_pieces({"exp_avg": torch.zeros(3, 4)}, wrapped._flat_param, None)


def test_state_of_whole_weights_is_cut_where_parameters_are_kept_and_refused_where_not():
    run_ranks(2, from_before_wrapping)
    run_ranks(3, from_before_wrapping)


# ---------------------------------------------------------------- by number


def rekeying() -> None:
    plain = seeded()
    reverse = torch.optim.Adam(list(plain.parameters())[::-1], lr=0.1)
    step(plain, reverse)
    own = reverse.state_dict()
    named = FSDP.rekey_optim_state_dict(own, "PARAM_NAME", plain, optim=reverse)
    assert_same_state(named["state"], state_by_name(plain, reverse), exact=True)
    model = nested(seeded())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    FSDP.optim_state_dict_to_load(model, optimizer, named, load_directly=True)
    exported = FSDP.optim_state_dict(model, optimizer)
    assert_same_state(exported["state"], state_by_name(plain, reverse), exact=True)
    back = FSDP.rekey_optim_state_dict(exported, "PARAM_ID", plain, optim=reverse)
    assert_same_state(back["state"], own["state"], exact=True)
    assert [group["params"] for group in back["param_groups"]] == [list(range(11))]
    assert FSDP.rekey_optim_state_dict(back, "PARAM_ID", plain)["state"].keys() == set(range(11))
    step(plain, reverse)
    assert named["state"]["head.bias"]["step"] == 1  # a copy

    for given, to, fits, match in (
        (own, "PARAM_NAME", plain, r"of shape \(5,\), found \(2,\) under the key 0"),
        (exported, "PARAM_ID", seeded().layers[0], "the key 'head.weight'"),
        ({**own, "state": {0: {}, "head.bias": {}}}, "PARAM_NAME", plain, "numbers and names"),
        (own, "PARAM_SHAPE", plain, "found 'PARAM_SHAPE'"),
        (own, "PARAM_NAME", model, "a flat parameter"),
    ):
        with provokes(FSDP.rekey_optim_state_dict, errors.OptimizerStateError, match=match):
            FSDP.rekey_optim_state_dict(given, to, fits)


def test_numbers_and_names_are_translated_by_the_optimizer_they_belong_to():
    run_ranks(2, rekeying)


def tied_and_through_torchs_helper() -> None:
    """A tied weight is found under each of its names; torch's helper reads the full form."""
    case = CASES["tied"]
    model = FSDP(case.model(torch.float32))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batch = my_part(case.batches(1, torch.float32)[0])
    case.loss(model(batch), batch).backward()
    optimizer.step()
    before, exported = own_state(optimizer), FSDP.optim_state_dict(model, optimizer)
    assert "embedding.weight" in exported["state"]
    assert "head.weight" not in exported["state"]  # one state, under the first name
    renamed = changed(exported, "embedding.weight", "head.weight")
    FSDP.optim_state_dict_to_load(model, optimizer, renamed, load_directly=True)
    assert_unchanged(optimizer, before)

    model = nested(seeded())
    optimizer = adam_after(2, model)
    exported = FSDP.optim_state_dict(model, optimizer)
    plain = model_as_plain(model)
    alone = torch.optim.Adam(plain.parameters())
    set_optimizer_state_dict(plain, alone, copy.deepcopy(exported))
    assert_same_state(state_by_name(plain, alone), exported["state"], exact=True)
    assert alone.param_groups[0]["lr"] == 0.1
    step(plain, alone)
    step(model, optimizer)
    assert_equal_weights(model, plain)


def test_tied_weights_have_one_state_and_torchs_helper_brings_all_into_a_plain_optimizer():
    run_ranks(2, tied_and_through_torchs_helper)


def fairscales() -> None:
    plain, model = seeded(), three_deep(seeded())
    alone, optimizer = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (plain, model))
    step(plain, alone)
    step(model, optimizer)
    full = model.gather_full_optim_state_dict(optimizer)
    assert_same_state(full["state"], alone.state_dict()["state"])
    assert full["param_groups"] == alone.state_dict()["param_groups"]
    on_last = model.gather_full_optim_state_dict(optimizer, recipient_rank=1)
    assert (on_last is None) == (dist.get_rank() != 1)
    on_first = model.gather_full_optim_state_dict(optimizer, recipient_rank=0)
    if dist.get_rank() == 0:
        assert_same_state(on_first["state"], full["state"], exact=True)
    alone.load_state_dict(full)  # a plain optimizer takes it as it is
    before = own_state(optimizer)
    for given in (full, alone.state_dict()):
        optimizer.load_state_dict(model.get_shard_from_optim_state_dict(given))
        assert_unchanged(optimizer, before)

    plain, model = seeded(), with_head(seeded())
    alone, optimizer = (torch.optim.Adam(two_groups(m, head_first=True)) for m in (plain, model))
    step(plain, alone)
    step(model, optimizer)
    full = model.gather_full_optim_state_dict(optimizer)
    assert_same_state(full["state"], alone.state_dict()["state"])
    assert full["param_groups"] == alone.state_dict()["param_groups"]
    before = own_state(optimizer)
    optimizer.load_state_dict(model.get_shard_from_optim_state_dict(full))
    assert_unchanged(optimizer, before)
    del full["state"][3]["exp_avg"]
    full["state"][3]["exp_avg"] = torch.zeros(1)
    with provokes(FSDP.get_shard_from_optim_state_dict, errors.OptimizerStateError, "of shape"):
        model.get_shard_from_optim_state_dict(full)
    optimizer.state[next(iter(optimizer.state))]["step"] += dist.get_rank()
    with provokes(OlderOptimizerNames.gather_full_optim_state_dict, errors.OptimizerStateError):
        model.gather_full_optim_state_dict(optimizer)


def test_fairscales_pair_gives_what_a_plain_optimizer_loads_and_takes_it_back():
    run_ranks(2, fairscales)


# ---------------------------------------------------------------- torch's own helpers


def with_torchs_helpers(folder: str) -> None:
    """Save, change, load, compare per rank: each rank has its own pieces again."""
    model = nested(seeded(), use_orig_params=True)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step(model, optimizer)
    with provokes(get_optimizer_state_dict, errors.OptimizerStateError, "attach"):
        get_optimizer_state_dict(model, optimizer)
    with pytest.raises(errors.OptimizerStateError, match="attach"):  # called as a Stateful object
        dcp.save({"optimizer": optimizer}, checkpoint_id=folder)
    attach(model, optimizer)
    attach(model, optimizer)  # twice is once
    before, direct = own_state(optimizer), FSDP.optim_state_dict(model, optimizer)
    saved = get_optimizer_state_dict(model, optimizer)
    assert set(saved["state"]) == set(direct["state"])
    dcp.save({"optimizer": saved}, checkpoint_id=folder)
    step(model, optimizer)
    fresh = get_optimizer_state_dict(model, optimizer)
    dcp.load({"optimizer": fresh}, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, fresh)
    assert_unchanged(optimizer, before)
    options = StateDictOptions(full_state_dict=True)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    assert_same_state(full["state"], direct["state"], exact=True)
    step(model, optimizer)
    set_optimizer_state_dict(model, optimizer, full, options=options)
    assert_unchanged(optimizer, before)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_unchanged(optimizer, before)
    again = FSDP.optim_state_dict(model, optimizer, optimizer.state_dict())
    assert_same_state(again["state"], direct["state"], exact=True)
    flat = nested(seeded())
    with provokes(attach, errors.OptimizerStateError, "flat parameters"):
        attach(flat, torch.optim.Adam(flat.parameters()))


def loads_elsewhere(folder: str, use_orig_params: bool) -> dict[str, Any]:
    """Read the same files with another number of ranks, wrapping and form."""
    model = one_unit(seeded(), use_orig_params=use_orig_params)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step(model, optimizer)
    with FSDP.state_dict_type(model, "sharded"):
        state = FSDP.optim_state_dict(model, optimizer)
        dcp.load({"optimizer": state}, checkpoint_id=folder)
        FSDP.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    return FSDP.optim_state_dict(model, optimizer)


def loads_into_fully_shard(folder: str) -> dict[str, Any]:
    model = seeded()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    state = get_optimizer_state_dict(model, optimizer)
    dcp.load({"optimizer": state}, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state)
    options = StateDictOptions(full_state_dict=True)
    found: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=options)
    return found


def test_state_in_checkpoints_of_torch_is_whole_for_every_rank_and_every_reader(tmp_path):
    folder = str(tmp_path / "checkpoint")
    run_ranks(2, with_torchs_helpers, folder)
    plain = seeded()
    alone = OPTIMIZERS["adamw"](plain.parameters())
    step(plain, alone)
    expected = state_by_name(plain, alone)
    for use_orig_params in (False, True):
        for found in run_ranks(3, loads_elsewhere, folder, use_orig_params):
            assert_same_state(found["state"], expected)
    for found in run_ranks(2, loads_into_fully_shard, folder):
        assert_same_state(found["state"], expected)


def a_word_of_warning() -> None:
    model = nested(seeded())
    optimizer = adam_after(1, model)
    with provokes(torch.optim.Optimizer.state_dict, errors.LocalOptimizerStateWarning, "this rank"):
        optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()  # said once
        FSDP.optim_state_dict(model, adam_after(1, model))
        other = torch.optim.Adam(nn.Linear(2, 2).parameters())
        other.state_dict()


def test_an_optimizers_own_state_dict_says_that_it_is_about_one_rank():
    run_ranks(2, a_word_of_warning)


def fine_alone() -> None:
    model = nested(seeded())
    optimizer = adam_after(1, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()


def test_on_one_rank_there_is_nothing_to_say():
    run_ranks(1, fine_alone)


def keys_of_its_own() -> None:
    """An optimizer may keep single values that belong to no weight."""
    model = nested(seeded())
    optimizer = adam_after(1, model)
    optimizer.state["rounds"] = 3
    optimizer.state["seen"] = torch.tensor(7)
    exported = FSDP.optim_state_dict(model, optimizer)
    assert exported["state"]["rounds"] == 3
    assert exported["state"]["seen"] == 7
    optimizer.state["seen"] += 1
    assert exported["state"]["seen"] == 7
    other = torch.optim.Adam(model.parameters())
    FSDP.optim_state_dict_to_load(model, other, exported, load_directly=True)
    assert other.state["rounds"] == 3
    FSDP.set_state_dict_type(model, "full", None, {"rank0_only": True})
    given = exported if dist.get_rank() == 0 else {}
    result = FSDP.optim_state_dict_to_load(model, other, given)
    assert result["state"]["seen"] == 7


def test_what_an_optimizer_keeps_under_keys_of_its_own_travels_along():
    run_ranks(2, keys_of_its_own)


class TorchsSharded:
    """Looks like torch's ShardedTensor, which FSDP1 writes where it has no device mesh."""

    def local_shards(self) -> list[Any]:
        return []


def sharded_tensors() -> None:
    model = nested(seeded())
    optimizer = adam_after(1, model)
    exported = FSDP.optim_state_dict(model, optimizer)
    exported["state"]["head.bias"]["exp_avg"] = TorchsSharded()
    with provokes(FSDP.optim_state_dict_to_load, errors.OptimizerStateError, "a ShardedTensor"):
        FSDP.optim_state_dict_to_load(model, optimizer, exported)


def test_an_older_kind_of_sharded_tensor_is_refused_by_name():
    run_ranks(1, sharded_tensors)


def given_by_hand() -> None:
    """The optimizer's own dict may be handed over, and names may be its keys."""
    model = nested(seeded(), use_orig_params=True)
    optimizer = adam_after(1, model)
    own = optimizer.state_dict()
    step(model, optimizer)
    exported = FSDP.optim_state_dict(model, optimizer, own)
    assert exported["state"]["head.bias"]["step"] == 2  # torch's dict is no copy
    names = [name for name, _ in model.named_parameters()]
    named = {
        "state": {names[key]: values for key, values in own["state"].items()},
        "param_groups": [{**own["param_groups"][0], "params": names}],
    }
    again = FSDP.optim_state_dict(model, optimizer, named)
    assert_same_state(again["state"], exported["state"], exact=True)
    result = FSDP.optim_state_dict_to_load(model, optimizer, exported, is_named_optimizer=True)
    assert_same_state(result["state"], named["state"], exact=True)
    assert result["param_groups"][0]["params"] == names


def test_a_dict_at_hand_and_optimizers_with_names_for_keys_are_understood():
    run_ranks(2, given_by_hand)


def silent() -> None:
    model = nested(seeded())
    optimizer = adam_after(1, model)
    exported = FSDP.full_optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        with provokes(FSDP.scatter_full_optim_state_dict, errors.SilentRanksError, "rank 1"):
            FSDP.scatter_full_optim_state_dict(exported, model, optim=optimizer)
        with provokes(FSDP.gather_full_optim_state_dict, errors.SilentRanksError, "rank 1"):
            model.gather_full_optim_state_dict(optimizer)
        FSDP.set_state_dict_type(model, "full", None, {"rank0_only": True})
        with provokes(FSDP.optim_state_dict_to_load, errors.SilentRanksError, "rank 1"):
            FSDP.optim_state_dict_to_load(model, optimizer, exported)


def test_a_rank_that_does_not_take_part_is_named():
    run_ranks(2, silent, dist_timeout=2)


def everything_at_once(path: str) -> None:
    """Written by one rank as an ordinary file, read without unpickling anything but tensors."""
    model = nested(seeded())
    optimizer = adam_after(2, model)
    exported = FSDP.full_optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        torch.save(exported, path)
    dist.barrier()
    other = three_deep(seeded())
    other.load_state_dict(model.state_dict())
    resumed = torch.optim.Adam(other.parameters())
    given = torch.load(path, weights_only=True)
    FSDP.optim_state_dict_to_load(other, resumed, given, load_directly=True)
    assert resumed.param_groups[0]["lr"] == 0.1
    step(model, optimizer)
    step(other, resumed)
    assert_equal_weights(other, model_as_plain(model))


def model_as_plain(model: FSDP) -> nn.Module:
    plain = seeded()
    plain.load_state_dict(model.state_dict())
    return plain


def test_an_ordinary_file_brings_everything_back(tmp_path: Path):
    run_ranks(2, everything_at_once, str(tmp_path / "optimizer.pt"))
