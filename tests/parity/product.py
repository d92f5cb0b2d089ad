"""Every combination of choices, trained beside plain PyTorch, DDP and torch's two FSDPs.

A `Config` is one combination. `compare_all` trains many of them inside one set of ranks and returns
what differed; references are trained once per set of ranks and choice that matters to them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import fsdp_ref
from tests.models import (
    BATCH,
    CASES,
    Case,
    ConvNet,
    Residual,
    Scale,
    mean_square,
    numbers,
    part,
)
from tests.parity.training import copies, full_weights, mean_over_ranks

STEPS = 3

# ---------------------------------------------------------------- models


class ShiftedMLP(nn.Module):
    """Sizes that divide by nothing, one of them one, and a buffer whose dtype shows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(-1, 1, 4))
        self.layers = nn.Sequential(
            nn.Linear(4, 9),
            nn.Tanh(),
            nn.Linear(9, 7, bias=False),
            nn.Tanh(),
            Scale(),
            nn.Linear(7, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x + self.shift.to(x.dtype))


class Experts(nn.Module):
    """Each sample goes through the expert that its data names; some ranks use only some."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(experts)])

    def forward(self, x: Tensor, route: Tensor) -> Tensor:
        weight, y = self.gate(x).softmax(-1), x
        for index, expert in enumerate(self.experts):
            mine = (route == index).nonzero().flatten()
            if len(mine):
                change = weight[mine, index, None] * torch.tanh(expert(x[mine]))
                y = y.index_add(0, mine, change.to(y.dtype))
        return y


class MixtureOfExperts(nn.Module):
    """The first number of each sample is its route; a unit holds a gate and all its experts."""

    def __init__(self, width: int = 6, experts: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, width)
        self.layers = nn.ModuleList([Experts(width, experts) for _ in range(2)])
        self.head = nn.Linear(width, 3)

    def forward(self, batch: Tensor) -> Tensor:
        x, route = self.stem(batch[:, 1:]), batch[:, 0].long()
        for layer in self.layers:
            x = layer(x, route)
        return self.head(x)


def routed(dtype: torch.dtype) -> Tensor:
    """Draw a batch in which, with more than one rank, some rank never uses some expert."""
    batch = torch.randn(BATCH, 5, dtype=dtype)
    # Rank r of W gets the samples r, r + W and so on.
    batch[:, 0] = torch.tensor([2, 0, 1, 0, 2, 1, 2, 0, 1, 2, 2, 1])
    return batch


class SmoothResidual(Residual):
    """Without a kink, at which rounding would decide about a whole gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.convolution(x)))


class SmoothConvNet(ConvNet):
    """Convolutions and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(SmoothResidual(3), SmoothResidual(3))


class UnusedBranches(nn.Module):
    """One branch is a unit that is never called; one parameter is never used inside the root."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 5)
        self.never = nn.Linear(4, 5)
        self.idle = nn.Parameter(torch.randn(3))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.used(x)))


MODELS: dict[str, Case] = {
    "mlp": Case(ShiftedMLP, numbers(4), mean_square, (nn.Linear, Scale)),
    "transformer": CASES["tied"],
    "conv": Case(SmoothConvNet, numbers(2, 5, 5), mean_square, (SmoothResidual,)),
    "experts": Case(MixtureOfExperts, routed, lambda y, x: mean_square(y, x[:, 1:]), (Experts,)),
    "unused": Case(UnusedBranches, numbers(4), mean_square, (nn.Linear,), unused="idle"),
}

# ---------------------------------------------------------------- what can be chosen


@dataclass(frozen=True)
class Dtypes:
    """A choice of precision.

    Attributes:
        original: Dtype of the plain model and of the data.
        settings: `mixed_precision`, or `None`.
        tolerance: Largest difference from a reference of the same dtypes, for weights relative
            to how far training has moved any weight, for losses absolute.
    """

    original: torch.dtype
    settings: dict[str, torch.dtype] | None
    tolerance: float


BF16, FP32 = torch.bfloat16, torch.float32
# Three ranks and more are summed in another order than in torch: in bf16 that shows, and AdamW
# makes it larger where gradients are small.
PRECISIONS = {
    "double": Dtypes(torch.float64, None, 1e-11),
    "single": Dtypes(FP32, None, 2e-4),
    "bf16": Dtypes(FP32, {"param_dtype": BF16, "reduce_dtype": BF16, "buffer_dtype": BF16}, 4e-2),
    "bf16, reduced in fp32": Dtypes(FP32, {"param_dtype": BF16, "reduce_dtype": FP32}, 1e-3),
    "reduced in bf16": Dtypes(FP32, {"reduce_dtype": BF16}, 4e-2),
    "buffers in bf16": Dtypes(FP32, {"buffer_dtype": BF16}, 2e-4),
}
OFFLOADS = {"off": None, "params": True, "gradients": {"offload_gradients": True}}
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
# The ranks that share a copy and those that hold the others, per world size.
HYBRID_LISTS = {
    1: ([[0]], [[0]]),
    2: ([[0, 1]], [[0], [1]]),
    3: ([[0, 1, 2]], [[0], [1], [2]]),
    4: ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
}


@dataclass(frozen=True)
class Config:
    """One combination; `astuple` and the names of the fields say all about it."""

    world_size: int
    model: str
    precision: str
    strategy: str
    use_orig_params: bool
    offload: str
    backward_prefetch: str | None
    forward_prefetch: bool
    optimizer: str


CHOICES: dict[str, tuple[Any, ...]] = {
    "world_size": (1, 2, 3, 4),
    "model": tuple(MODELS),
    "precision": tuple(PRECISIONS),
    "strategy": STRATEGIES,
    "use_orig_params": (False, True),
    "offload": tuple(OFFLOADS),
    "backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", None),
    "forward_prefetch": (False, True),
    "optimizer": ("sgd", "adamw"),
}
assert tuple(CHOICES) == tuple(setting.name for setting in fields(Config))


def whole_product(**fixed: Any) -> Iterator[Config]:
    """Yield every combination; the optimizers take turns."""
    choices = {**CHOICES, **{name: (value,) for name, value in fixed.items()}}
    optimizers = choices.pop("optimizer")
    for number, combination in enumerate(itertools.product(*choices.values())):
        yield Config(*combination, optimizers[number % len(optimizers)])


def covering(strength: int, choices: dict[str, tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return few combinations in which any ``strength`` settings occur together, each way.

    Greedy: start from what is not covered yet, then give each further setting the value that
    covers most. Always the same for the same choices.
    """
    columns = list(choices.values())
    missing = {
        tuple(zip(where, values, strict=True)): None  # a dict keeps the order
        for where in itertools.combinations(range(len(columns)), strength)
        for values in itertools.product(*(columns[column] for column in where))
    }
    rows = []
    while missing:
        row = dict(next(iter(missing)))
        for column in range(len(columns)):
            if column not in row:
                row[column] = max(
                    columns[column],
                    key=lambda value: sum(
                        tuple(sorted({**dict(others), column: value}.items())) in missing
                        for others in itertools.combinations(sorted(row.items()), strength - 1)
                    ),
                )
        whole = sorted(row.items())
        for covered in itertools.combinations(whole, strength):
            missing.pop(covered, None)
        rows.append(tuple(value for _, value in whole))
    return rows


# ---------------------------------------------------------------- training


@dataclass
class Outcome:
    """What a run left: the mean losses over ranks, and the final weights by plain name."""

    losses: list[float]
    weights: dict[str, Tensor]


Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    # The default eps blows rounding up wherever the true gradient is zero, as that of a key's
    # bias in attention is. The tests for equal bits keep the default.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-2, weight_decay=0.1),
    "adamw, default eps": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def run_steps(
    model: nn.Module,
    model_name: str,
    optimizer_name: str,
    dtype: torch.dtype,
    *,
    whole: bool = False,
    micro_batches: int = 1,
    no_sync: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> list[float]:
    """Train and return the losses; all but the last micro-batch of a step run in `no_sync`."""
    case, losses = MODELS[model_name], []
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    batches = iter(case.batches(STEPS * micro_batches, dtype))
    for _ in range(STEPS):
        optimizer.zero_grad()
        for number in range(micro_batches):
            batch = next(batches)
            mine = batch if whole else part(batch, dist.get_rank(), dist.get_world_size())
            with nullcontext() if number + 1 == micro_batches else no_sync():
                loss = case.loss(model(mine).to(dtype), mine)
                loss.backward()
            losses.append(loss.item() if whole else mean_over_ranks(loss))
        optimizer.step()
    return losses


@functools.cache
def plain(model_name: str, optimizer_name: str, dtype: torch.dtype) -> Outcome:
    """Train in one process, on the whole batch."""
    model = MODELS[model_name].model(dtype)
    losses = run_steps(model, model_name, optimizer_name, dtype, whole=True)
    return Outcome(losses, copies(model.named_parameters()))


@functools.cache
def ddp(
    model_name: str, optimizer_name: str, dtype: torch.dtype, micro_batches: int = 1
) -> Outcome:
    """Train with DistributedDataParallel."""
    inner = MODELS[model_name].model(dtype)
    skips = model_name in ("experts", "unused")
    model = DistributedDataParallel(inner, find_unused_parameters=skips)
    steps = {"micro_batches": micro_batches, "no_sync": model.no_sync}
    losses = run_steps(model, model_name, optimizer_name, dtype, **steps)
    return Outcome(losses, copies(inner.named_parameters()))


@functools.cache
def torch_fsdp1(
    model_name: str, optimizer_name: str, precision: str, strategy: str, use_orig_params: bool
) -> Outcome:
    """Train with torch's first FSDP; offload and prefetch do not change its numbers."""
    dtypes, case = PRECISIONS[precision], MODELS[model_name]
    FSDP = torch_fsdp.FullyShardedDataParallel
    model = FSDP(
        case.model(dtypes.original),
        process_group=groups(strategy),
        sharding_strategy=torch_fsdp.ShardingStrategy[strategy],
        auto_wrap_policy=torch_fsdp.wrap.ModuleWrapPolicy(set(case.unit_classes)),
        mixed_precision=mixed_precision(dtypes),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),  # without it, torch's class asks for an accelerator
    )
    losses = run_steps(model, model_name, optimizer_name, dtypes.original)
    with FSDP.summon_full_params(model, writeback=False):
        return Outcome(losses, copies(model.named_parameters()))


@functools.cache
def torch_fsdp2(model_name: str, optimizer_name: str, precision: str, strategy: str) -> Outcome:
    """Train with torch's second FSDP, `fully_shard`."""
    dtypes, case = PRECISIONS[precision], MODELS[model_name]
    settings = dtypes.settings or {}
    arguments = {
        "mesh": mesh(strategy),
        "reshard_after_forward": None if strategy in ("FULL_SHARD", "HYBRID_SHARD") else False,
        "mp_policy": torch_fsdp.MixedPrecisionPolicy(
            settings.get("param_dtype"), settings.get("reduce_dtype")
        ),
    }
    model = case.model(dtypes.original)
    for module in list(model.modules()):
        if isinstance(module, case.unit_classes):
            torch_fsdp.fully_shard(module, **arguments)
    torch_fsdp.fully_shard(model, **arguments)
    if model_name == "experts":  # or gradients of different experts would be added up
        model.set_reduce_scatter_unused_params(True)
    losses = run_steps(model, model_name, optimizer_name, dtypes.original)
    full = {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}
    return Outcome(losses, full)


def sharded(config: Config, micro_batches: int = 1) -> Outcome:
    """Train with this package."""
    dtypes, case = PRECISIONS[config.precision], MODELS[config.model]
    model = fsdp_ref.FullyShardedDataParallel(
        case.model(dtypes.original),
        process_group=groups(config.strategy),
        sharding_strategy=config.strategy,
        cpu_offload=OFFLOADS[config.offload],
        auto_wrap_policy=fsdp_ref.ModuleWrapPolicy(set(case.unit_classes)),
        backward_prefetch=config.backward_prefetch,
        mixed_precision=mixed_precision(dtypes),
        forward_prefetch=config.forward_prefetch,
        use_orig_params=config.use_orig_params,
    )
    steps = {"micro_batches": micro_batches, "no_sync": model.no_sync}
    losses = run_steps(model, config.model, config.optimizer, dtypes.original, **steps)
    return Outcome(losses, full_weights(model))


def mixed_precision(dtypes: Dtypes) -> torch_fsdp.MixedPrecision | None:
    return None if dtypes.settings is None else torch_fsdp.MixedPrecision(**dtypes.settings)


def groups(strategy: str) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
    """Return the pair that a hybrid strategy needs, `None` for the others."""
    return hybrid_pair() if "HYBRID" in strategy else None


@functools.cache
def hybrid_pair() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Make the groups that share and that copy. Collective, once per set of ranks."""
    pair = [
        dist.new_subgroups_by_enumeration(lists)[0] for lists in HYBRID_LISTS[dist.get_world_size()]
    ]
    return pair[0], pair[1]


@functools.cache
def mesh(strategy: str) -> DeviceMesh:
    """Return the mesh on which `fully_shard` does what the strategy means. Collective."""
    size = dist.get_world_size()
    if "HYBRID" not in strategy:
        return dist.init_device_mesh("cpu", (size,))
    shape = {1: (1, 1), 2: (1, 2), 3: (1, 3), 4: (2, 2)}[size]
    return dist.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


# ---------------------------------------------------------------- which references fit


@dataclass(frozen=True)
class Gap:
    """Combinations that a reference cannot train, or trains differently on purpose.

    Attributes:
        references: Whom it concerns.
        reason: Why they are not compared.
        concerns: Whether it applies to a combination.
    """

    references: tuple[str, ...]
    reason: str
    concerns: Callable[[Config], bool]


GAPS = (
    Gap(
        ("plain", "DDP"),
        "they have one dtype for everything",
        lambda config: PRECISIONS[config.precision].settings is not None,
    ),
    Gap(
        ("plain",),
        "batch norm normalises each rank's part by itself",
        lambda config: config.model == "conv" and config.world_size > 1,
    ),
    Gap(
        ("FSDP2",),
        "it has nothing like NO_SHARD",
        lambda config: config.strategy == "NO_SHARD",
    ),
    Gap(
        ("FSDP2",),
        "it has no dtype for buffers",
        lambda config: "buffer_dtype" in (PRECISIONS[config.precision].settings or {}),
    ),
    Gap(
        ("FSDP2",),
        "it has no exemption for batch norm, which refuses bf16 weights beside fp32 statistics",
        lambda config: config.model == "conv" and "bf16, reduced" in config.precision,
    ),
)
# What torch's first FSDP refuses on a CPU, and what it says. None of it changes numbers, so a
# combination is compared with what that class trains without it.
REFUSED_BY_FSDP1: tuple[tuple[dict[str, Any], str], ...] = (
    ({"cpu_offload": torch_fsdp.CPUOffload(offload_params=True)}, "accelerator"),
    ({"cpu_offload": {"offload_gradients": True}}, "offload_params"),
    ({"sync_module_states": True}, "GPU"),
    ({"device_id": None}, "accelerator"),
)


def references(config: Config) -> dict[str, Outcome]:
    """Train what this combination can be compared with, or remember it. Collective."""
    dtype = PRECISIONS[config.precision].original
    which, how = (config.model, config.optimizer), (config.precision, config.strategy)
    made = {
        "plain": lambda: plain(*which, dtype),
        "DDP": lambda: ddp(*which, dtype),
        "FSDP1": lambda: torch_fsdp1(*which, *how, config.use_orig_params),
        "FSDP2": lambda: torch_fsdp2(*which, *how),
    }
    lacking = {name for gap in GAPS if gap.concerns(config) for name in gap.references}
    return {name: make() for name, make in made.items() if name not in lacking}


# ---------------------------------------------------------------- comparing


@dataclass
class Report:
    """What one rank found.

    Attributes:
        trained: Number of combinations.
        compared: Number of comparisons, per reference.
        wrong: One line per comparison that failed.
        gaps: Largest difference per precision and reference.
    """

    trained: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    gaps: dict[tuple[str, str], float] = field(default_factory=dict)


def compare_all(configs: Sequence[Config]) -> Report:
    """Train all combinations and compare each with its references. Collective."""
    report = Report()
    for config in configs:
        try:
            expected, found = references(config), sharded(config)
        except BaseException as error:
            error.add_note(f"while training {config}")
            raise
        report.trained += 1
        limit, dtype = PRECISIONS[config.precision].tolerance, PRECISIONS[config.precision].original
        initial = initial_weights(config.model, dtype)
        for name, reference in expected.items():
            where, gap = largest_gap(found, reference, initial, left_out(config, name))
            report.compared[name] += 1
            key = (config.precision, name)
            report.gaps[key] = max(gap, report.gaps.get(key, 0.0))
            if not gap <= limit:  # also if it is NaN
                report.wrong.append(f"{where} is {gap:.1e} off {name} (limit {limit:g}): {config}")
    return report


def left_out(config: Config, reference: str) -> str | None:
    """Return the prefix of weights not to compare: those that nothing uses.

    Flat parameters have one gradient for all: what is unused beside something that is used gets
    zeros, and AdamW lets it decay. In torch's first FSDP that is so too. There, with NO_SHARD and
    original parameters, a weight that nothing uses is no parameter any more after a step; and
    one rank means NO_SHARD.
    """
    copied = config.strategy == "NO_SHARD" or config.world_size == 1
    lost = copied and config.use_orig_params
    differs = lost if reference == "FSDP1" else not config.use_orig_params
    return MODELS[config.model].unused if differs else None


def largest_gap(
    found: Outcome, expected: Outcome, initial: dict[str, Tensor], without: str | None = None
) -> tuple[str, float]:
    """Return where two runs differ most, and by how much.

    Args:
        found: The run under test.
        expected: The reference.
        initial: The weights before training.
        without: Prefix of weights not to compare.

    Returns:
        What differs most, and its gap: as a part of the way that training went, or of a loss.
    """

    def compared(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return {n: w for n, w in weights.items() if without is None or not n.startswith(without)}

    mine, theirs = compared(found.weights), compared(expected.weights)
    different = {n for n in mine.keys() | theirs.keys() if shape(mine, n) != shape(theirs, n)}
    if different:
        return f"name, shape or dtype of {sorted(different)}", math.inf
    way = max(distance(theirs[name], initial[name]) for name in theirs)
    gaps = {f"weight {name}": distance(mine[name], theirs[name]) / way for name in mine}
    gaps["loss"] = distance(torch.tensor(found.losses), torch.tensor(expected.losses))
    worst = max(gaps, key=lambda name: math.inf if math.isnan(gaps[name]) else gaps[name])
    return worst, gaps[worst]


def distance(a: Tensor, b: Tensor) -> float:
    return (a.double() - b.double()).abs().max().item() if a.numel() else 0.0


@functools.cache
def initial_weights(model_name: str, dtype: torch.dtype) -> dict[str, Tensor]:
    return copies(MODELS[model_name].model(dtype).named_parameters())


def compare_bits(configs: Sequence[Config]) -> list[str]:
    """Train with accumulation inside `no_sync`, and return what is not DDP's to the bit."""
    wrong = []
    for config in configs:
        dtype = PRECISIONS[config.precision].original
        expected = ddp(config.model, config.optimizer, dtype, micro_batches=2)
        try:
            found = sharded(config, micro_batches=2)
        except BaseException as error:
            error.add_note(f"while training {config}")
            raise
        where, gap = largest_gap(found, expected, initial_weights(config.model, dtype))
        if gap != 0:
            wrong.append(f"{where} is {gap:.1e} off: {config}")
    return wrong


def shape(weights: dict[str, Tensor], name: str) -> tuple[torch.dtype, torch.Size] | None:
    return (weights[name].dtype, weights[name].shape) if name in weights else None
