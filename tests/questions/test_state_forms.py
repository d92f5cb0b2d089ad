"""The three forms of a state dict: whole, by rows, and this rank's memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, timeline
from fsdp_ref.row_shards import whole
from tests.questions.claims import numel, on_ranks
from tests.ranks import run_ranks
from tests.toy import Stack, nested, one_unit, seeded

FORMS = ("full", "sharded", "local")


def exported(model: FSDP, form: str) -> dict[str, Any]:
    with FSDP.state_dict_type(model, form):
        return model.state_dict()


def assert_has_seeded_weights(model: FSDP) -> None:
    for name, value in model.state_dict().items():
        assert torch.equal(value, seeded().state_dict()[name]), name


# pytorch/pytorch#104143 (the other forms)
@on_ranks(2)
def test_a_sharded_export_gathers_one_unit_at_a_time_and_a_local_one_none():
    model = nested(seeded())
    model.state_dict()  # the first use of a model sets it up
    for form, gathers, peak in (("sharded", 4, 8 * 36), ("local", 0, 0)):
        with timeline() as seen:
            exported(model, form)
        assert len(seen.lines("all-gather")) == gathers
        assert seen.peak_unsharded_bytes == peak


# pytorch/pytorch#103730
@on_ranks(2)
def test_offloaded_local_shards_without_their_padding_add_up_to_the_model():
    model = nested(seeded(), cpu_offload=True)
    with FSDP.state_dict_type(model, "local", {"offload_to_cpu": True}):
        local = model.state_dict()
    assert {value.device.type for value in local.values()} == {"cpu"}
    mine = torch.tensor(sum(value.numel() for value in local.values()))
    dist.all_reduce(mine)
    flat = [f for unit in model.local_metadata_dict()["units"] for f in unit["flat_parameters"]]
    assert mine.item() - sum(one["padding"] for one in flat) == numel(seeded())
    other = nested(Stack().double(), cpu_offload=True)
    other.load_local_state_dict(local)
    assert_has_seeded_weights(other)


# pytorch/pytorch#109666 (the other forms)
@on_ranks(1)
def test_every_form_loads_back_with_one_rank():
    for form in FORMS:
        model, other = nested(seeded()), nested(Stack().double())
        with FSDP.state_dict_type(other, form):
            other.load_state_dict(exported(model, form))
        assert_has_seeded_weights(other)


# pytorch/pytorch#86483
@on_ranks(2)
def test_sharded_values_load_in_any_form_and_local_ones_are_refused_by_the_form_they_need():
    model = nested(seeded())
    rows, local = exported(model, "sharded"), exported(model, "local")
    other = nested(Stack().double())
    other.load_state_dict(rows)
    assert_has_seeded_weights(other)
    with pytest.raises(errors.LoadError, match="LOCAL_STATE_DICT"):
        other.load_state_dict(local)


def save_all_forms(path: str) -> dict[str, Tensor]:
    model = nested(seeded())
    dcp.save(exported(model, "sharded"), checkpoint_id=path)
    return exported(model, "local")


def load_all_forms(path: str, local: dict[str, Tensor] | None) -> None:
    model = one_unit(Stack().double())
    rows = exported(model, "sharded")
    dcp.load(rows, checkpoint_id=path)
    model.load_state_dict(rows)
    assert_has_seeded_weights(model)
    assert all(type(whole(value)) is Tensor for value in rows.values())
    same = nested(Stack().double())
    if local is not None:
        with pytest.raises(errors.LoadError, match=r"of2.*of4"):
            same.load_local_state_dict(local)


# facebookresearch/metaseq#720
def test_local_shards_of_four_ranks_are_refused_on_two_and_sharded_ones_load_anywhere(tmp_path):
    local = run_ranks(4, save_all_forms, str(tmp_path))[0]
    for world_size in (1, 2, 3):
        given = local if world_size == 2 else None
        run_ranks(world_size, load_all_forms, str(tmp_path), given)
