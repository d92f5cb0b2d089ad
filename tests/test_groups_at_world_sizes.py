"""One model with a unit in every group that its world has, beside a simulation in one process.

The simulation holds one plain model per rank. After each backward it averages each layer's
gradients over the ranks that the layer's groups connect, and nothing else. What the sharded model
does has to be the same on every rank: norms, gradients, weights, state dicts, edits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, process_groups
from tests.models import part
from tests.parity.training import adamw
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import Layer, Stack, mean_square, whole_batch

STEPS = 2
NORMS = (1.0, 2.0, math.inf)


@dataclass(frozen=True)
class Place:
    """One layer's arguments, and what they mean in words that the simulation understands.

    Attributes:
        process_group: The argument.
        sharding_strategy: The argument.
    """

    process_group: Any
    sharding_strategy: str = "FULL_SHARD"

    def families(self, world_size: int, per_host: int) -> list[list[int]]:
        """Return the ranks that hold one version of the weights, for each version."""
        if not isinstance(self.process_group, tuple):
            return process_groups.rank_lists(self.process_group, world_size, per_host)
        cut, copied = (
            process_groups.rank_lists(one, world_size, per_host) for one in self.process_group
        )
        found = {
            frozenset(
                one
                for rank in next(ranks for ranks in cut if first in ranks)
                for one in next(ranks for ranks in copied if rank in ranks)
            )
            for first in range(world_size)
        }
        return sorted(map(sorted, found))


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def ranks_per_host(world_size: int) -> int:
    """Return the largest number of equal hosts' ranks, so that there are several if possible."""
    return ([divisor for divisor in divisors(world_size) if divisor < world_size] or [1])[-1]


def places(world_size: int) -> list[Place]:
    """Every word that divides this world, lists of unequal length, copies, and grids."""
    words = [f"{kind}{number}" for number in divisors(world_size) for kind in ("set", "MOD")]
    found = [Place(word) for word in ("self", *words, "Node", "local_rank_across_nodes")]
    first = max(1, world_size // 2 - 1)
    uneven = [list(range(first)), list(range(first, world_size))]
    found.append(Place([ranks[::-1] for ranks in uneven if ranks]))
    found.append(Place([ranks for ranks in uneven if ranks], "NO_SHARD"))
    for number in divisors(world_size):
        found.append(Place(f"mod{number}", "NO_SHARD"))
        found.append(Place(f"set{number}", "SHARD_GRAD_OP"))
        found.append(Place((f"set{number}", f"mod{number}"), "HYBRID_SHARD"))
        if world_size % (2 * number) == 0:  # two grids side by side
            pair = f"set{number}", f"mod{2 * number}"
            found.append(Place(pair, "_HYBRID_SHARD_ZERO2"))
    return found


# ---------------------------------------------------------------- one process that simulates


def plain_model(families: list[list[list[int]]], rank: int) -> Stack:
    """Build what a rank starts with: each version of a layer has weights of its own."""
    torch.manual_seed(0)
    model = Stack(depth=0)
    for index, of_layer in enumerate(families):
        version = next(at for at, ranks in enumerate(of_layer) if rank in ranks)
        torch.manual_seed(1000 * index + version)
        model.layers.append(Layer())
    return model.double()


class Simulation:
    """One plain model and optimizer per rank, all in this process."""

    def __init__(self, layers: list[Place], world_size: int, per_host: int) -> None:
        self.families = [place.families(world_size, per_host) for place in layers]
        self.ranks = range(world_size)
        self.models = [plain_model(self.families, rank) for rank in self.ranks]
        self.optimizers = [adamw(model.parameters()) for model in self.models]

    def backward(self) -> None:
        batch = whole_batch()
        for rank, model in enumerate(self.models):
            mean_square(model(part(batch, rank, len(self.ranks)))).backward()
        for parameters in self.versions():
            mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
            for parameter in parameters:
                parameter.grad.copy_(mean)

    def versions(self) -> Iterator[list[nn.Parameter]]:
        """Yield the parameters that are equal: one per rank of each family."""
        named = [dict(model.named_parameters()) for model in self.models]
        for name in named[0]:
            families = [list(self.ranks)]
            if name.startswith("layers."):
                families = self.families[int(name.split(".")[1])]
            for ranks in families:
                yield [named[rank][name] for rank in ranks]

    def all_versions(self) -> dict[str, Tensor]:
        """Return all weights under the names that `replicas="all"` gives them."""
        found = {}
        for name in self.models[0].state_dict():
            families = self.families[int(name.split(".")[1])] if name[:3] == "lay" else [[0]]
            for ranks in families:
                own = f"{name}@rank{ranks[0]}" if len(families) > 1 else name
                found[own] = self.models[ranks[0]].state_dict()[name]
        return found

    def norm(self, norm_type: float) -> float:
        """Return the norm over all versions, each element of each counted once."""
        once = [parameters[0].grad for parameters in self.versions()]
        return nn.utils.get_total_norm(once, norm_type).item()

    def step(self, max_norm: float) -> list[float]:
        """Do one step; return the norms."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward()
        norms = [self.norm(norm_type) for norm_type in NORMS]
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            for parameter in model.parameters():
                parameter.grad.mul_(min(1.0, max_norm / (norms[1] + 1e-6)))
            optimizer.step()
        return norms


# ---------------------------------------------------------------- a rank


def sharded_model(layers: list[Place], per_host: int, options: dict[str, Any]) -> FSDP:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = plain_model([place.families(size, per_host) for place in layers], rank)
    for index, place in enumerate(layers):
        model.layers[index] = FSDP(
            model.layers[index], place.process_group, place.sharding_strategy, **options
        )
    return FSDP(model, **options)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=1e-9,
            atol=1e-11,
            msg=lambda text, n=name: f"{what} {n}: {text}",
        )


def train(world_size: int, max_norm: float, options: dict[str, Any]) -> list[list[float]]:
    """Train beside the simulation; compare everything that this rank can see."""
    layers, per_host, rank = places(world_size), ranks_per_host(world_size), dist.get_rank()
    simulation = Simulation(layers, world_size, per_host)
    model = sharded_model(layers, per_host, options)
    optimizer, norms = adamw(model.parameters()), []
    mine = simulation.models[rank]
    for _ in range(STEPS):
        optimizer.zero_grad()
        mean_square(model(part(whole_batch(), rank, world_size))).backward()
        norms.append([model.clip_grad_norm_(math.inf, p).item() for p in NORMS])
        torch.testing.assert_close(norms[-1], simulation.step(max_norm), rtol=1e-9, atol=0)
        model.clip_grad_norm_(max_norm)
        with model.summon_full_params(with_grads=True, writeback=False):
            gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        assert_same(gradients, {name: p.grad for name, p in mine.named_parameters()}, "gradient")
        optimizer.step()
    assert_same(weights(model, "mine"), mine.state_dict(), "weight")
    assert_same(weights(model, "all"), simulation.all_versions(), "version")
    edit_and_load(model, mine, simulation.families)
    return norms


def weights(model: FSDP, replicas: str) -> dict[str, Tensor]:
    with FSDP.state_dict_type(model, "full", replicas=replicas):
        return model.state_dict()


def edit_and_load(model: FSDP, mine: Stack, families: list[list[list[int]]]) -> None:
    """Write values that only a family shares; then load what the simulation has."""
    with model.summon_full_params():
        assert_same({n: p.detach() for n, p in model.named_parameters()}, mine.state_dict(), "full")
        for index, of_layer in enumerate(families):
            family = next(ranks for ranks in of_layer if dist.get_rank() in ranks)
            nn.init.constant_(model.layers[index].scale, float(family[0]))
    edited = weights(model, "mine")
    for index, of_layer in enumerate(families):
        family = next(ranks for ranks in of_layer if dist.get_rank() in ranks)
        assert (edited[f"layers.{index}.scale"] == family[0]).all()
    model.load_state_dict(mine.state_dict())
    assert_same(weights(model, "mine"), mine.state_dict(), "loaded")
    if any(len(of_layer) > 1 for of_layer in families):
        with provokes(FSDP.state_dict, errors.ReplicasDifferError):
            model.state_dict()
    else:
        assert_same(model.state_dict(), mine.state_dict(), "loaded")


def check_world(world_size: int, **options: Any) -> None:
    host = {"LOCAL_WORLD_SIZE": str(ranks_per_host(world_size))}
    # Many processes on a few cores: what a machine needs for one step, it needs for each rank.
    limits = {"timeout": 60 + 15.0 * world_size, "dist_timeout": 20 + 5.0 * world_size}
    norms = run_ranks(world_size, train, world_size, 0.05, options, env=host, **limits)
    assert all(of_rank == norms[0] for of_rank in norms), "ranks got different norms"


@pytest.mark.parametrize("world_size", range(1, 9))
def test_every_group_of_a_world_trains_like_its_simulation_in_one_process(world_size):
    check_world(world_size)


@pytest.mark.parametrize(
    "options", [{"use_orig_params": True}, {"cpu_offload": True, "backward_prefetch": None}]
)
def test_so_it_does_with_other_options(options):
    check_world(4, **options)


@pytest.mark.full
def test_every_group_of_sixteen_ranks_trains_like_its_simulation_in_one_process():
    check_world(16)


def test_the_simulation_is_plain_training_where_everybody_shares_everything():
    """With one version of each layer and equal parts, the mean over ranks is the whole batch."""
    simulation = Simulation([Place("mod1"), Place(("set2", "mod2"))], world_size=4, per_host=2)
    plain = plain_model([[[0]], [[0]]], rank=0)
    optimizer = adamw(plain.parameters())
    for _ in range(STEPS):
        optimizer.zero_grad()
        mean_square(plain(whole_batch())).backward()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        assert simulation.step(0.05)[1] == pytest.approx(norm.item(), rel=1e-12)
        optimizer.step()
    for model in simulation.models:
        assert_same(model.state_dict(), plain.state_dict(), "weight")


def test_versions_of_weights_in_words():
    assert Place("set2").families(4, 2) == [[0, 1], [2, 3]]
    assert Place(("set2", "mod2")).families(4, 2) == [[0, 1, 2, 3]]
    assert Place(("set1", "mod2")).families(4, 2) == [[0, 2], [1, 3]]
    assert Place(("set2", "mod4")).families(8, 4) == [[0, 1, 4, 5], [2, 3, 6, 7]]


# ---------------------------------------------------------------- how versions start


def one_version_starts_differently(index: int) -> str:
    """Layers may differ between families, as in `train`, and not inside one."""
    layers = [Place("self"), Place("set2"), Place("mod2", "NO_SHARD"), Place(("set2", "mod2"))]
    layers[3] = Place(("set2", "mod2"), "HYBRID_SHARD")
    rank = dist.get_rank()
    model = plain_model([place.families(4, 2) for place in layers], rank)
    if rank == 3:
        with torch.no_grad():
            model.layers[index].linear.weight += 1
    for at, place in enumerate(layers):
        model.layers[at] = FSDP(model.layers[at], place.process_group, place.sharding_strategy)
    model = FSDP(model)
    if index == 0:
        model(whole_batch())  # nobody shares it
        return ""
    with provokes(FSDP.forward, errors.InitialWeightsDifferError) as caught:
        model(whole_batch())
    return caught.message.split("] ", 1)[1]


@pytest.mark.parametrize(
    ("index", "ranks"),
    [(0, ""), (1, "ranks 2, 3"), (2, "ranks 1, 3"), (3, "ranks 2, 3")],
    ids=["self", "set2", "copies", "hybrid"],
)
def test_who_shares_weights_starts_with_equal_ones_and_others_need_not(index, ranks):
    messages = set(run_ranks(4, one_version_starts_differently, index))
    if index == 0:
        assert messages == {""}
    else:
        (message,) = messages
        assert f"FSDP206 unit 'layers.{index}': expected the same initial weights on {ranks}" in (
            message
        )
        assert "'linear.weight' with other values on rank 3" in message
