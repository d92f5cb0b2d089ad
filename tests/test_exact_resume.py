"""A run that was saved at some number of ranks goes on at another as if it had never stopped.

World A trains, saves and trains on: that is the run that never stopped. World B builds everything
anew from another seed, loads, and trains on. What B has loaded equals what A has saved bit for bit,
whatever the numbers of ranks. What comes after is compared bit for bit where they are equal, and
otherwise to the tolerance of the precision, because sums over ranks are made in another order.

A selection in which any two choices occur together runs always; the whole product with `--full`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import checkpoint
from tests.models import BATCH, Scale
from tests.parity.product import HYBRID_LISTS, covering
from tests.parity.training import mean_over_ranks
from tests.ranks import run_ranks

WIDTH, BEFORE, AFTER = 6, 2, 3
LONG = {"timeout": 900.0, "dist_timeout": 60.0}  # many runs in one set of ranks
Weights = dict[str, Tensor]

# ---------------------------------------------------------------- model and data


class Layer(nn.Module):
    """A residual layer with a buffer that changes in the forward, alike on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), Scale()
        self.register_buffer("calls", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.scale(torch.tanh(self.linear(x)))


class Model(nn.Module):
    """Has what makes saving hard: a tied weight, frozen ones, unused ones, and single elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.never = nn.Linear(WIDTH, 2)  # a unit that no forward calls
        self.idle = nn.Parameter(torch.randn(3))  # beside used ones
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.outer.weight = self.inner.weight
        self.inner.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.outer(torch.tanh(self.inner(x)))


# The ranks that share an expert, of which there are two wherever there are ranks for it.
EXPERTS = {1: [[0]], 2: [[0], [1]], 3: [[0, 2], [1]], 4: [[0, 2], [1, 3]]}


def my_samples(batch: Tensor) -> Tensor:
    """Cut out this rank's samples: each expert gets the same half at any number of ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return batch
    mates = next(ranks for ranks in EXPERTS[world_size] if rank in ranks)
    return batch[rank % 2 :: 2][mates.index(rank) :: len(mates)]


def my_loss(model: nn.Module, step: int, dtype: torch.dtype) -> Tensor:
    """Return this rank's part of the loss; the mean over ranks is the mean over all samples."""
    generator = torch.Generator().manual_seed(step)
    mine = my_samples(torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64))
    output = model(mine.to(dtype)).to(dtype)
    target = torch.sin(mine.sum(1, keepdim=True)).to(dtype)
    return (output - target).square().mean(1).sum() * dist.get_world_size() / BATCH


# ---------------------------------------------------------------- what can be chosen

BF16, FP32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Dtypes:
    """A choice of precision.

    Attributes:
        original: Dtype of the plain model.
        settings: `mixed_precision`, or `None`.
        tolerance: Largest difference between numbers of ranks: of weights and moments relative to
            the largest element of their kind, of losses absolute.
    """

    original: torch.dtype
    settings: dict[str, torch.dtype] | None
    tolerance: float


PRECISIONS = {
    "double": Dtypes(torch.float64, None, 1e-14),
    "single": Dtypes(FP32, None, 1e-6),
    "computed in bf16": Dtypes(FP32, {"param_dtype": BF16, "reduce_dtype": FP32}, 2e-2),
    "bf16": Dtypes(FP32, {"param_dtype": BF16, "reduce_dtype": BF16, "buffer_dtype": BF16}, 2e-2),
}
OFFLOADS = {"off": None, "params": True, "gradients": {"offload_gradients": True}}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    # The default eps blows rounding up wherever the true gradient is zero.
    "adam": (torch.optim.Adam, {"eps": 1e-2, "amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"eps": 1e-2, "weight_decay": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"eps": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"eps": 1e-2, "momentum": 0.5}),
}


@dataclass(frozen=True)
class Config:
    """One combination; the numbers of ranks are those that save and that load."""

    saved_by: int
    loaded_by: int
    strategy: str
    precision: str
    offload: str
    use_orig_params: bool
    experts: bool
    optimizer: str

    @property
    def is_possible(self) -> bool:
        """One rank has one version of an expert; others have two, under other names."""
        return not self.experts or (self.saved_by == 1) == (self.loaded_by == 1)

    @property
    def folder(self) -> str:
        """Name the checkpoint: one that is saved once is loaded at all numbers of ranks."""
        return "-".join(str(v).replace(" ", "_") for k, v in vars(self).items() if k != "loaded_by")


CHOICES: dict[str, tuple[Any, ...]] = {
    "saved_by": (1, 2, 3, 4),
    "loaded_by": (1, 2, 3, 4),
    "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"),
    "precision": tuple(PRECISIONS),
    "offload": tuple(OFFLOADS),
    "use_orig_params": (False, True),
    "experts": (False, True),
    "optimizer": tuple(OPTIMIZERS),
}
assert tuple(CHOICES) == tuple(setting.name for setting in fields(Config))
_COVERING = [Config(*row) for row in covering(2, CHOICES)]
# Where experts do not fit, the same without: every pair of numbers still occurs.
SELECTION = sorted(
    {c if c.is_possible else Config(**{**vars(c), "experts": False}) for c in _COVERING}, key=str
)


def whole_product(**fixed: Any) -> list[Config]:
    """Return every combination that is possible; the optimizers take turns."""
    choices = {**CHOICES, **{name: (value,) for name, value in fixed.items()}}
    optimizers, numbers = choices.pop("optimizer"), choices.pop("loaded_by")
    configs = []
    for turn, (saved_by, *rest) in enumerate(itertools.product(*choices.values())):
        optimizer = optimizers[turn % len(optimizers)]
        configs += [Config(saved_by, number, *rest, optimizer) for number in numbers]
    return [config for config in configs if config.is_possible]


# ---------------------------------------------------------------- training


@dataclass
class Training:
    """A model with all that goes on with it."""

    model: FSDP
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    dtype: torch.dtype

    def run(self, steps: Iterable[int]) -> list[float]:
        """Train and return the mean losses over ranks."""
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            loss = my_loss(self.model, step, self.dtype)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            losses.append(mean_over_ranks(loss))
        return losses

    def state(self) -> dict[str, Any]:
        """Return what goes into a checkpoint, or is filled from one."""
        weights, moments = checkpoint.get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optim": moments, "scheduler": self.scheduler.state_dict()}

    def load(self, path: str) -> None:
        """Go on from a checkpoint."""
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        keys = checkpoint.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
        )
        assert (keys.missing_keys, keys.unexpected_keys) == ([], [])
        self.scheduler.load_state_dict(state["scheduler"])

    def snapshot(self) -> tuple[Weights, dict[str, Any]]:
        """Return whole weights and the whole state of the optimizer, all versions of them."""
        options = checkpoint.StateDictOptions(full_state_dict=True, cpu_offload=True)
        return checkpoint.get_state_dict(
            self.model, self.optimizer, options=options, replicas="all"
        )


def build(config: Config, seed: int = 0) -> Training:
    world_size, dtypes = dist.get_world_size(), PRECISIONS[config.precision]
    arguments = {
        "sharding_strategy": config.strategy,
        "mixed_precision": dtypes.settings,
        "cpu_offload": OFFLOADS[config.offload],
        "use_orig_params": config.use_orig_params,
    }
    hybrid = "HYBRID" in config.strategy
    shared = {**arguments, "process_group": HYBRID_LISTS[world_size] if hybrid else None}
    expert = {**arguments, "process_group": EXPERTS[world_size], "gradient_divisor": world_size}
    if hybrid:
        expert["sharding_strategy"] = "FULL_SHARD"
    torch.manual_seed(seed)
    model = Model().to(dtypes.original)
    for index, layer in enumerate(model.layers):
        model.layers[index] = FSDP(layer, **(expert if config.experts and index == 1 else shared))
    model.never = FSDP(model.never, **shared)
    model = FSDP(model, **shared)
    first = list(model.layers[0].parameters())
    others = [p for p in model.parameters() if not any(p is mine for mine in first)]
    make, settings = OPTIMIZERS[config.optimizer]
    groups = [{"params": first, "lr": 0.02 + seed}, {"params": others, "lr": 0.01 + seed}]
    optimizer = make(groups, **settings)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return Training(model, optimizer, scheduler, dtypes.original)


@dataclass
class Trace:
    """What a run left on its first rank: when it was saved or loaded, and at the end."""

    then: tuple[Weights, dict[str, Any]]
    losses: list[float]
    end: tuple[Weights, dict[str, Any]]


def never_stopped(configs: list[Config], path: str) -> list[Trace]:
    """Train, save, and train on."""
    traces = []
    for config in configs:
        run = build(config)
        run.run(range(BEFORE))
        dcp.save(run.state(), checkpoint_id=f"{path}/{config.folder}")
        then = run.snapshot()
        losses = run.run(range(BEFORE, BEFORE + AFTER))
        traces.append(Trace(then, losses, run.snapshot()))
    return traces if dist.get_rank() == 0 else []


def resumed(configs: list[Config], path: str) -> list[Trace]:
    """Build anew, load, and train on."""
    traces = []
    for number, config in enumerate(configs):
        run = build(config, seed=7)
        if number % 2:  # nothing of its own, or something to forget
            run.run(range(90, 91))
        run.load(f"{path}/{config.folder}")
        then = run.snapshot()
        losses = run.run(range(BEFORE, BEFORE + AFTER))
        traces.append(Trace(then, losses, run.snapshot()))
    return traces if dist.get_rank() == 0 else []


# ---------------------------------------------------------------- comparing


def kinds(snapshot: tuple[Weights, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Sort all values by what they are: weights and buffers, and each kind of moment."""
    weights, moments = snapshot
    found: dict[str, dict[str, Any]] = {"weights": dict(weights)}
    for name, values in moments["state"].items():
        for kind, value in values.items():
            found.setdefault(kind, {})[name] = value
    for number, group in enumerate(moments["param_groups"]):
        found[f"group {number}"] = group
    return found


def differences(
    found: tuple[Weights, dict[str, Any]],
    expected: tuple[Weights, dict[str, Any]],
    tolerance: float,
) -> list[str]:
    """Say what differs by more than a tolerance, relative to the largest of its kind."""
    ours, theirs = kinds(found), kinds(expected)
    for kind in ours.keys() & theirs.keys():
        # A weight that never had a gradient has no state, and from a file that of a first step.
        begun = [n for n in ours[kind].keys() - theirs[kind].keys() if not ours[kind][n].any()]
        ours[kind] = {n: value for n, value in ours[kind].items() if n not in begun}
    if {k: list(v) for k, v in ours.items()} != {k: list(v) for k, v in theirs.items()}:
        names = [{f"{kind} {n}" for kind, v in one.items() for n in v} for one in (ours, theirs)]
        return [f"names {sorted(names[0] ^ names[1])}, or their order"]
    wrong = []
    for kind, values in theirs.items():
        tensors = [v for v in values.values() if isinstance(v, Tensor)]
        largest = max((v.abs().max().item() for v in tensors if v.numel()), default=0.0)
        for name, value in values.items():
            mine = ours[kind][name]
            if not isinstance(value, Tensor):
                wrong += [] if mine == value else [f"{kind} {name}: {mine} is not {value}"]
            elif (mine.dtype, mine.shape) != (value.dtype, value.shape):
                wrong.append(f"{kind} {name}: {mine.dtype} {mine.shape}")
            elif not torch.equal(mine, value):
                gap = (mine.double() - value.double()).abs().max().item()
                if not gap <= tolerance * largest:
                    wrong.append(f"{kind} {name}: off by {gap / largest:.1e} of the largest")
    return wrong


def judge(config: Config, found: Trace, expected: Trace) -> list[str]:
    """Say what is wrong with a resumed run."""
    tolerance = PRECISIONS[config.precision].tolerance
    if config.saved_by == config.loaded_by:
        tolerance = 0.0
    wrong = [f"loaded: {text}" for text in differences(found.then, expected.then, 0.0)]
    wrong += [f"at the end: {text}" for text in differences(found.end, expected.end, tolerance)]
    for step, (mine, theirs) in enumerate(zip(found.losses, expected.losses, strict=True)):
        if not abs(mine - theirs) <= tolerance:
            wrong.append(f"loss of step {step} after loading: {mine} is not {theirs}")
    return [f"{config}: {text}" for text in wrong]


class Shelf:
    """Saves each configuration once, when it is first asked for."""

    def __init__(self, path: Path) -> None:
        self.path, self.traces = str(path), dict[str, Trace]()

    def save(self, configs: list[Config]) -> None:
        """Let each number of ranks save what it has to, in one set of ranks."""
        for number in sorted({config.saved_by for config in configs}):
            todo = {c.folder: c for c in configs if c.saved_by == number}
            traces = run_ranks(number, never_stopped, list(todo.values()), self.path, **LONG)[0]
            self.traces |= dict(zip(todo, traces, strict=True))

    def check(self, configs: list[Config]) -> None:
        """Load, go on and compare; all configurations at one number of ranks."""
        (number,) = {config.loaded_by for config in configs}
        found = run_ranks(number, resumed, configs, self.path, **LONG)[0]
        pairs = zip(configs, found, strict=True)
        wrong = [text for c, trace in pairs for text in judge(c, trace, self.traces[c.folder])]
        assert not wrong, "\n".join(wrong)


# ---------------------------------------------------------------- the claims

PAIRS = list(itertools.product(CHOICES["saved_by"], CHOICES["loaded_by"]))


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    shelf = Shelf(tmp_path_factory.mktemp("saved"))
    shelf.save(SELECTION)
    return shelf


def test_the_selection_has_each_pair_of_numbers_of_ranks_and_each_choice():
    assert {(c.saved_by, c.loaded_by) for c in SELECTION} == set(PAIRS)
    for name, values in CHOICES.items():
        assert {getattr(config, name) for config in SELECTION} == set(values)
    for number in (2, 3, 4):  # experts move to more ranks and to fewer
        assert {c.loaded_by for c in SELECTION if c.experts} >= {number}
        assert {c.saved_by for c in SELECTION if c.experts} >= {number}
    assert len(SELECTION) < 60


@pytest.mark.parametrize("loaded_by", CHOICES["loaded_by"])
def test_a_run_saved_at_any_number_of_ranks_goes_on_at_this_one(shelf, loaded_by):
    shelf.check([config for config in SELECTION if config.loaded_by == loaded_by])


WHOLE = list(itertools.product(CHOICES["saved_by"], CHOICES["strategy"], CHOICES["precision"]))


@pytest.mark.full
@pytest.mark.parametrize(("saved_by", "strategy", "precision"), WHOLE)
def test_a_run_goes_on_at_any_number_of_ranks_for_all_choices(
    saved_by, strategy, precision, tmp_path
):
    shelf = Shelf(tmp_path)
    configs = whole_product(saved_by=saved_by, strategy=strategy, precision=precision)
    shelf.save(configs)
    for number in CHOICES["loaded_by"]:
        shelf.check([config for config in configs if config.loaded_by == number])


# ---------------------------------------------------------------- what a comparison would notice

PLAIN = Config(2, 2, "FULL_SHARD", "double", "off", True, False, "adamw")


def test_what_is_not_loaded_would_be_noticed(tmp_path):
    shelf = Shelf(tmp_path)
    shelf.save([PLAIN])
    trace = shelf.traces[PLAIN.folder]
    assert judge(PLAIN, trace, trace) == []
    lacking = run_ranks(2, forgets, PLAIN, shelf.path)[0]
    for forgotten, text in {
        "weights": "loaded: weights layers.0.linear.weight",
        "moments": "loaded: exp_avg layers.0.linear.weight",
        "rates": "at the end: group 0 lr",
    }.items():
        wrong = judge(PLAIN, lacking[forgotten], trace)
        assert any(text in one for one in wrong), (forgotten, wrong)
        assert any("loss of step" in one for one in wrong), (forgotten, wrong)


def forgets(config: Config, path: str) -> dict[str, Trace]:
    """Resume three times, each time without something."""
    found = {}
    for forgotten in ("weights", "moments", "rates"):
        run = build(config, seed=7 if forgotten == "weights" else 0)
        run.run(range(BEFORE))
        weights, moments = run.state()["model"], run.state()["optim"]
        scheduler = run.scheduler.state_dict()
        run = build(config, seed=7)
        run.load(f"{path}/{config.folder}")
        if forgotten == "weights":
            checkpoint.set_model_state_dict(run.model, weights)
        elif forgotten == "moments":
            fresh = build(config).state()["optim"]
            moments = {**moments, "state": fresh["state"]}
            checkpoint.set_optimizer_state_dict(run.model, run.optimizer, moments)
        else:
            run.scheduler.load_state_dict({**scheduler, "_last_lr": [1.0, 1.0]})
            for group in run.optimizer.param_groups:
                group["lr"] = 1.0
        then = run.snapshot()
        found[forgotten] = Trace(then, run.run(range(BEFORE, BEFORE + AFTER)), run.snapshot())
    return found


# ---------------------------------------------------------------- beside weights and moments


class Dropping(Model):
    """Draws random numbers in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.dropout(x, 0.3, self.training))


def with_everything(stage: str, orig: bool, path: str) -> list[float]:
    """Train with dropout, a sampler, a scheduler and a loss scale; save, or load, all of them."""
    rank = dist.get_rank()
    torch.manual_seed(0 if stage == "save" else 7)
    model = FSDP(Dropping(), use_orig_params=orig, mixed_precision={"param_dtype": torch.float16})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 7)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    sampler = torch.Generator().manual_seed(5 if stage == "save" else 6)
    torch.manual_seed(100 + rank)  # masks differ between ranks, unlike initial weights

    def state() -> dict[str, Any]:
        weights, moments = checkpoint.get_state_dict(model, optimizer)
        mine = {"dropout": torch.get_rng_state(), "sampler": sampler.get_state()}
        return {
            "model": weights,
            "optim": moments,
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict(),
            f"rank{rank}": mine,  # a name of its own: of equal names one rank's value is kept
        }

    def train(steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(torch.randn(4, WIDTH, generator=sampler)).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            losses += [mean_over_ranks(loss), scaler.get_scale(), scheduler.get_last_lr()[0]]
        return losses

    if stage == "save":
        train(3)
        dcp.save(state(), checkpoint_id=path)
    else:
        train(1)
        loaded = state()
        dcp.load(loaded, checkpoint_id=path)
        checkpoint.set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optim"]
        )
        scheduler.load_state_dict(loaded["scheduler"])
        scaler.load_state_dict(loaded["scaler"])
        if stage == "load":
            torch.set_rng_state(loaded[f"rank{rank}"]["dropout"])
            sampler.set_state(loaded[f"rank{rank}"]["sampler"])
    return train(4)


@pytest.mark.parametrize("orig", [False, True])
def test_dropout_data_schedule_and_loss_scale_go_on_bit_for_bit(orig, tmp_path):
    expected = run_ranks(2, with_everything, "save", orig, str(tmp_path))
    assert len(set(expected[0][1::3])) > 1  # the scale grows on the way
    assert run_ranks(2, with_everything, "load", orig, str(tmp_path)) == expected
    assert run_ranks(2, with_everything, "load no state", orig, str(tmp_path)) != expected


# ---------------------------------------------------------------- what a file must not leave open


class TwoBranches(nn.Module):
    """Uses one of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(3, 3) for _ in range(2)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.branches[which](x)


def two_branches(orig: bool, path: str) -> None:
    """Save after using one branch, and load where only the other one was used."""

    def start(which: int, *, save: bool) -> tuple[FSDP, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = TwoBranches()
        for index, branch in enumerate(model.branches):
            model.branches[index] = FSDP(branch, use_orig_params=orig)
        model = FSDP(model, use_orig_params=orig)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optimizer, which)
        weights, moments = checkpoint.get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments}
        if save:
            dcp.save(state, checkpoint_id=path)
            return model, optimizer
        dcp.load(state, checkpoint_id=path)
        checkpoint.set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=state["optim"]
        )
        return model, optimizer

    def step(model: FSDP, optimizer: torch.optim.Optimizer, which: int) -> None:
        model(torch.ones(2, 3), which).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    saved = start(0, save=True)
    resumed = start(1, save=False)
    moments = FSDP.optim_state_dict(*resumed)["state"]
    for name, values in FSDP.optim_state_dict(*saved)["state"].items():
        assert all(torch.equal(moments[name][n], value) for n, value in values.items()), name
    assert not moments["branches.1.weight"]["exp_avg"].any()  # forgotten, as it has to be
    for which in (1, 0, 1):
        step(*saved, which)
        step(*resumed, which)
    weights = resumed[0].state_dict()
    for name, value in saved[0].state_dict().items():
        assert torch.equal(weights[name], value), name


@pytest.mark.parametrize("orig", [False, True])
def test_a_weight_without_state_is_saved_as_one_that_begins(orig, tmp_path):
    run_ranks(2, two_branches, orig, str(tmp_path))


def expert_of_one_rank(config: Config, path: str) -> str:
    run = build(config)
    if dist.get_world_size() == 1:
        dcp.save(run.state(), checkpoint_id=path)
        return ""
    try:
        run.load(path)
    except dcp.api.CheckpointException as error:
        return str(error)
    return "nothing"


def test_experts_of_other_groups_are_missed_by_name(tmp_path):
    config = Config(1, 2, "FULL_SHARD", "double", "off", False, True, "sgd")
    run_ranks(1, expert_of_one_rank, config, str(tmp_path))
    said = run_ranks(2, expert_of_one_rank, config, str(tmp_path))
    assert all("Missing key in checkpoint state_dict: model.layers.1" in text for text in said)
    assert "@rank" in said[0]


def running_statistics(stage: str, path: str) -> Tensor:
    torch.manual_seed(dist.get_rank() + 50 * (stage == "load"))
    model = FSDP(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), sync_module_states=True)
    model(torch.randn(8, 3) + dist.get_rank())
    state = {"model": checkpoint.get_model_state_dict(model)}
    mine = state["model"]["1.running_mean"].clone()
    if stage == "save":
        dcp.save(state, checkpoint_id=path)
        return mine
    dcp.load(state, checkpoint_id=path)
    checkpoint.set_model_state_dict(model, state["model"])
    return model.module[1].running_mean


def test_buffers_that_differ_between_ranks_come_back_as_those_of_one_rank(tmp_path):
    saved = run_ranks(2, running_statistics, "save", str(tmp_path))
    assert not torch.equal(*saved)
    loaded = run_ranks(2, running_statistics, "load", str(tmp_path))
    assert torch.equal(*loaded)
    assert any(torch.equal(loaded[0], one) for one in saved)
