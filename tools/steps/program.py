"""Trains a small model for one step in several ways on four ranks, and writes down what happened.

    torchrun --standalone --nproc-per-node 4 program.py OUTPUT.json

The prebuild runs it. The result holds no clock: what happened is kept in its order, which is the
same in every run.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import FullyShardedDataParallel, timeline, unit_tree

WIDTH = 64


class Model(nn.Module):
    """An embedding and a head, which stay with the root, around three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, WIDTH, bias=False)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 16, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Run the layers in their order."""
        hidden = self.embed(batch)
        for layer in (self.first, self.experts, self.last):
            hidden = torch.relu(layer(hidden))
        return self.head(hidden)


PAIRS = ("set2", "mod2")
WAYS: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": "SHARD_GRAD_OP"},
    "HYBRID_SHARD": {"sharding_strategy": "HYBRID_SHARD", "process_group": PAIRS},
    "no_sync": {},
    "cpu_offload": {"cpu_offload": True},
    "experts 'self'": {},
}


def build(way: str) -> FullyShardedDataParallel:
    """Wrap each layer, then the model."""
    torch.manual_seed(0)
    model, options = Model(), WAYS[way]
    for name in ("first", "experts", "last"):
        own = dict(options)
        if way == "experts 'self'" and name == "experts":
            own["process_group"] = "self"
        setattr(model, name, FullyShardedDataParallel(getattr(model, name), **own))
    return FullyShardedDataParallel(model, **options)


class Marks:
    """Moments that no unit reports: where the program is."""

    def __init__(self) -> None:
        self.found: list[tuple[int, str]] = []

    def __call__(self, name: str) -> None:
        """Note that this begins now."""
        self.found.append((perf_counter_ns(), name))


def train(way: str) -> dict[str, Any]:
    """Train one step of a model that has trained one before; return what this rank recorded."""
    model = build(way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(4, 16) + dist.get_rank()
    mark = Marks()

    def once(*, synchronize: bool) -> None:
        with ExitStack() as stack:
            if not synchronize:
                stack.enter_context(model.no_sync())
            mark("forward" if synchronize else "forward inside no_sync")
            loss = model(batch).square().mean()
            mark("backward" if synchronize else "backward inside no_sync")
            loss.backward()

    once(synchronize=True)
    optimizer.zero_grad()
    mark.found.clear()
    with timeline() as recorded:
        if way == "no_sync":
            once(synchronize=False)
        once(synchronize=True)
        mark("optimizer step")
        optimizer.step()
        mark("end")
    return written_down(model, recorded, mark)


def written_down(model: nn.Module, recorded: Any, mark: Marks) -> dict[str, Any]:
    """Put events, ends of waits and marks into one order."""
    happened: list[tuple[int, dict[str, Any]]] = []
    for event in recorded.events:
        agreement = event.dtype is not None and not event.dtype.is_floating_point
        entry = {
            "what": "agree" if agreement else event.operation,
            "unit": event.unit,
            "sent": event.bytes_on_wire,
            "group": list(event.group),
            "live": event.live_unsharded_bytes,
        }
        happened.append((event.time_ns, entry))
    for wait in recorded.waits:
        entry = {"what": f"{wait.operation} done", "unit": wait.unit}
        happened.append((wait.stop_ns, entry))
    happened += [(when, {"what": name, "unit": ""}) for when, name in mark.found]
    happened.sort(key=lambda pair: pair[0])
    units = [
        {"name": unit.name, "rest": unit.bytes_at_rest, "whole": unit.bytes_unsharded,
         "ranks": list(unit.ranks)}
        for unit in unit_tree(model)
    ]  # fmt: skip
    return {"units": units, "ticks": [entry for _, entry in happened]}


def main() -> None:
    """Record every way, and write all ranks' recordings on rank 0."""
    dist.init_process_group()
    recorded = {way: train(way) for way in WAYS}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, recorded)
    if dist.get_rank() == 0:
        ways = {way: [one[way] for one in everyone] for way in WAYS}
        Path(sys.argv[1]).write_text(json.dumps(ways), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
