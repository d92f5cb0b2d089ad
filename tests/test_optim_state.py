"""Optimizer state has the plain model's names and shapes, loads anywhere, and is checked first."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP1
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, timeline
from fsdp_ref.optim_state import attach
from tests.models import CASES
from tests.parity.training import WRAPPINGS as CASE_WRAPPINGS
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import (
    WRAPPINGS,
    Layer,
    Stack,
    assert_equal_weights,
    mean_square,
    my_part,
    nested,
    one_unit,
    seeded,
    whole_batch,
)

Build = Callable[[Iterable[Any]], Optimizer]


def lr_tensor(parameters: Iterable[Any]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(0.05), foreach=False)


OPTIMIZERS: dict[str, Build] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "fused": lambda p: torch.optim.Adam(p, lr=0.05, fused=True),
    "lr tensor": lr_tensor,
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, amsgrad=True, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05, momentum=0.9, centered=True),
}


def step(model: nn.Module, optimizer: Optimizer, batch: Tensor | None = None) -> None:
    """Train one step, on this rank's part of the batch if the model is sharded."""
    given = whole_batch() if batch is None else batch
    optimizer.zero_grad()
    sharded = any(isinstance(part, FSDP | TorchFSDP1) for part in model.modules())
    mean_square(model(my_part(given) if sharded else given)).backward()
    optimizer.step()


def state_by_name(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """What a plain model's optimizer has, by name."""
    named = model.named_parameters()
    return {name: dict(optimizer.state[p]) for name, p in named if optimizer.state.get(p)}


def assert_same_state(found: Any, expected: Any, *, exact: bool = False) -> None:
    assert set(found) == set(expected)
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-9, "atol": 1e-12}
    for name, values in expected.items():
        assert list(found[name]) == list(values), name
        for which, value in values.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(
                    found[name][which], value, msg=lambda m, n=name, w=which: f"{n}, {w}: {m}",
                    **tolerance,
                )  # fmt: skip
            else:
                assert found[name][which] == value, (name, which)


def own_state(optimizer: Optimizer) -> dict[int, dict[str, Any]]:
    """A copy of what this rank's optimizer has, by number."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {n: copy.deepcopy(dict(optimizer.state.get(p, {}))) for n, p in enumerate(parameters)}


def assert_unchanged(optimizer: Optimizer, before: dict[int, dict[str, Any]]) -> None:
    assert_same_state(own_state(optimizer), before, exact=True)


# ---------------------------------------------------------------- beside plain PyTorch


def beside_plain(kind: str, use_orig_params: bool) -> None:
    """Export equals the plain optimizer's state, and goes on in a plain model and in another."""
    plain, model = seeded(), nested(seeded(), use_orig_params=use_orig_params)
    alone, optimizer = (OPTIMIZERS[kind](m.parameters()) for m in (plain, model))
    for _ in range(3):
        step(plain, alone)
        step(model, optimizer)
    exported = FSDP.optim_state_dict(model, optimizer)
    assert list(exported) == ["state", "param_groups"]
    assert_same_state(exported["state"], state_by_name(plain, alone))
    for values in exported["state"].values():  # a view would keep a whole unit, or change later
        tensors = [value for value in values.values() if isinstance(value, Tensor)]
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in tensors)
    (group,), (own,) = exported["param_groups"], alone.state_dict()["param_groups"]
    assert sorted(group.pop("params")) == sorted(name for name, _ in plain.named_parameters())
    assert group == {key: value for key, value in own.items() if key != "params"}

    kept = copy.deepcopy(exported)
    exported = FSDP.optim_state_dict(model, optimizer)
    again = seeded()
    again.load_state_dict(model.state_dict())
    goes_on = OPTIMIZERS[kind](again.parameters())
    goes_on.load_state_dict(
        FSDP.rekey_optim_state_dict(exported, OptimStateKeyType.PARAM_ID, again, optim=goes_on)
    )
    other = one_unit(seeded(), use_orig_params=use_orig_params)
    other.load_state_dict(model.state_dict())
    resumed = OPTIMIZERS[kind](other.parameters())
    FSDP.optim_state_dict_to_load(other, resumed, exported, load_directly=True)
    for one, its in ((plain, alone), (model, optimizer), (again, goes_on), (other, resumed)):
        step(one, its)
    assert_equal_weights(model, plain)
    assert_equal_weights(other, plain)
    for name, weight in again.named_parameters():
        torch.testing.assert_close(weight, plain.get_parameter(name), rtol=1e-9, atol=1e-12)
    assert_same_state(exported["state"], kept["state"], exact=True)  # a snapshot, three steps on


def every_optimizer(use_orig_params: bool) -> None:
    for kind in OPTIMIZERS:
        beside_plain(kind, use_orig_params)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_exported_state_is_that_of_plain_pytorch_and_goes_on_anywhere(world_size, use_orig_params):
    run_ranks(world_size, every_optimizer, use_orig_params, timeout=100)


def capturable_steps_are_scalars_too(use_orig_params: bool) -> None:
    model = nested(seeded(), use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    for values in optimizer.state.values():  # as a capturable or very old optimizer keeps it
        values["step"] = 1
        values["note"] = None
    exported = FSDP.optim_state_dict(model, optimizer)
    for values in exported["state"].values():
        assert values["step"] == 1
        assert values["note"] is None
    result = FSDP.optim_state_dict_to_load(model, optimizer, exported)
    assert all(values["step"] == 1 for values in result["state"].values())


def test_a_step_may_be_a_plain_number():
    for use_orig_params in (False, True):
        run_ranks(2, capturable_steps_are_scalars_too, use_orig_params)


# ---------------------------------------------------------------- beside torch's FSDP1


def as_torchs(model: Stack, **arguments: Any) -> TorchFSDP1:
    arguments["device_id"] = torch.device("cpu")
    for index, layer in enumerate(model.layers):
        model.layers[index] = TorchFSDP1(layer, **arguments)
    return TorchFSDP1(model, **arguments)


def beside_torchs_fsdp1(use_orig_params: bool) -> None:
    for kind, build in OPTIMIZERS.items():
        theirs = as_torchs(seeded(), use_orig_params=use_orig_params)
        ours = nested(seeded(), use_orig_params=use_orig_params)
        their_optimizer, our_optimizer = build(theirs.parameters()), build(ours.parameters())
        for _ in range(2):
            step(theirs, their_optimizer)
            step(ours, our_optimizer)
        expected = TorchFSDP1.optim_state_dict(theirs, their_optimizer)
        exported = FSDP.optim_state_dict(ours, our_optimizer)
        assert exported["param_groups"] == expected["param_groups"], kind
        kinds = {n: {w: _kind(v) for w, v in s.items()} for n, s in exported["state"].items()}
        torchs = {n: {w: _kind(v) for w, v in s.items()} for n, s in expected["state"].items()}
        assert kinds == torchs
        steps = [values["step"] for values in exported["state"].values() if "step" in values]
        assert len({id(value) for value in steps}) == len(steps)  # torch's share one in each unit
        if not use_orig_params:  # in the other form torch's export on gloo has wrong numbers
            in_order = {n: {w: values[w] for w in expected["state"][n]}
                        for n, values in exported["state"].items()}  # fmt: skip
            assert_same_state(in_order, expected["state"])
            FSDP.optim_state_dict_to_load(ours, our_optimizer, expected, load_directly=True)
            again = FSDP.optim_state_dict(ours, our_optimizer)["state"]
            assert_same_state(again, expected["state"], exact=True)
        theirs_before = own_state(their_optimizer)
        TorchFSDP1.optim_state_dict_to_load(theirs, their_optimizer, exported, load_directly=True)
        if not use_orig_params:
            again = TorchFSDP1.optim_state_dict(theirs, their_optimizer)["state"]
            assert_same_state(again, expected["state"])
        else:  # torch forgets the state of a piece without elements
            loaded = {n: v for n, v in own_state(their_optimizer).items() if v}
            before = {n: theirs_before[n] for n in loaded}
            assert loaded or kind == "sgd"
            assert_same_state({n: {w: loaded[n][w] for w in before[n]} for n in loaded}, before)


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else type(value)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_torchs_fsdp1_has_the_same_dict_and_each_loads_the_others(use_orig_params):
    run_ranks(2, beside_torchs_fsdp1, use_orig_params, timeout=100)


def what_torch_does_otherwise() -> None:
    """Weights of a unit share a step, FSDP2's dict is no copy, groups are paired by position."""
    theirs = as_torchs(seeded())
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.1)
    step(theirs, optimizer)
    exported = TorchFSDP1.optim_state_dict(theirs, optimizer)["state"]
    assert exported["layers.0.scale"]["step"] is exported["layers.0.linear.bias"]["step"]
    cut = seeded()
    fully_shard(cut)
    optimizer = torch.optim.Adam(cut.parameters(), lr=0.1)
    mean_square(cut(whole_batch())).backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True)
    moments = get_optimizer_state_dict(cut, optimizer, options=options)["state"]
    mean_square(cut(whole_batch())).backward()
    optimizer.step()
    assert moments["layers.0.scale"]["step"] == 2  # it was 1 when it was exported

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        inside = [p for name, p in model.named_parameters() if "linear" in name]
        others = [p for name, p in model.named_parameters() if "linear" not in name]
        assert len(inside) == len(others)
        return [{"params": inside, "lr": 0.1}, {"params": others, "lr": 0.2}]

    for wrap, kind, found in ((as_torchs, TorchFSDP1, [0.1, 0.2]), (nested, FSDP, [0.2, 0.1])):
        model = wrap(seeded(lambda: Stack(2)), use_orig_params=True)
        optimizer = torch.optim.SGD(groups(model), momentum=0.9)
        step(model, optimizer)
        exported = kind.optim_state_dict(model, optimizer)
        swapped = torch.optim.SGD(groups(model)[::-1], momentum=0.9)
        swapped.load_state_dict(kind.optim_state_dict_to_load(model, swapped, exported))
        assert [group["lr"] for group in swapped.param_groups] == found


def test_what_torchs_class_does_otherwise_is_still_so():
    run_ranks(2, what_torch_does_otherwise)


# ---------------------------------------------------------------- another number of ranks


def export_after(steps: int, wrapping: str, use_orig_params: bool) -> tuple[Any, Any]:
    model = WRAPPINGS[wrapping](seeded(), use_orig_params=use_orig_params)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    for _ in range(steps):
        step(model, optimizer)
    return model.state_dict(), FSDP.optim_state_dict(model, optimizer)


def resume(saved: tuple[Any, Any], wrapping: str, use_orig_params: bool) -> tuple[Any, Any]:
    model = WRAPPINGS[wrapping](seeded(), use_orig_params=use_orig_params)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    model.load_state_dict(saved[0])
    FSDP.optim_state_dict_to_load(model, optimizer, saved[1], load_directly=True)
    assert_same_state(
        FSDP.optim_state_dict(model, optimizer)["state"], saved[1]["state"], exact=True
    )
    step(model, optimizer)
    return model.state_dict(), FSDP.optim_state_dict(model, optimizer)


def test_state_saved_by_two_ranks_goes_on_with_one_and_three_wrapped_otherwise():
    saved = run_ranks(2, export_after, 2, "nested", False)[0]
    plain = seeded()
    alone = OPTIMIZERS["adamw"](plain.parameters())
    for _ in range(3):
        step(plain, alone)
    for world_size, wrapping, use_orig_params in (
        (1, "three deep", True),
        (3, "one unit", False),
        (3, "three deep", True),
        (4, "nested", True),
    ):
        for weights, exported in run_ranks(world_size, resume, saved, wrapping, use_orig_params):
            assert_same_state(exported["state"], state_by_name(plain, alone))
            for name, weight in plain.named_parameters():
                torch.testing.assert_close(weights[name], weight.detach(), rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------- odd models


def every_case(use_orig_params: bool) -> None:
    """Tied, frozen, unused, empty and one-element parameters; several dtypes in a unit."""
    for case_name, case in CASES.items():
        plain, wrapped = case.model(torch.float32), case.model(torch.float32)
        model = FSDP(wrapped, use_orig_params=use_orig_params)
        alone, optimizer = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, model))
        for batch in case.batches(2, torch.float32):
            for one, its, mine in ((plain, alone, batch), (model, optimizer, my_part(batch))):
                its.zero_grad()
                case.loss(one(mine), mine).backward()
                its.step()
        exported = FSDP.optim_state_dict(model, optimizer)
        expected = state_by_name(plain, alone)
        names = [name for name, _ in plain.named_parameters()]
        assert sorted(exported["param_groups"][0]["params"]) == sorted(names), case_name
        unused = {n for n in exported["state"] if case.unused and n.startswith(case.unused)}
        if use_orig_params:
            assert not unused  # it never had a gradient
        assert set(exported["state"]) - unused == set(expected), case_name
        alike = not any(isinstance(m, nn.BatchNorm2d) for m in plain.modules())  # sees its part
        for name, values in expected.items() if alike else ():
            for which, value in values.items():
                found = exported["state"][name][which]
                torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-5, msg=case_name)
        before = own_state(optimizer)
        FSDP.optim_state_dict_to_load(model, optimizer, exported, load_directly=True)
        assert_unchanged(optimizer, before)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_every_hard_model_comes_out_and_in_again(use_orig_params):
    run_ranks(3, every_case, use_orig_params, timeout=100)


def by_class_cases() -> None:
    for case in (case for case in CASES.values() if case.unit_classes):
        model = CASE_WRAPPINGS["by class"](case.model(torch.float32), case)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for batch in case.batches(2, torch.float32):
            mine = my_part(batch)
            optimizer.zero_grad()
            case.loss(model(mine), mine).backward()
            optimizer.step()
        before = own_state(optimizer)
        exported = FSDP.optim_state_dict(model, optimizer)
        FSDP.optim_state_dict_to_load(model, optimizer, exported, load_directly=True)
        assert_unchanged(optimizer, before)


def test_every_hard_model_in_many_units_too():
    run_ranks(2, by_class_cases, timeout=100)


class Partly(Stack):
    """The second layer is never used; the third is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers[2](self.layers[0](x)))


def without_state(use_orig_params: bool) -> None:
    plain, model = seeded(Partly), nested(seeded(Partly), use_orig_params=use_orig_params)
    alone, optimizer = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (plain, model))
    assert FSDP.optim_state_dict(model, optimizer)["state"] == {}  # before the first step
    for _ in range(2):
        step(plain, alone)
        step(model, optimizer)
    exported = FSDP.optim_state_dict(model, optimizer)
    assert_same_state(exported["state"], state_by_name(plain, alone))
    names = {name.partition(".linear")[0] for name in exported["state"]}
    assert not any(name.startswith(("layers.1", "layers.2")) for name in names)
    trainable = [p for p in model.parameters() if p.requires_grad]
    other = torch.optim.Adam(trainable, lr=0.1)  # frozen weights have no state to lose
    FSDP.optim_state_dict_to_load(model, other, exported, load_directly=True)
    less = FSDP.optim_state_dict(model, other)
    assert_same_state(less["state"], exported["state"], exact=True)
    FSDP.optim_state_dict_to_load(model, optimizer, less)  # and the other way round


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_weights_that_never_had_a_gradient_have_no_state(use_orig_params):
    run_ranks(2, without_state, use_orig_params)


def zeros_beside_state_in_a_flat_parameter() -> None:
    model = one_unit(seeded())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    exported = FSDP.optim_state_dict(model, optimizer)
    del exported["state"]["head.bias"]
    FSDP.optim_state_dict_to_load(model, optimizer, exported, load_directly=True)
    again = FSDP.optim_state_dict(model, optimizer)["state"]
    assert not again["head.bias"]["exp_avg"].any()
    assert again["head.bias"]["step"] == 1
    assert torch.equal(again["head.weight"]["exp_avg"], exported["state"]["head.weight"]["exp_avg"])


def test_a_weight_without_saved_state_gets_zeros_beside_others_in_a_flat_parameter():
    run_ranks(2, zeros_beside_state_in_a_flat_parameter)


def outside_of_units() -> None:
    """A plain model with units inside, and a parameter that its unit leaves alone."""
    plain, model = seeded(), seeded()
    model.layers[0] = FSDP(model.layers[0], ignored_states=[model.layers[0].scale])
    model.layers[2] = FSDP(model.layers[2], use_orig_params=True)
    names = ["layers.0.scale", "layers.1.scale", "head.bias"]
    alone, optimizer = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (plain, model))
    for one, its in ((plain, alone), (model, optimizer)):
        mean_square(one(whole_batch())).backward()  # nobody averages the gradients of the others
        its.step()
    exported = FSDP.optim_state_dict(model, optimizer)
    assert_same_state(exported["state"], state_by_name(plain, alone))
    before, kept = own_state(optimizer), copy.deepcopy(exported)
    mean_square(model(whole_batch())).backward()
    optimizer.step()
    for name in names:  # copies, also of what is not sharded
        assert_same_state({0: exported["state"][name]}, {0: kept["state"][name]}, exact=True)
    FSDP.optim_state_dict_to_load(model, optimizer, exported, load_directly=True)
    assert_unchanged(optimizer, before)
    order = model.layers[0].gather_full_optim_state_dict
    only_inside = torch.optim.Adam(model.layers[0].parameters(), lr=0.1)
    assert order(only_inside)["param_names"] == {0: "scale", 1: "linear.weight", 2: "linear.bias"}


def test_parameters_outside_of_units_keep_their_state_whole():
    run_ranks(2, outside_of_units)


# ---------------------------------------------------------------- precision, offload, strategies


def masters_and_offload() -> None:
    from torch.distributed.fsdp import CPUOffload, MixedPrecision

    torch.manual_seed(0)
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nested(Stack(), mixed_precision=precision, cpu_offload=CPUOffload(True))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer, torch.ones(4, 5))
    before = own_state(optimizer)
    exported = FSDP.optim_state_dict(model, optimizer)
    for values in exported["state"].values():
        assert values["exp_avg"].dtype is torch.float32
        assert values["exp_avg"].device.type == "cpu"
    FSDP.optim_state_dict_to_load(model, optimizer, exported, load_directly=True)
    assert_unchanged(optimizer, before)


def test_state_of_masters_is_in_full_precision_and_offload_changes_nothing():
    run_ranks(2, masters_and_offload)


def strategies() -> None:
    plain = seeded()
    alone = OPTIMIZERS["adamw"](plain.parameters())
    for _ in range(2):
        step(plain, alone)
    for strategy, groups in (
        ("SHARD_GRAD_OP", None),
        ("NO_SHARD", None),
        ("HYBRID_SHARD", ("set2", "mod2")),
    ):
        for use_orig_params in (False, True):
            options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
            model = nested(seeded(), process_group=groups, **options)
            optimizer = OPTIMIZERS["adamw"](model.parameters())
            for _ in range(2):
                step(model, optimizer)
            for form in ("full", "sharded"):
                with FSDP.state_dict_type(model, form):
                    exported = FSDP.optim_state_dict(model, optimizer)
                before = own_state(optimizer)
                FSDP.optim_state_dict_to_load(model, optimizer, exported, load_directly=True)
                assert_unchanged(optimizer, before)
                if form == "full":
                    assert_same_state(exported["state"], state_by_name(plain, alone))
            scattered = FSDP.scatter_full_optim_state_dict(
                FSDP.full_optim_state_dict(model, optimizer), model, optim=optimizer
            )
            optimizer.load_state_dict(scattered)
            assert_unchanged(optimizer, before)


def test_every_strategy_has_the_same_state():
    run_ranks(4, strategies, timeout=100)


# ---------------------------------------------------------------- groups of hyperparameters


def two_groups(model: nn.Module, *, head_first: bool = False) -> list[dict[str, Any]]:
    head = list(model.head.parameters()) if isinstance(model.head, FSDP) else None
    head = head or [p for name, p in model.named_parameters() if "head" in name]
    rest = [p for p in model.parameters() if all(p is not one for one in head)]
    groups = [{"params": rest, "lr": 0.05}, {"params": head, "lr": 0.2, "betas": (0.8, 0.9)}]
    return groups[::-1] if head_first else groups


def with_head(model: Stack, **arguments: Any) -> FSDP:
    model.head = FSDP(model.head, **arguments)
    return nested(model, **arguments)


def groups_by_name(use_orig_params: bool) -> None:
    plain, model = seeded(), with_head(seeded(), use_orig_params=use_orig_params)
    alone, optimizer = (torch.optim.Adam(two_groups(m)) for m in (plain, model))
    for _ in range(2):
        step(plain, alone)
        step(model, optimizer)
    exported = FSDP.optim_state_dict(model, optimizer)
    assert [group["lr"] for group in exported["param_groups"]] == [0.05, 0.2]
    assert sorted(exported["param_groups"][1]["params"]) == ["head.bias", "head.weight"]
    assert_same_state(exported["state"], state_by_name(plain, alone))

    swapped = torch.optim.Adam(two_groups(model, head_first=True))
    FSDP.optim_state_dict_to_load(model, swapped, exported, load_directly=True)
    assert [group["lr"] for group in swapped.param_groups] == [0.2, 0.05]
    assert [group["betas"] for group in swapped.param_groups] == [(0.8, 0.9), (0.9, 0.999)]
    again = FSDP.optim_state_dict(model, swapped)
    assert_same_state(again["state"], exported["state"], exact=True)
    numbered = FSDP.rekey_optim_state_dict(again, "PARAM_ID", plain, optim=alone)
    assert [group["params"] for group in numbered["param_groups"]] == [list(range(9)), [9, 10]]
    assert [group["lr"] for group in numbered["param_groups"]] == [0.05, 0.2]

    single = torch.optim.Adam(model.parameters())
    with provokes(FSDP.optim_state_dict_to_load, errors.OptimizerStateError, "that differ"):
        FSDP.optim_state_dict_to_load(model, single, exported)
    merged = copy.deepcopy(exported)
    for group in merged["param_groups"]:
        group["lr"], group["betas"] = 0.3, (0.5, 0.5)
    FSDP.optim_state_dict_to_load(model, single, merged, load_directly=True)
    assert single.param_groups[0]["lr"] == 0.3
    three = torch.optim.Adam([*two_groups(model), {"params": [nn.Parameter(torch.ones(1))]}])
    with provokes(FSDP.optim_state_dict, errors.OptimizerStateError, "not in the model"):
        FSDP.optim_state_dict(model, three)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_groups_find_their_parameters_by_name(use_orig_params):
    run_ranks(2, groups_by_name, use_orig_params)


def names_in_groups() -> None:
    """Torch's optimizers remember names if they are built from named parameters."""
    plain, model = seeded(), nested(seeded(), use_orig_params=True)
    alone, optimizer = (torch.optim.Adam(m.named_parameters(), lr=0.1) for m in (plain, model))
    step(plain, alone)
    step(model, optimizer)
    exported = FSDP.optim_state_dict(model, optimizer)
    (group,) = exported["param_groups"]
    assert group["param_names"] == group["params"]
    given = alone.state_dict()  # numbers, but with the names beside them
    FSDP.optim_state_dict_to_load(model, optimizer, given, load_directly=True)
    assert_same_state(FSDP.optim_state_dict(model, optimizer)["state"], state_by_name(plain, alone))


def test_names_that_an_optimizer_remembers_are_used_and_exported():
    run_ranks(2, names_in_groups)


# ---------------------------------------------------------------- who gets it, and what it costs


def on_the_first_rank_only() -> None:
    model = nested(seeded())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    everywhere = FSDP.optim_state_dict(model, optimizer)
    FSDP.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(),
        FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False),
    )
    with timeline() as recorded:
        exported = FSDP.optim_state_dict(model, optimizer)
    # Two values of each of four units, one after the other, and to one rank only.
    assert sorted(recorded.lines("gather")) == sorted(
        f"gather {unit}" for unit in ("layers.0", "layers.1", "layers.2", "root") for _ in range(2)
    )
    assert len({event.bytes_on_wire for event in recorded.events if event.bytes_on_wire}) <= 2
    before = own_state(optimizer)
    if dist.get_rank() == 0:
        assert_same_state(exported["state"], everywhere["state"], exact=True)
        assert exported["param_groups"] == everywhere["param_groups"]
    else:
        assert exported == {}
    result = FSDP.optim_state_dict_to_load(model, optimizer, exported)  # sent by the first rank
    optimizer.load_state_dict(result)
    assert_unchanged(optimizer, before)
    assert result["param_groups"] == copy.deepcopy(optimizer.state_dict()["param_groups"])

    plain = seeded()
    alone = torch.optim.Adam(plain.parameters(), lr=0.1)
    step(plain, alone)
    given = FSDP.rekey_optim_state_dict(alone.state_dict(), "PARAM_NAME", plain, optim=alone)
    scattered = FSDP.scatter_full_optim_state_dict(
        given if dist.get_rank() == 0 else None, model, optim=optimizer
    )
    sharded = FSDP.shard_full_optim_state_dict(given, model)
    assert_same_state(scattered["state"], sharded["state"], exact=True)
    assert scattered["param_groups"] == sharded["param_groups"]
    wrong = dict(given, state={**given["state"], "head.bias": {"exp_avg": torch.zeros(3)}})
    with provokes(FSDP.scatter_full_optim_state_dict, errors.OptimizerStateError, "head.bias"):
        FSDP.scatter_full_optim_state_dict(
            wrong if dist.get_rank() == 0 else None, model, optim=optimizer
        )
    with provokes(FSDP.scatter_full_optim_state_dict, errors.OptimizerStateError, "told to other"):
        odd = {"state": {"head.bias": {"what": object()}}, "param_groups": []}
        FSDP.scatter_full_optim_state_dict(odd, model, optim=optimizer)
    with provokes(FSDP.scatter_full_optim_state_dict, errors.OptimizerStateError, "a dict with"):
        FSDP.scatter_full_optim_state_dict(None, model, optim=optimizer)


def test_the_first_rank_alone_may_have_it_and_send_it():
    run_ranks(2, on_the_first_rank_only)
    run_ranks(3, on_the_first_rank_only)


def one_unit_at_a_time() -> None:
    model = nested(seeded())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    alive: list[int] = []
    from fsdp_ref import optim_gather

    gather = optim_gather.gather_shards

    def counting(*arguments: Any) -> Any:
        fulls = gather(*arguments)
        alive.append(sum(full.nbytes for full in fulls.values() if full is not None))
        return fulls

    optim_gather.gather_shards = counting
    try:
        FSDP.optim_state_dict(model, optimizer)
    finally:
        optim_gather.gather_shards = gather
    assert len(alive) == 8
    assert max(alive) == 8 * 36  # one value of one layer, padded


def test_at_most_one_value_of_one_unit_is_gathered_at_a_time():
    run_ranks(2, one_unit_at_a_time)


def forms_by_name() -> None:
    """Torch's older names are the newer ones in a given form."""
    model = nested(seeded())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step(model, optimizer)
    full = FSDP.optim_state_dict(model, optimizer)
    older = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
    assert_same_state(older["state"], full["state"], exact=True)
    assert older["param_groups"] == full["param_groups"]
    assert (FSDP.full_optim_state_dict(model, optimizer) == {}) == (dist.get_rank() > 0)
    before = own_state(optimizer)
    sharded = FSDP.sharded_optim_state_dict(model, optimizer)
    for name, values in sharded["state"].items():
        assert type(values["exp_avg"]) is DTensor
        assert type(values["step"]) is Tensor
        whole = values["exp_avg"].full_tensor()
        assert torch.equal(whole, full["state"][name]["exp_avg"])
        local = values["exp_avg"].to_local()
        assert local.untyped_storage().nbytes() == local.nbytes  # a view would drag the unit along
    optimizer.load_state_dict(FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer))
    assert_unchanged(optimizer, before)
    with FSDP.state_dict_type(model, "local"):
        local_form = FSDP.optim_state_dict(model, optimizer)
        step(model, optimizer)
        FSDP.optim_state_dict_to_load(model, optimizer, local_form, load_directly=True)
    assert_unchanged(optimizer, before)
    sharded["state"]["head.bias"]["exp_avg"] = sharded["state"]["head.weight"]["exp_avg"]
    with provokes(FSDP.flatten_sharded_optim_state_dict, errors.OptimizerStateError, "shape"):
        FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer)


def test_the_forms_agree_under_their_older_names():
    run_ranks(2, forms_by_name)


# ---------------------------------------------------------------- ranks that differ


def a_rank_without_state() -> None:
    """A rank whose piece is empty may have no state at all, as under torch's class."""
    plain, model = seeded(), one_unit(seeded(), use_orig_params=True)
    alone, optimizer = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (plain, model))
    step(plain, alone)
    step(model, optimizer)
    for parameter in model.parameters():
        if parameter.numel() == 0:
            del optimizer.state[parameter]
    exported = FSDP.optim_state_dict(model, optimizer)
    assert_same_state(exported["state"], state_by_name(plain, alone))
    assert len(optimizer.state) < len(exported["state"])
    with FSDP.state_dict_type(model, "sharded"):
        FSDP.optim_state_dict(model, optimizer)

    held = next(p for p in model.parameters() if p.numel())
    kept = dict(optimizer.state[held])
    if dist.get_rank() == 1:
        del optimizer.state[held]
    with provokes(FSDP.optim_state_dict, errors.OptimizerStateError, "missing"):
        FSDP.optim_state_dict(model, optimizer)
    optimizer.state[held] = {**kept, "step": torch.tensor(1.0 + dist.get_rank())}
    optimizer.state[held]["exp_avg"] = kept["exp_avg"].to(
        [torch.float32, torch.float64][dist.get_rank()]
    )
    if model.layers[1].linear.weight.numel():  # both hold a part of this one
        optimizer.state[model.layers[1].linear.weight]["step"] += dist.get_rank()
    with provokes(FSDP.optim_state_dict, errors.OptimizerStateError) as caught:
        FSDP.optim_state_dict(model, optimizer)
    assert "on rank 0" in caught.message or "on rank 1" in caught.message


def test_a_rank_without_a_part_may_have_no_state_and_others_must_agree():
    run_ranks(2, a_rank_without_state)


def other_parameters_on_one_rank() -> None:
    model = nested(seeded())
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters[: 4 - dist.get_rank()], lr=0.1)
    for call in (FSDP.optim_state_dict, FSDP.sharded_optim_state_dict):
        with pytest.raises(errors.OptimizerStateError, match=r"differ in 'layers\.2\.scale'"):
            call(model, optimizer)
    step(model, torch.optim.Adam(parameters, lr=0.1))
    odd = torch.optim.Adam(parameters, lr=0.1)
    odd.state[parameters[0]] = {"what": object()} if dist.get_rank() else {"what": torch.ones(2, 2)}
    with provokes(FSDP.optim_state_dict, errors.OptimizerStateError, "of shape \\(2, 2\\)"):
        FSDP.optim_state_dict(model, odd)
    if dist.get_rank() == 0:
        with provokes(FSDP.optim_state_dict, errors.SilentRanksError, "rank 1 silent"):
            FSDP.optim_state_dict(model, odd)


def test_optimizers_that_differ_are_an_error_on_every_rank_and_no_hang():
    run_ranks(2, other_parameters_on_one_rank, dist_timeout=3)


# ---------------------------------------------------------------- small groups


class Experts(nn.Module):
    """A shared layer, one expert per pair of ranks, one per rank."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.pair, self.own = Layer(), Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.pair(self.shared(x)))


def mixed_groups(use_orig_params: bool) -> dict[str, Any]:
    model = seeded(Experts)
    model.pair = FSDP(model.pair, process_group="set2", use_orig_params=use_orig_params)
    model.own = FSDP(model.own, process_group="self", use_orig_params=use_orig_params)
    model = FSDP(model, use_orig_params=use_orig_params)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(2):
        step(model, optimizer)
    before = own_state(optimizer)
    exported = FSDP.optim_state_dict(model, optimizer)
    only_first = FSDP.full_optim_state_dict(model, optimizer)
    if dist.get_rank() == 0:
        assert_same_state(only_first["state"], exported["state"], exact=True)
        assert only_first["param_groups"] == exported["param_groups"]
    for form in ("full", "sharded"):
        with FSDP.state_dict_type(model, form):
            given = FSDP.optim_state_dict(model, optimizer)
            FSDP.optim_state_dict_to_load(model, optimizer, given, load_directly=True)
        assert_unchanged(optimizer, before)
    if use_orig_params:
        with provokes(attach, errors.OptimizerStateError, "pair"):
            attach(model, optimizer)
    return exported


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_every_version_of_an_expert_is_in_the_full_dict_under_the_name_of_its_first_rank(
    use_orig_params,
):
    exported = run_ranks(4, mixed_groups, use_orig_params)
    inner = ("scale", "linear.weight", "linear.bias")
    names = {f"shared.{name}" for name in inner}
    names |= {f"pair.{name}@rank{rank}" for name in inner for rank in (0, 2)}
    names |= {f"own.{name}@rank{rank}" for name in inner for rank in range(4)}
    for one in exported:
        assert set(one["state"]) == names
        assert set(one["param_groups"][0]["params"]) == names
        assert_same_state(one["state"], exported[0]["state"], exact=True)
    state = exported[0]["state"]
    assert not torch.equal(state["own.scale@rank0"]["exp_avg"], state["own.scale@rank1"]["exp_avg"])
