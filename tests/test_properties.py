"""Random trees of modules, cut into random units, train like the same tree left whole.

Hypothesis draws trees as data (`Tree`), so that a failure prints one that can be pasted here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref.flat_gradient import FlatGradient
from tests.models import BATCH, part
from tests.parity.training import full_gradients, full_weights, gradients_of, mean_over_ranks
from tests.ranks import run_ranks

STEPS = 3
DTYPES = {"float32": torch.float32, "float64": torch.float64}

# ---------------------------------------------------------------- trees


@dataclass(frozen=True)
class Tree:
    """One module and what is inside it. It takes `width` numbers and returns as many.

    Attributes:
        kind: One of `LEAVES` or `BRANCHES`.
        size: What the kind makes of it: hidden width, kernel, number of elements.
        dtype: Of its own parameters.
        trained: Whether its first parameter, and whether its others, require a gradient.
        unit: Whether the policy selects it.
        children: What is inside a branch.
    """

    kind: str
    size: int = 1
    dtype: str = "float64"
    trained: tuple[bool, bool] = (True, True)
    unit: bool = False
    children: tuple[Tree, ...] = ()


class Leaf(nn.Module, ABC):
    """Casts its input to its own dtype, and its output back, so that dtypes can mix."""

    def forward(self, x: Tensor) -> Tensor:
        own = next((p.dtype for p in self.parameters()), x.dtype)
        return self.compute(x.to(own)).to(x.dtype)

    @abstractmethod
    def compute(self, x: Tensor) -> Tensor: ...


class Mixing(Leaf):
    """Two linear layers through a hidden width."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, size), nn.Linear(size, width, bias=size % 2 == 0)

    def compute(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Normed(Leaf):
    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        # A large eps: where all numbers are nearly equal, the usual one magnifies rounding.
        self.norm = nn.LayerNorm(width, eps=0.1)

    def compute(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Convolved(Leaf):
    """The width as a signal with one channel."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(1, size, kernel_size=3, padding=1)

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(self.convolution(x[:, None])).mean(1)


class Shifted(Leaf):
    """Parameters of the module itself, of three dimensions, of no elements, and of one."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.single = nn.Parameter(torch.tensor([0.9]))
        self.nothing = nn.Parameter(torch.empty(size, 0))
        self.cube = nn.Parameter(torch.randn(size, 1, width) / 4)

    def compute(self, x: Tensor) -> Tensor:
        return x * self.single + self.cube.sum((0, 1)) + self.nothing.sum()


class Transposed(Leaf):
    """A parameter that is not contiguous."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(size, width) / 4).t())

    def compute(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ self.weight).sum(1, keepdim=True)


class Empty(Leaf):
    """Nothing but parameters without elements."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, size))

    def compute(self, x: Tensor) -> Tensor:
        return x + self.nothing.sum()


class Plain(Leaf):
    """No parameters at all."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()

    def compute(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Chain(nn.Sequential):
    """Children in a row."""


class Residual(Chain):
    """Children in a row, with a shortcut, and a parameter of its own beside them."""

    def __init__(self, *children: nn.Module) -> None:
        super().__init__(*children)
        self.register_parameter("strength", nn.Parameter(torch.full((1, 1), 0.5)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.strength.to(x.dtype) * super().forward(x)


class Twice(Chain):
    """Children in a row, called two times."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.tanh(super().forward(x)))


LEAVES = {
    kind.__name__: kind for kind in (Mixing, Normed, Convolved, Shifted, Transposed, Empty, Plain)
}
BRANCHES = {kind.__name__: kind for kind in (Chain, Residual, Twice)}


def build(tree: Tree, width: int) -> nn.Module:
    if tree.kind in LEAVES:
        module = LEAVES[tree.kind](width, tree.size)
    else:
        module = BRANCHES[tree.kind](*(build(child, width) for child in tree.children))
    own = [p for n, p in module.named_parameters() if tree.kind in LEAVES or "." not in n]
    for number, parameter in enumerate(own):
        parameter.data = parameter.data.to(DTYPES[tree.dtype])
        parameter.requires_grad_(tree.trained[min(number, 1)])
    module.is_unit = tree.unit
    return module


# ---------------------------------------------------------------- cases


@dataclass(frozen=True)
class Run:
    """A tree, how it is wrapped and how it is trained.

    Attributes:
        tree: The model; a small trainable head comes after it.
        width: How many numbers a sample has.
        strategy: The sharding strategy.
        use_orig_params: Whether modules keep their own parameters.
        backward_prefetch: When the next unit is gathered.
        forward_prefetch: Whether it is gathered ahead in a forward.
        optimizer: `"sgd"` or `"adamw"`.
        micro_batches: Backwards per step, all but the last inside `no_sync`.
        clip: Largest norm of the gradient, or `None`.
    """

    tree: Tree
    width: int = 3
    strategy: str = "FULL_SHARD"
    use_orig_params: bool = False
    backward_prefetch: str | None = "BACKWARD_PRE"
    forward_prefetch: bool = False
    optimizer: str = "sgd"
    micro_batches: int = 1
    clip: float | None = None

    def model(self) -> nn.Module:
        """Build it, equal everywhere."""
        torch.manual_seed(0)
        head = nn.Linear(self.width, 1, dtype=torch.float64)
        return nn.Sequential(build(self.tree, self.width), head)

    def batch(self, number: int) -> Tensor:
        generator = torch.Generator().manual_seed(number)
        return torch.randn(BATCH, self.width, generator=generator, dtype=torch.float64)

    @property
    def tolerance(self) -> float:
        return 1e-4 if "float32" in repr(self.tree) else 1e-9


def shared() -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(
        {
            "size": st.integers(1, 5),
            "dtype": st.sampled_from(["float64", "float32"]),
            "trained": st.sampled_from(
                [(True, True), (True, False), (False, True), (False, False)]
            ),
            "unit": st.sampled_from([True, True, False]),
        }
    )


leaves = st.builds(lambda kind, more: Tree(kind, **more), st.sampled_from(list(LEAVES)), shared())


def branches(children: st.SearchStrategy[Tree], least: int = 1) -> st.SearchStrategy[Tree]:
    return st.builds(
        lambda kind, more, inside: Tree(kind, **more, children=tuple(inside)),
        st.sampled_from(list(BRANCHES)),
        shared(),
        st.lists(children, min_size=least, max_size=3),
    )


trees = branches(st.recursive(leaves, branches, max_leaves=5), least=2)
runs = st.builds(
    Run,
    tree=trees,
    width=st.integers(2, 5),
    strategy=st.sampled_from(
        ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
    ),
    use_orig_params=st.booleans(),
    backward_prefetch=st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST", None]),
    forward_prefetch=st.booleans(),
    optimizer=st.sampled_from(["sgd", "adamw"]),
    micro_batches=st.integers(1, 2),
    clip=st.sampled_from([None, 0.05]),
)

# ---------------------------------------------------------------- training


def make_optimizer(run: Run, model: nn.Module) -> torch.optim.Optimizer:
    if run.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # The usual eps would magnify rounding where the true gradient is zero.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)


def selected(module: nn.Module) -> bool:
    return getattr(module, "is_unit", False)


def in_units(run: Run) -> FSDP:
    hybrid = {1: ("self", "self"), 2: ("self", "set2"), 3: ("set3", "self"), 4: ("set2", "mod2")}
    return FSDP(
        run.model(),
        process_group=hybrid[dist.get_world_size()] if "HYBRID" in run.strategy else None,
        sharding_strategy=run.strategy,
        auto_wrap_policy=selected if any(map(selected, run.model().modules())) else None,
        backward_prefetch=run.backward_prefetch,
        forward_prefetch=run.forward_prefetch,
        use_orig_params=run.use_orig_params,
    )


def train(run: Run) -> Iterator[str]:
    """Train the tree whole and in units, and yield what differs. Collective."""
    whole, model = run.model(), in_units(run)
    frozen = {name for name, p in whole.named_parameters() if not p.requires_grad}
    optimizers = make_optimizer(run, whole), make_optimizer(run, model)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number in range(run.micro_batches):
            batch = run.batch(step * run.micro_batches + number)
            loss = whole(batch).square().mean()
            loss.backward()
            mine = part(batch, dist.get_rank(), dist.get_world_size())
            if number + 1 < run.micro_batches:
                with model.no_sync():
                    my_loss = model(mine).square().mean()
                    my_loss.backward()
            else:
                my_loss = model(mine).square().mean()
                my_loss.backward()
            yield from different(run, f"loss {step}", mean_over_ranks(my_loss), loss.item())
        found = full_gradients(model)
        for name, gradient in gradients_of(whole).items():
            where = f"gradient of {name} in step {step}"
            if gradient is None or found[name] is None:
                if not (gradient is None and found[name] is None and name in frozen):
                    yield f"{where}: {found[name]} is not {gradient}"
            else:
                yield from different(run, where, found[name], gradient)
        if run.clip is not None:
            norm = nn.utils.clip_grad_norm_(whole.parameters(), run.clip)
            yield from different(run, f"norm {step}", model.clip_grad_norm_(run.clip), norm)
        for optimizer in optimizers:
            optimizer.step()
    weights, exported = full_weights(model), model.state_dict()
    for name, parameter in whole.named_parameters():
        if weights[name].dtype != parameter.dtype:
            yield f"{name}: {weights[name].dtype} is not {parameter.dtype}"
        yield from different(run, name, weights[name], parameter.detach())
        yield from different(run, f"exported {name}", exported[name], parameter.detach())


def different(run: Run, where: str, found: Tensor | float, expected: Tensor | float) -> list[str]:
    """Return what to say about two numbers or tensors; nothing if they are equal enough."""
    if isinstance(found, Tensor) and isinstance(expected, Tensor) and found.shape != expected.shape:
        return [f"{where}: {tuple(found.shape)} is not {tuple(expected.shape)}"]
    a, b = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    if not a.numel():
        return []
    gap, limit = (a - b).abs().max().item(), run.tolerance * max(1.0, b.abs().max().item())
    return [] if gap <= limit else [f"{where}: differs by {gap:.1e}"]  # a NaN differs


def train_all(runs: list[Run]) -> list[str]:
    """Train one after the other; a line for each that went wrong, with what reproduces it."""
    wrong = []
    for run in runs:
        try:
            differences = list(train(run))
        except BaseException as error:
            error.add_note(f"reproduce with: {run}")
            raise
        if differences:
            wrong.append(f"{'; '.join(differences[:3])}\nreproduce with: {run}")
    return wrong


# ---------------------------------------------------------------- the property


def assert_trains_like_the_whole(world_size: int, drawn: list[Run]) -> None:
    for wrong in run_ranks(world_size, train_all, drawn, timeout=120.0):
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_random_tree_in_random_units_trains_like_the_whole(world_size, pytestconfig):
    full = pytestconfig.getoption("full")

    @settings(
        max_examples=80 if full else 5,  # each is one set of ranks, and trains several trees
        phases=[Phase.generate, *([Phase.shrink] if full else [])],
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(runs, min_size=6, max_size=10))
    def check(drawn):
        assert_trains_like_the_whole(world_size, drawn)

    check()


def train_wrongly(runs: list[Run]) -> list[str]:
    """Train with every reduced gradient scaled by a factor."""
    accumulate = FlatGradient.accumulate
    FlatGradient.accumulate = lambda self, shard: accumulate(self, shard * 1.001)
    return train_all(runs)


def test_a_wrong_factor_would_be_noticed_and_the_message_reproduces_the_tree():
    inside = (Tree("Normed", unit=True), Tree("Residual", children=(Tree("Shifted", size=2),)))
    drawn = [Run(Tree("Chain", children=inside)), Run(Tree("Mixing", dtype="float32"), clip=None)]
    assert run_ranks(2, train_all, drawn) == [[], []]
    for wrong in run_ranks(2, train_wrongly, drawn):
        assert [eval(line.split("reproduce with: ")[1]) for line in wrong] == drawn


def test_every_kind_of_module_is_drawn_and_trees_have_several_units():
    """What the property is worth depends on what is drawn."""
    drawn: list[Run] = []

    @settings(max_examples=20, derandomize=True, database=None, deadline=None)
    @given(st.lists(runs, min_size=6, max_size=10))
    def look(some):
        drawn.extend(some)

    look()
    nodes = [tree for run in drawn for tree in everything_in(run.tree)]
    assert {tree.kind for tree in nodes} == set(LEAVES) | set(BRANCHES)
    assert {tree.dtype for tree in nodes} == set(DTYPES)
    assert len({tree.trained for tree in nodes}) == 4
    several = [run for run in drawn if sum(tree.unit for tree in everything_in(run.tree)) > 1]
    assert len(several) > len(drawn) / 2


def everything_in(tree: Tree) -> Iterator[Tree]:
    yield tree
    for child in tree.children:
        yield from everything_in(child)
