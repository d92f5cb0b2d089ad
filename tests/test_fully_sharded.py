"""The wrapper: fresh weights, documented attributes, and behaving like the module inside."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FlatParameter
from fsdp_ref import FullyShardedDataParallel as FSDP
from tests.parity.training import OPTIMIZERS
from tests.ranks import run_ranks
from tests.toy import (
    WRAPPINGS,
    Stack,
    assert_equal_gradients,
    assert_equal_weights,
    assert_sharded,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)

# ---------------------------------------------------------------- no stale weights

STEPPERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": OPTIMIZERS["sgd"],
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "AdamW": OPTIMIZERS["adamw"],
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(3 * whole_batch())


def evaluate_in_inference_mode(model: nn.Module) -> None:
    with torch.inference_mode():
        model(3 * whole_batch())


def forward_and_forget(model: nn.Module) -> None:
    model(3 * whole_batch())  # with gradients: the root keeps its weights for a backward


INTERLUDES = [evaluate, evaluate_in_inference_mode, forward_and_forget]


def forward_between_backward_and_step(stepper: str, wrapping: str) -> None:
    for interlude in INTERLUDES:
        plain, model = seeded(), WRAPPINGS[wrapping](seeded())
        plain_optimizer = STEPPERS[stepper](plain.parameters())
        optimizer = STEPPERS[stepper](model.parameters())
        for _ in range(3):
            plain_optimizer.zero_grad()
            optimizer.zero_grad()
            mean_square(plain(whole_batch())).backward()
            mean_square(model(my_part(whole_batch()))).backward()
            interlude(model)
            plain_optimizer.step()
            optimizer.step()
            with torch.no_grad():
                found, expected = model(whole_batch()), plain(whole_batch())
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10, msg=str(interlude))
        assert_equal_weights(model, plain)


@pytest.mark.parametrize("wrapping", ["nested", "one unit"])
@pytest.mark.parametrize("stepper", STEPPERS)
def test_a_forward_between_backward_and_step_leaves_no_stale_weights(stepper, wrapping):
    run_ranks(2, forward_between_backward_and_step, stepper, wrapping)


def edit_in_place(model: nn.Module, flat: bool) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def edit_through_data(model: nn.Module, flat: bool) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.5)
    if flat:
        model.reshard()  # documented: such an edit leaves no trace


def edit_inside_summon(model: nn.Module, flat: bool) -> None:
    if flat:
        with model.summon_full_params():
            edit_in_place(model, flat)
    else:
        edit_in_place(model, flat)


def load(model: nn.Module, flat: bool) -> None:
    model.load_state_dict({name: 1.5 * value for name, value in seeded().state_dict().items()})


def other_ways_to_change_weights() -> None:
    for change in (edit_in_place, edit_through_data, edit_inside_summon, load):
        for interlude in INTERLUDES:
            plain, model = seeded(), nested(seeded())
            interlude(model)
            change(plain, False)
            change(model, True)
            with torch.no_grad():
                found, expected = model(whole_batch()), plain(whole_batch())
            torch.testing.assert_close(
                found, expected, rtol=1e-10, atol=1e-10, msg=f"{change} {interlude}"
            )


def test_edits_loads_and_writes_leave_no_stale_weights():
    run_ranks(2, other_ways_to_change_weights)


# ---------------------------------------------------------------- attributes (design table)


def facts(flat_param: FlatParameter) -> dict[str, object]:
    full = flat_param._full_param_padded
    return {
        "is_sharded": flat_param._is_sharded,
        "orig_size": tuple(flat_param._orig_size),
        "numel": flat_param.numel(),
        "fp32": None if flat_param._fp32_shard is None else flat_param._fp32_shard.data_ptr(),
        "own": flat_param.data_ptr(),
        "fp16": flat_param._fp16_shard,
        "full": None if full is None else (tuple(full.shape), full.untyped_storage().nbytes()),
        "cpu_grad": flat_param._cpu_grad,
        "saved": None
        if flat_param._saved_grad_shard is None
        else flat_param._saved_grad_shard.shape,
        "grad": None if flat_param.grad is None else flat_param.grad.shape,
    }


def attributes_through_a_step() -> dict[str, dict[str, object]]:
    model = FSDP(nn.Linear(5, 2).double())
    [flat_param] = model.parameters()
    moments = {"constructed": facts(flat_param)}
    model.module.register_forward_hook(lambda *_: moments.update({"inside": facts(flat_param)}))
    loss = mean_square(model(my_part(whole_batch())))
    moments["after forward"] = facts(flat_param)
    loss.backward()
    moments["after backward"] = facts(flat_param)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()
    moments["after step"] = facts(flat_param)
    return moments


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_attributes_exist_from_when_the_page_says(world_size):
    shard = -(-12 // world_size)
    padded = shard * world_size
    for moments in run_ranks(world_size, attributes_through_a_step):
        for fact in moments.values():
            assert fact["is_sharded"] == (world_size > 1)
            assert fact["orig_size"] == (12,)
            assert fact["numel"] == shard
            assert fact["fp16"] is None
            assert fact["cpu_grad"] is None
        assert moments["constructed"]["fp32"] is None
        assert moments["constructed"]["full"] is None
        for name in ("inside", "after forward", "after backward", "after step"):
            assert moments[name]["fp32"] == moments[name]["own"]
            assert moments[name]["full"][0] == (padded,)
        assert moments["inside"]["full"][1] == 8 * padded
        assert moments["after forward"]["full"][1] == 8 * padded  # the root stays for its backward
        assert moments["after backward"]["full"][1] == 0
        assert moments["after backward"]["saved"] == moments["after backward"]["grad"] == (shard,)
        assert moments["after step"]["saved"] is moments["after step"]["grad"] is None


def registered_names() -> tuple[list[str], list[str]]:
    model = seeded()
    model.layers[0].scale.requires_grad_(False)
    model.layers[0].linear.float()
    model = nested(model)
    unit = model.layers[0]
    assert all(isinstance(p, FlatParameter) for p in model.parameters())
    assert unit._fsdp_wrapped_module is unit.module
    return [n for n, _ in unit.named_parameters()], [n for n, _ in model.named_parameters()]


def test_units_register_one_flat_parameter_per_kind_under_documented_names():
    for unit, model in run_ranks(2, registered_names):
        assert unit == ["_flat_param", "_flat_param_1"]
        assert model == [
            "_flat_param",
            *("layers.0._flat_param", "layers.0._flat_param_1"),
            *("layers.1._flat_param", "layers.2._flat_param"),
        ]


# ---------------------------------------------------------------- behaving like the module


class Chatty(Stack):
    """A module with more than a forward."""

    greeting = "hello"

    def depth(self) -> int:
        return len(self.layers)


def like_the_module() -> None:
    model = FSDP(nn.Sequential(nn.Linear(5, 5), FSDP(nn.Linear(5, 2))).double())
    assert isinstance(model[0], nn.Linear)
    assert isinstance(model[1], FSDP)
    assert model.check_is_root()
    assert not model[1].check_is_root()
    assert FSDP.fsdp_modules(model) == [model, model[1]]
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    assert FSDP.fsdp_modules(model[1], root_only=True) == []
    pair = nn.ModuleList([FSDP(nn.Linear(2, 2)), model])
    assert FSDP.fsdp_modules(pair, root_only=True) == [pair[0], model]
    assert FSDP.fsdp_modules(nn.Linear(1, 1)) == []
    chatty = FSDP(Chatty().double())
    assert chatty.greeting == "hello"
    assert chatty.depth() == 3
    with pytest.raises(AttributeError):
        _ = chatty.no_such_thing
    model.eval()
    assert not model[1].module.training
    model.train()
    assert model[1].module.training
    assert model.process_group.size() == 2
    assert "numel=12, shard_numel=6, ranks=[0, 1]" in repr(model[1])
    assert repr(model).count("FullyShardedDataParallel") == 2


def test_the_wrapper_answers_like_the_module_inside():
    run_ranks(2, like_the_module)


def plain_copy_before_wrapping() -> None:
    plain = seeded()
    model = nested(copy.deepcopy(plain))
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert_equal_gradients(model, plain)


def test_a_copy_from_before_wrapping_is_independent():
    run_ranks(2, plain_copy_before_wrapping)


def garbage() -> int:
    """Units must not outlive their model."""
    import gc
    import weakref

    model = nested(seeded())
    mean_square(model(my_part(whole_batch()))).backward()
    watched = [weakref.ref(unit) for unit in FSDP.fsdp_modules(model)]
    del model
    gc.collect()
    return sum(reference() is not None for reference in watched)


def test_a_dropped_model_is_freed():
    assert run_ranks(2, garbage) == [0, 0]


class NoParameters(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def units_without_parameters() -> None:
    plain = nn.Sequential(nn.Linear(5, 5), NoParameters(), nn.Linear(5, 2)).double()
    inner = copy.deepcopy(plain)
    inner[1] = FSDP(inner[1])
    model = FSDP(inner)
    mean_square(plain(whole_batch())).backward()
    mean_square(model(my_part(whole_batch()))).backward()
    assert_equal_gradients(model, plain)
    alone = FSDP(NoParameters())
    assert torch.equal(alone(torch.ones(3)), torch.full((3,), 2.0))
    assert list(alone.parameters()) == []
    everything_inside = nn.Sequential(FSDP(nn.Linear(5, 5)), FSDP(nn.Linear(5, 2))).double()
    mean_square(FSDP(everything_inside)(my_part(whole_batch()))).backward()


def test_units_without_parameters_of_their_own_work():
    run_ranks(2, units_without_parameters)


def unused_parameters() -> tuple[list[str], list[str]]:
    """Used nowhere: `None`, as in a plain model, if the whole unit is unused."""
    model = seeded()
    model.spare = nn.Linear(5, 5).double()
    model.spare = FSDP(model.spare)
    model = nested(model)
    mean_square(model(my_part(whole_batch()))).backward()
    before = model.spare._flat_param.detach().clone()
    torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5).step()
    assert torch.equal(model.spare._flat_param, before)
    without = [name for name, p in model.named_parameters() if p.grad is None]
    return without, [name for name, p in model.named_parameters() if p.grad is not None]


def test_a_unit_that_nobody_used_gets_none_and_does_not_decay():
    for without, with_gradient in run_ranks(3, unused_parameters):
        assert without == ["spare._flat_param"]
        assert len(with_gradient) == 4


def used_by_one_rank_only() -> torch.Tensor:
    class Optional(Stack):
        def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
            y = self.layers[0](x)
            z = self.layers[1](y)
            return self.head(self.layers[2](z if use else y))

    model = nested(seeded(Optional))
    mean_square(model(my_part(whole_batch()), dist.get_rank() == 1)).backward()
    assert_sharded(model)
    gradient = model.layers[1]._flat_param.grad
    assert gradient is not None
    return gradient.abs().sum()


def test_a_unit_that_one_rank_used_gets_a_gradient_on_all():
    assert all(total > 0 for total in run_ranks(2, used_by_one_rank_only))


def initial_weights() -> None:
    """Building on ranks with one seed gives the weights of one process, at any world size."""
    model, plain = nested(seeded()), seeded()
    assert_equal_weights(model, plain)
    for unit in FSDP.fsdp_modules(model):
        for flat_param in unit.parameters(recurse=False):
            assert flat_param.numel() == flat_param._layout.shard_numel


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_wrapping_changes_no_weight(world_size):
    run_ranks(world_size, initial_weights)
