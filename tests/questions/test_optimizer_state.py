"""What an optimizer remembers, saved and loaded."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors
from tests.models import part
from tests.questions.claims import loss, on_ranks, train
from tests.ranks import run_ranks
from tests.test_optim_state import (
    Experts,
    assert_same_state,
    own_state,
    state_by_name,
    step,
)
from tests.toy import (
    Layer,
    Stack,
    assert_equal_weights,
    mean_square,
    my_part,
    nested,
    one_unit,
    seeded,
    three_deep,
    whole_batch,
)

ADAM = (torch.optim.Adam, {"lr": 0.05})


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=0.05)


# pytorch/pytorch#113673
@on_ranks(2)
def test_state_of_a_plain_run_finds_its_weights_by_name_and_another_order_is_refused():
    plain = seeded()
    reverse = torch.optim.Adam(list(plain.parameters())[::-1], lr=0.05)
    step(plain, reverse)
    expected = state_by_name(plain, reverse)
    named = FSDP.rekey_optim_state_dict(reverse.state_dict(), "PARAM_NAME", plain, optim=reverse)
    model = nested(seeded())
    optimizer = adam(model)
    FSDP.optim_state_dict_to_load(model, optimizer, named, load_directly=True)
    assert_same_state(FSDP.optim_state_dict(model, optimizer)["state"], expected, exact=True)
    with pytest.raises(errors.OptimizerStateError, match="hand over the optimizer that wrote"):
        FSDP.rekey_optim_state_dict(reverse.state_dict(), "PARAM_NAME", plain)


# pytorch/pytorch#180449
@on_ranks(4, dist_timeout=10)
def test_two_models_on_two_groups_save_at_their_own_times():
    mine = dist.get_rank() // 2
    plain, model = seeded(), seeded()
    for index, layer in enumerate(model.layers):
        model.layers[index] = FSDP(layer, process_group="set2")
    model = FSDP(model, process_group="set2")
    alone, optimizer = adam(plain), adam(model)
    batch = whole_batch() + mine
    for one, its, given in (
        (plain, alone, batch),
        (model, optimizer, batch.chunk(2)[model.process_group.rank()]),
    ):
        mean_square(one(given)).backward()
        its.step()
    time.sleep(1.5 * mine)  # nothing waits for the other group
    exported = FSDP.optim_state_dict(model, optimizer)
    assert_same_state(exported["state"], state_by_name(plain, alone))
    only_first = FSDP.full_optim_state_dict(model, optimizer)
    assert (only_first == {}) == (model.process_group.rank() > 0)
    before = own_state(optimizer)
    optimizer.load_state_dict(
        FSDP.scatter_full_optim_state_dict(only_first, model, optim=optimizer)
    )
    assert_same_state(own_state(optimizer), before, exact=True)


# huggingface/accelerate#3971
@on_ranks(2)
def test_a_round_trip_keeps_the_step_and_the_next_update_is_that_of_an_uninterrupted_run():
    for use_orig_params in (False, True):
        plain, model = seeded(), nested(seeded(), use_orig_params=use_orig_params)
        train(ADAM, plain, model, steps=0)
        alone, optimizer = adam(plain), adam(model)
        for _ in range(3):
            step(plain, alone)
            step(model, optimizer)
        with FSDP.state_dict_type(model, "sharded"):
            saved = FSDP.optim_state_dict(model, optimizer)
        for values in saved["state"].values():
            assert set(values) == {"step", "exp_avg", "exp_avg_sq"}
            assert values["step"] == 3
        resumed = adam(model)
        FSDP.optim_state_dict_to_load(model, resumed, saved, load_directly=True)
        step(plain, alone)
        step(model, resumed)
        assert_equal_weights(model, plain)


class Sparse(nn.Module):
    """Units within units, one of them without parameters, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.empty, self.unused, self.last = Layer(), nn.Tanh(), Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.empty(self.first(x)))


# facebookresearch/fairscale#883
@on_ranks(2)
def test_many_units_empty_units_and_weights_without_state_are_gathered():
    for use_orig_params in (False, True):
        plain, model = seeded(Sparse), seeded(Sparse)
        for layer in (model.first, model.unused, model.last):
            layer.linear = FSDP(layer.linear, use_orig_params=use_orig_params)
        for name in ("first", "empty", "unused", "last"):
            setattr(model, name, FSDP(getattr(model, name), use_orig_params=use_orig_params))
        model = FSDP(model, use_orig_params=use_orig_params)
        alone, optimizer = adam(plain), adam(model)
        for _ in range(2):
            step(plain, alone)
            step(model, optimizer)
        exported = FSDP.optim_state_dict(model, optimizer)
        assert_same_state(exported["state"], state_by_name(plain, alone))
        assert not any(name.startswith("unused") for name in exported["state"])
        gathered = model.gather_full_optim_state_dict(optimizer)
        assert_same_state(gathered["state"], alone.state_dict()["state"])


# facebookresearch/fairscale#936
@on_ranks(4)
def test_state_of_experts_in_small_groups_is_that_of_plain_runs_and_labelled_by_rank():
    rank = dist.get_rank()
    model = seeded(Experts)
    model.pair = FSDP(model.pair, process_group="set2")
    model.own = FSDP(model.own, process_group="self")
    model = FSDP(model)
    optimizer = adam(model)
    loss(model).backward()
    optimizer.step()
    state = FSDP.optim_state_dict(model, optimizer)["state"]

    def plain_run(ranks: range) -> dict[str, Any]:
        plain = seeded(Experts)
        alone = adam(plain)
        for one in ranks:
            (mean_square(plain(part(whole_batch(), one, 4))) / len(ranks)).backward()
        alone.step()
        return state_by_name(plain, alone)

    first = rank - rank % 2
    expected = {
        **{n: v for n, v in plain_run(range(4)).items() if n.startswith("shared")},
        **{
            f"{n}@rank{first}": v
            for n, v in plain_run(range(first, first + 2)).items()
            if n.startswith("pair")
        },
        **{
            f"{n}@rank{rank}": v
            for n, v in plain_run(range(rank, rank + 1)).items()
            if n.startswith("own")
        },
    }
    assert set(expected) < set(state)  # and those of other ranks
    assert_same_state({name: state[name] for name in expected}, expected)


# NVIDIA/Megatron-LM#4910
@on_ranks(2, dist_timeout=10)
def test_an_export_does_not_depend_on_whether_this_rank_has_any_state():
    plain, model = seeded(), one_unit(seeded(), use_orig_params=True)
    alone, optimizer = adam(plain), adam(model)
    step(plain, alone)
    step(model, optimizer)
    for parameter in model.parameters():
        if parameter.numel() == 0:  # the other rank has all of it
            optimizer.state.pop(parameter)
    for form in ("full", "sharded"):
        with FSDP.state_dict_type(model, form):
            exported = FSDP.optim_state_dict(model, optimizer)
        if form == "full":
            assert_same_state(exported["state"], state_by_name(plain, alone))


def save_and_go_on() -> tuple[Any, Any, Any, Any]:
    model = nested(seeded())
    optimizer = adam(model)
    for _ in range(2):
        step(model, optimizer)
    saved = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    torch.manual_seed(dist.get_rank() + 5)
    step(model, optimizer)
    return *saved, model.state_dict(), torch.rand(3)


def resume(saved: tuple[Any, Any]) -> tuple[Any, Any, Any]:
    model = three_deep(seeded(), use_orig_params=True)
    model.load_state_dict(saved[0])
    optimizer = adam(model)
    FSDP.optim_state_dict_to_load(model, optimizer, saved[1], load_directly=True)
    again = FSDP.optim_state_dict(model, optimizer)
    before = model.state_dict()
    step(model, optimizer)
    return before, again, model.state_dict()


# huggingface/transformers#26549
def test_on_more_ranks_weights_and_moments_come_back_exactly_and_random_numbers_do_not():
    weights, state, later, drawn = run_ranks(2, save_and_go_on)[0]
    assert set(state) == {"state", "param_groups"}  # neither random numbers nor the order of data
    for before, again, after in run_ranks(4, resume, (weights, state)):
        assert all(torch.equal(before[name], value) for name, value in weights.items())
        assert_same_state(again["state"], state["state"], exact=True)
        for name, value in later.items():
            torch.testing.assert_close(after[name], value, rtol=1e-9, atol=1e-12)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), drawn)  # who wants the same numbers sets the seed again


# lab:optim-dict-alias
@on_ranks(4)
def test_an_exported_dict_is_a_copy_that_loads_into_two_models():
    model, other = nested(seeded()), nested(Stack().double())
    optimizer, another = adam(model), adam(other)
    step(model, optimizer)
    exported = FSDP.optim_state_dict(model, optimizer)
    kept = copy.deepcopy(exported)
    step(model, optimizer)
    assert_same_state(exported["state"], kept["state"], exact=True)
    weights = model.state_dict()
    other.load_state_dict(weights)
    current = FSDP.optim_state_dict(model, optimizer)
    for one, its in ((model, optimizer), (other, another)):
        FSDP.optim_state_dict_to_load(one, its, current, load_directly=True)
    for one, its in ((model, optimizer), (other, another)):
        its.zero_grad()
        mean_square(one(my_part(whole_batch()))).backward()
        its.step()
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    assert_same_state(own_state(optimizer), own_state(another), exact=True)
