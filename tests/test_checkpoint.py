"""torch's checkpoint functions by their names, for every mode; and torch's own where they work."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torchs
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import agreement, checkpoint, sent_values, timeline
from fsdp_ref.errors import (
    LoadError,
    NotGatheredError,
    OptimizerStateError,
    ReplicasDifferError,
    SilentRanksError,
    StateDictTypeError,
)
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.row_shards import is_cut, whole
from tests.models import CASES
from tests.provoked import provokes
from tests.ranks import RankFailure, run_ranks
from tests.test_small_groups import with_experts
from tests.toy import mean_square, my_part, nested, seeded, whole_batch

Options = checkpoint.StateDictOptions


def experts(**arguments: Any) -> FSDP:
    return with_experts("self", **arguments)


def in_groups(model: nn.Module | None = None, **arguments: Any) -> FSDP:
    return nested(seeded() if model is None else model, **arguments)


# By name: how to build the model, with which arguments, and on how many ranks.
MODES: dict[str, tuple[Callable[..., FSDP], dict[str, Any], int]] = {
    "flat": (in_groups, {}, 2),
    "original parameters": (in_groups, {"use_orig_params": True}, 2),
    "no shard": (in_groups, {"sharding_strategy": "NO_SHARD"}, 2),
    "zero 2": (in_groups, {"sharding_strategy": "SHARD_GRAD_OP"}, 3),
    "hybrid": (
        in_groups,
        {"sharding_strategy": "HYBRID_SHARD", "process_group": ("set2", "mod2")},
        4,
    ),
    "offload": (in_groups, {"cpu_offload": True}, 2),
    "half": (in_groups, {"mixed_precision": {"param_dtype": torch.bfloat16}}, 2),
    "experts": (experts, {}, 2),
    "experts, original parameters": (experts, {"use_orig_params": True}, 2),
}
by_mode = pytest.mark.parametrize("mode", MODES)


def build(mode: str, lr: float = 0.05) -> tuple[FSDP, torch.optim.Optimizer]:
    make, arguments, _ = MODES[mode]
    model = make(**arguments)
    return model, torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        loss = mean_square(model(my_part(whole_batch()) * (1 + step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ---------------------------------------------------------------- save and go on


def resume(mode: str, path: str) -> None:
    model, optimizer = build(mode)
    train(model, optimizer, 2)
    model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)
    expected = train(model, optimizer, 3)

    for steps in (0, 1):  # fresh, or with something to forget
        model, optimizer = build(mode, lr=9.0)
        train(model, optimizer, steps)
        model_state, optimizer_state = checkpoint.get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=path)
        keys = checkpoint.set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        assert train(model, optimizer, 3) == expected  # bit for bit


@by_mode
def test_a_run_that_was_saved_and_loaded_goes_on_as_if_nothing_had_happened(mode, tmp_path):
    run_ranks(MODES[mode][2], resume, mode, str(tmp_path))


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
}


def every_kind(orig: bool, path: str) -> None:
    for kind in KINDS:
        fresh(kind, orig, f"{path}/{kind}")


def fresh(kind: str, orig: bool, path: str) -> None:
    """A fresh optimizer shows all that one has that stepped, and stays as it is."""
    model = nested(seeded(), use_orig_params=orig)
    optimizer = KINDS[kind](model.parameters())
    train(model, optimizer, 1)
    state = checkpoint.get_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=path)
    model = nested(seeded(), use_orig_params=orig)
    optimizer = KINDS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a step of its own on it
    seen: list[int] = []
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    optimizer.register_state_dict_post_hook(lambda *_: seen.append(2))
    with timeline() as recorded:
        template = checkpoint.get_optimizer_state_dict(model, optimizer)
    assert recorded.lines("reduce-scatter") == []
    assert {n: set(v) for n, v in template["state"].items() if v} == {
        n: set(v) for n, v in state["state"].items() if v
    }
    assert (scheduler.last_epoch, seen.count(1)) == (0, 0)
    assert kind == "adagrad" or not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, seeded().state_dict()[name])
    for values in template["state"].values():
        assert all(not whole(v).any() for n, v in values.items() if n == "step")
    # Loading the beginner's own state changes nothing about the steps that follow.
    expected = train(model, optimizer, 2)
    model = nested(seeded(), use_orig_params=orig)
    optimizer = KINDS[kind](model.parameters())
    checkpoint.set_optimizer_state_dict(
        model, optimizer, checkpoint.get_optimizer_state_dict(model, optimizer)
    )
    assert train(model, optimizer, 2) == expected
    dcp.load({"state": template["state"]}, checkpoint_id=path)


@pytest.mark.parametrize("orig", [False, True])
def test_a_fresh_optimizer_shows_the_state_it_would_begin_with(orig, tmp_path):
    run_ranks(2, every_kind, orig, str(tmp_path))


def wants_a_closure() -> None:
    model = nested(seeded())
    optimizer = torch.optim.LBFGS(model.parameters())
    assert checkpoint.get_optimizer_state_dict(model, optimizer)["state"] == {}


def test_an_optimizer_that_cannot_step_by_itself_shows_what_it_has():
    run_ranks(1, wants_a_closure)


class Application(Stateful):
    """What torch's tutorial about checkpoints builds, with the functions of this package."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model_state, optimizer_state = checkpoint.get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        checkpoint.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def as_in_the_tutorial(step: str, path: str) -> list[float]:
    model, optimizer = build("original parameters")
    if step == "save":
        train(model, optimizer, 2)
        dcp.save({"app": Application(model, optimizer)}, checkpoint_id=path)
    else:
        dcp.load({"app": Application(model, optimizer)}, checkpoint_id=path)
    return train(model, optimizer, 3)


def test_the_pattern_of_torchs_tutorial_saves_and_loads_at_another_number_of_ranks(tmp_path):
    expected = run_ranks(2, as_in_the_tutorial, "save", str(tmp_path))
    assert run_ranks(2, as_in_the_tutorial, "load", str(tmp_path)) == expected
    other = run_ranks(3, as_in_the_tutorial, "load", str(tmp_path))
    mean = torch.tensor(expected).mean(0)
    torch.testing.assert_close(torch.tensor(other).mean(0), mean, rtol=1e-6, atol=1e-8)


# ---------------------------------------------------------------- options


def whole_tensors(mode: str) -> None:
    """Whole, on every rank or on the first; sent from the first to all."""
    model, optimizer = build(mode)
    train(model, optimizer, 2)
    replicas = "all" if "experts" in mode else "refuse"
    if "experts" in mode:
        with provokes(checkpoint.get_model_state_dict, ReplicasDifferError):
            checkpoint.get_model_state_dict(model, options=Options(full_state_dict=True))
        with provokes(checkpoint.get_state_dict, ReplicasDifferError):
            checkpoint.get_state_dict(model, optimizer, options=Options(full_state_dict=True))
    everywhere = checkpoint.get_model_state_dict(
        model, options=Options(full_state_dict=True), replicas=replicas
    )
    assert all(type(value) is Tensor for value in everywhere.values())
    on_first = Options(full_state_dict=True, cpu_offload=True)
    mine, moments = checkpoint.get_state_dict(model, optimizer, options=on_first, replicas=replicas)
    if dist.get_rank() > 0:
        assert mine == moments == {}
    else:
        assert list(mine) == list(everywhere)
        assert all(torch.equal(value, everywhere[name]) for name, value in mine.items())
    expected = train(model, optimizer, 2)

    other, other_optimizer = build(mode, lr=9.0)
    sent = Options(full_state_dict=True, broadcast_from_rank0=True)
    with timeline() as recorded:
        keys = checkpoint.set_state_dict(
            other, other_optimizer, model_state_dict=mine, optim_state_dict=moments, options=sent
        )
    assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
    assert "broadcast load_state_dict()" in recorded.lines("broadcast")
    assert train(other, other_optimizer, 2) == expected


@by_mode
def test_the_first_rank_has_it_whole_and_can_send_it_to_all(mode):
    run_ranks(MODES[mode][2], whole_tensors, mode)


def other_options() -> None:
    case = CASES["frozen"]
    plain, model = case.model(torch.float32), FSDP(case.model(torch.float32))
    frozen = {name for name, p in plain.named_parameters() if not p.requires_grad}
    assert frozen
    for full in (False, True):
        options = Options(full_state_dict=full, ignore_frozen_params=True)
        state = checkpoint.get_model_state_dict(model, options=options)
        assert list(state) == [name for name in plain.state_dict() if name not in frozen]
        state = checkpoint.get_model_state_dict(model, options=Options(cpu_offload=not full))
        assert all(is_cut(state[name]) for name, _ in plain.named_parameters())
        with provokes(checkpoint.set_model_state_dict, LoadError, match="missing keys"):
            checkpoint.set_model_state_dict(model, {})
        partial = {"nothing": torch.ones(1)}
        keys = checkpoint.set_model_state_dict(model, partial, options=Options(strict=False))
        assert keys.unexpected_keys == ["nothing"]
        assert set(keys.missing_keys) == set(plain.state_dict())
    FSDP.set_state_dict_type(model, "local")  # neither used nor changed
    checkpoint.set_model_state_dict(model, checkpoint.get_model_state_dict(model))
    assert FSDP.get_state_dict_type(model).state_dict_type.name == "LOCAL_STATE_DICT"

    model, optimizer = build("flat")
    train(model, optimizer, 1)
    states = checkpoint.get_state_dict(model, optimizer)
    wrong = Options(broadcast_from_rank0=True)
    arguments = {"model_state_dict": states[0], "optim_state_dict": states[1], "options": wrong}
    with provokes(checkpoint.set_model_state_dict, StateDictTypeError, match="set both"):
        checkpoint.set_model_state_dict(model, states[0], options=wrong)
    with provokes(checkpoint.set_optimizer_state_dict, StateDictTypeError, match="set both"):
        checkpoint.set_optimizer_state_dict(model, optimizer, states[1], options=wrong)
    with provokes(checkpoint.set_state_dict, StateDictTypeError, match="set both"):
        checkpoint.set_state_dict(model, optimizer, **arguments)
    del arguments["options"]
    with provokes(checkpoint.set_state_dict, LoadError):
        checkpoint.set_state_dict(model, optimizer, **{**arguments, "model_state_dict": {}})
    with provokes(checkpoint.set_state_dict, OptimizerStateError):
        checkpoint.set_state_dict(model, optimizer, **{**arguments, "optim_state_dict": {"x": 1}})
    with provokes(checkpoint.set_optimizer_state_dict, OptimizerStateError):
        checkpoint.set_optimizer_state_dict(model, optimizer, {"x": 1})
    foreign = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with provokes(checkpoint.get_optimizer_state_dict, OptimizerStateError):
        checkpoint.get_optimizer_state_dict(model, foreign)
    with provokes(checkpoint.get_state_dict, OptimizerStateError):
        checkpoint.get_state_dict(model, foreign)


def test_options_mean_what_torchs_mean_and_misuse_is_named():
    run_ranks(2, other_options)


def several_optimizers(orig: bool) -> None:
    for full in (False, True):
        for flat in (False, True):
            several(orig, Options(full_state_dict=full, flatten_optimizer_state_dict=flat))


def several(orig: bool, options: checkpoint.StateDictOptions) -> None:
    def make(lr: float) -> tuple[FSDP, list[torch.optim.Optimizer]]:
        model = nested(seeded(), use_orig_params=orig)
        layers = list(model.layers.parameters())
        rest = [p for p in model.parameters() if not any(p is one for one in layers)]
        return model, [
            torch.optim.AdamW(
                [{"params": layers[:1], "lr": lr / 2}, {"params": layers[1:]}], lr=lr
            ),
            torch.optim.SGD(rest, lr=lr, momentum=0.9),
        ]

    def steps(model: FSDP, optimizers: list[torch.optim.Optimizer]) -> list[float]:
        losses = []
        for _ in range(2):
            loss = mean_square(model(my_part(whole_batch())))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizers = make(0.05)
    steps(model, optimizers)
    states = checkpoint.get_state_dict(model, iter(optimizers), options=options)
    flat = options.flatten_optimizer_state_dict
    assert any(name.startswith("state.head.weight") for name in states[1]) == flat
    expected = steps(model, optimizers)
    model, optimizers = make(7.0)
    checkpoint.set_state_dict(
        model,
        iter(optimizers),
        model_state_dict=states[0],
        optim_state_dict=states[1],
        options=options,
    )
    assert steps(model, optimizers) == expected


@pytest.mark.parametrize("orig", [False, True])
def test_several_optimizers_and_flattened_state(orig):
    run_ranks(2, several_optimizers, orig)


# ---------------------------------------------------------------- other models


def around_and_without() -> None:
    plain = seeded()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    train(plain, optimizer, 1)
    states = checkpoint.get_state_dict(plain, optimizer)  # no units: torch's own
    assert list(states[0]) == list(plain.state_dict())
    assert set(states[1]["state"]) == set(states[0])
    checkpoint.set_state_dict(
        plain, optimizer, model_state_dict=states[0], optim_state_dict=states[1]
    )

    model = nn.ModuleDict({"inner": nested(seeded()), "outside": nn.Linear(2, 2)})
    model.register_buffer("count", torch.zeros(2))
    state = checkpoint.get_model_state_dict(model)
    assert is_cut(state["inner.head.weight"])
    assert type(state["outside.weight"]) is Tensor
    full = {name: whole(value) + 1 for name, value in state.items()}
    mine = full if dist.get_rank() == 0 else {}
    options = Options(full_state_dict=True, broadcast_from_rank0=True)
    checkpoint.set_model_state_dict(model, mine, options=options)
    for name, value in model.state_dict().items():
        assert torch.equal(value, full[name]), name


def test_models_around_units_and_models_without_units_work_too():
    run_ranks(2, around_and_without)


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Odd:
    """Cannot be read back without running code."""


def sending(strategy: str, group: Any) -> None:
    rank = dist.get_rank()

    def make() -> FSDP:
        torch.manual_seed(0)
        inner = WithExtraState(5, 3)
        inner.extra = {"epoch": rank, "seen": [1.5, torch.arange(3)]}
        model = nn.Sequential(inner, nn.BatchNorm1d(3))
        return FSDP(model, group, strategy)

    model = make()
    state = model.state_dict()
    state = {k: v + 1 if isinstance(v, Tensor) else v for k, v in state.items()}
    options = Options(full_state_dict=True, broadcast_from_rank0=True)
    checkpoint.set_model_state_dict(model, state if rank == 0 else {}, options=options)
    for name, value in model.state_dict().items():
        assert not isinstance(value, Tensor) or torch.equal(value, state[name]), name
    assert model.module[0].extra["epoch"] == 0
    assert torch.equal(model.module[0].extra["seen"][1], torch.arange(3))

    before = model.state_dict()
    for wrong, match in (
        ({**state, "0._extra_state": Odd()}, "objects: .*_extra_state"),
        (checkpoint.get_model_state_dict(model), "DTensors: .*0.weight"),
    ):
        given = wrong if rank == 0 else {}
        with provokes(sent_values.sent_by_first, LoadError, match=match):
            checkpoint.set_model_state_dict(model, given, options=options)
    short = {**state, "0.weight": torch.ones(2, 5)}
    with provokes(checkpoint.set_model_state_dict, LoadError, match="size mismatch"):
        checkpoint.set_model_state_dict(model, short if rank == 0 else {}, options=options)
    for name, value in model.state_dict().items():
        assert not isinstance(value, Tensor) or torch.equal(value, before[name]), name

    def compute(module: nn.Module, state: dict, prefix: str, *_: object) -> None:
        state[prefix + "weight"].norm()

    model.module[0]._register_load_state_dict_pre_hook(compute, with_module=True)
    with pytest.raises(NotGatheredError, match=r"0\.weight"):
        checkpoint.set_model_state_dict(model, state if rank == 0 else {}, options=options)


@pytest.mark.parametrize(
    ("strategy", "group"), [("FULL_SHARD", None), ("HYBRID_SHARD", ("set2", "mod2"))]
)
def test_what_the_first_rank_sends_arrives_with_buffers_and_extra_state(strategy, group):
    run_ranks(4, sending, strategy, group)


def silent() -> None:
    """Rank 0 alone makes every call, each on a model that was never used."""
    if dist.get_rank() > 0:
        return
    agreement._mailbox().timeout = timedelta(seconds=0.3)
    sent = Options(full_state_dict=True, broadcast_from_rank0=True)
    state = seeded().state_dict()
    both = {"model_state_dict": state, "optim_state_dict": {"state": {}, "param_groups": []}}
    with provokes(checkpoint.get_model_state_dict, SilentRanksError, match="rank 1 silent"):
        checkpoint.get_model_state_dict(build("flat")[0])
    with provokes(checkpoint.get_optimizer_state_dict, SilentRanksError):
        checkpoint.get_optimizer_state_dict(*build("flat"))
    with provokes(checkpoint.get_state_dict, SilentRanksError):
        checkpoint.get_state_dict(*build("flat"))
    with provokes(checkpoint.set_model_state_dict, SilentRanksError):
        checkpoint.set_model_state_dict(build("flat")[0], state, options=sent)
    with provokes(checkpoint.set_optimizer_state_dict, SilentRanksError):
        checkpoint.set_optimizer_state_dict(*build("flat"), both["optim_state_dict"], options=sent)
    with provokes(checkpoint.set_state_dict, SilentRanksError):
        checkpoint.set_state_dict(*build("flat"), **both, options=sent)
    values = {"weight": torch.ones(2)}
    group = RankGroup((0, 1), 0, dist.group.WORLD)
    with provokes(sent_values.sent_by_first, SilentRanksError):
        sent_values.sent_by_first(values, [group])


def test_a_rank_that_is_silent_is_named():
    run_ranks(2, silent)


def never_fetched() -> None:
    group = RankGroup((0, 1), dist.get_rank(), dist.group.WORLD)
    sent = sent_values.sent_by_first({"weight": torch.ones(2)}, [group])
    if dist.get_rank() == 1:
        with provokes(sent_values.SentValue.fetch, SilentRanksError, match="'weight', from the"):
            sent["weight"].fetch()


def test_a_value_that_the_first_rank_does_not_send_is_named():
    run_ranks(2, never_fetched, dist_timeout=3)


# ---------------------------------------------------------------- torch's own helpers


def torchs_helpers(orig: bool, path: str) -> None:
    model, plain = nested(seeded(), use_orig_params=orig), seeded()
    state = torchs.get_model_state_dict(model)
    assert list(state) == list(plain.state_dict())
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    with FSDP.state_dict_type(model, "sharded"):
        rows = torchs.get_model_state_dict(model)
        assert all(is_cut(value) for value in rows.values())
    full = torchs.get_model_state_dict(
        model, options=Options(full_state_dict=True, cpu_offload=True)
    )
    assert (list(full) == list(plain.state_dict())) == (dist.get_rank() == 0)
    other = {name: value + 1 for name, value in plain.state_dict().items()}
    torchs.set_model_state_dict(model, dict(other))
    assert all(torch.equal(v, other[name]) for name, v in model.state_dict().items())
    torchs.set_model_state_dict(model, rows)
    assert all(torch.equal(v, plain.state_dict()[k]) for k, v in model.state_dict().items())
    # A checkpoint made with torch's helpers from torch's FSDP2 loads here through them, and back.
    theirs = fully_shard(seeded())
    theirs.load_state_dict({k: v + 2 for k, v in theirs.state_dict().items()})
    dcp.save(torchs.get_model_state_dict(theirs), checkpoint_id=path)
    dcp.load(rows, checkpoint_id=path)
    torchs.set_model_state_dict(model, rows)
    expected = {name: value + 2 for name, value in plain.state_dict().items()}
    assert all(torch.equal(v, expected[name]) for name, v in model.state_dict().items())
    torchs.set_model_state_dict(theirs, checkpoint.get_model_state_dict(model))
    assert all(torch.equal(whole(v), expected[k]) for k, v in theirs.state_dict().items())


def torchs_options(orig: bool, *choices: dict[str, bool]) -> None:
    expected = {name: value + 1 for name, value in seeded().state_dict().items()}
    for form in ("full", "sharded"):
        for options in choices:
            model, sent = nested(seeded(), use_orig_params=orig), "broadcast_from_rank0" in options
            given = {} if sent and dist.get_rank() > 0 else dict(expected)
            with FSDP.state_dict_type(model, form):
                keys = torchs.set_model_state_dict(model, given, options=Options(**options))
            assert not keys.missing_keys
            assert not keys.unexpected_keys
            assert all(torch.equal(v, expected[name]) for name, v in model.state_dict().items())


def test_torchs_own_model_helpers_load_with_their_options():
    sent = {"full_state_dict": True, "broadcast_from_rank0": True}
    full, offloaded = {"full_state_dict": True}, {"full_state_dict": True, "cpu_offload": True}
    run_ranks(2, torchs_options, False, full, offloaded, {"strict": False})
    run_ranks(2, torchs_options, True, full, offloaded, {"strict": False}, sent)
    with pytest.raises(RankFailure, match=r"SilentRanksError|LoadError"):  # never silently
        run_ranks(2, torchs_options, False, sent, dist_timeout=2)


@pytest.mark.parametrize("orig", [False, True])
def test_torchs_own_model_helpers_work(orig, tmp_path):
    run_ranks(2, torchs_helpers, orig, str(tmp_path))
