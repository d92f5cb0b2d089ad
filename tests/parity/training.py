"""Train one case in four ways and record the same things each time.

`plain` uses one process and the whole batch; `ddp`, `torch_fsdp1` and `sharded` run on ranks,
each with its part of the batch. All return a `Trace` with losses, gradients and weights under
the plain model's names, so that any two can be compared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from tests.models import CASES, Case, part

STEPS = 4
Gradients = dict[str, Tensor | None]


@dataclass
class Trace:
    """What a training run left behind.

    Attributes:
        losses: One per step; the mean over the ranks.
        gradients: One dictionary per step, by parameter name; ``None`` where there was none.
        weights: Parameters after the last step.
        buffers: Buffers after the last step, of this rank.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


# ---------------------------------------------------------------- wrapping


def as_one_unit(model: nn.Module, case: Case) -> FSDP:
    return FSDP(model)


def by_class(model: nn.Module, case: Case) -> FSDP:
    return FSDP(model, auto_wrap_policy=fsdp_ref.ModuleWrapPolicy(set(case.unit_classes)))


def by_size(model: nn.Module, case: Case) -> FSDP:
    policy = functools.partial(fsdp_ref.size_based_auto_wrap_policy, min_num_params=20)
    return FSDP(model, auto_wrap_policy=policy)


def by_hand(model: nn.Module, case: Case) -> FSDP:
    """Wrap inside a context, inner modules first, as a model's own constructor would."""
    with fsdp_ref.enable_wrap(wrapper_cls=FSDP):
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, case.unit_classes):
                    setattr(parent, name, fsdp_ref.wrap(child))
        return fsdp_ref.wrap(model)


WRAPPINGS: dict[str, Callable[[nn.Module, Case], FSDP]] = {
    "one unit": as_one_unit,
    "by class": by_class,
    "by size": by_size,
    "by hand": by_hand,
}


# ---------------------------------------------------------------- reading a sharded model


def plain_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")


def units(model: nn.Module) -> list[tuple[str, FSDP]]:
    """Return all units with the plain name of the module they wrap, outermost first."""
    named = [(plain_name(name + "."), m) for name, m in model.named_modules()]
    return [(name.removesuffix("."), module) for name, module in named if isinstance(module, FSDP)]


def flat_params(unit: FSDP) -> list[fsdp_ref.FlatParameter]:
    return unit._unit.flat_params


def gathered(flat_param: fsdp_ref.FlatParameter, shard: Tensor) -> Tensor:
    """Join the ranks' shards of something shaped like the flat parameter."""
    group = flat_param._group
    pieces = [torch.empty_like(shard) for _ in range(group.size)]
    dist.all_gather(pieces, shard.contiguous(), group=group.process_group)
    return torch.cat(pieces)


def full_gradients(model: FSDP) -> Gradients:
    """Gather every gradient under its plain name. Collective."""
    gradients: Gradients = {}
    for prefix, unit in units(model):
        for flat_param in flat_params(unit):
            grad = flat_param.grad
            full = None if grad is None else gathered(flat_param, grad.detach())
            original = flat_param._options.use_orig_params
            for index, slot in enumerate(flat_param._layout.slots):
                none = full is None or (original and index not in flat_param._given)
                piece = None if none else full[slot.offset : slot.stop].view(slot.shape)
                gradients[".".join(filter(None, (prefix, slot.name)))] = piece
    return gradients


def full_weights(model: FSDP) -> dict[str, Tensor]:
    """Copy every weight under its plain name. Collective."""
    with model.summon_full_params(writeback=False):
        return {
            plain_name(name): parameter.detach().clone()
            for name, parameter in model.named_parameters()
        }


# ---------------------------------------------------------------- the four ways


def copies(values: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {plain_name(name): value.detach().clone() for name, value in values}


def gradients_of(model: nn.Module) -> Gradients:
    return {
        plain_name(name): None if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def mean_over_ranks(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).item()


def plain(case_name: str, optimizer_name: str, dtype: torch.dtype) -> Trace:
    """Train in this process, on the whole batch."""
    case, trace = CASES[case_name], Trace()
    model = case.model(dtype)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for batch in case.batches(STEPS, dtype):
        optimizer.zero_grad()
        loss = case.loss(model(batch), batch)
        loss.backward()
        trace.losses.append(loss.item())
        trace.gradients.append(gradients_of(model))
        optimizer.step()
    trace.weights, trace.buffers = copies(model.named_parameters()), copies(model.named_buffers())
    return trace


def my_part(batch: Tensor) -> Tensor:
    return part(batch, dist.get_rank(), dist.get_world_size())


def ddp(case_name: str, optimizer_name: str, dtype: torch.dtype) -> Trace:
    """Train with DistributedDataParallel, on this rank's part of the batch."""
    case, trace = CASES[case_name], Trace()
    model = DistributedDataParallel(
        case.model(dtype), find_unused_parameters=case.unused is not None
    )
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for batch in case.batches(STEPS, dtype):
        optimizer.zero_grad()
        mine = my_part(batch)
        loss = case.loss(model(mine), mine)
        loss.backward()
        trace.losses.append(mean_over_ranks(loss))
        trace.gradients.append(gradients_of(model))
        optimizer.step()
    trace.weights, trace.buffers = copies(model.named_parameters()), copies(model.named_buffers())
    return trace


def sharded(case_name: str, optimizer_name: str, dtype: torch.dtype, wrapping: str) -> Trace:
    """Train with this package, on this rank's part of the batch."""
    case, trace = CASES[case_name], Trace()
    model = WRAPPINGS[wrapping](case.model(dtype), case)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    for batch in case.batches(STEPS, dtype):
        optimizer.zero_grad()
        mine = my_part(batch)
        loss = case.loss(model(mine), mine)
        loss.backward()
        trace.losses.append(mean_over_ranks(loss))
        trace.gradients.append(full_gradients(model))
        optimizer.step()
    trace.weights, trace.buffers = full_weights(model), copies(model.named_buffers())
    return trace


def torch_fsdp1(case_name: str, optimizer_name: str, dtype: torch.dtype, nested: bool) -> Trace:
    """Train with torch's own FSDP1, on this rank's part of the batch."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    case, trace = CASES[case_name], Trace()
    plain_model = case.model(dtype)
    frozen = any(not p.requires_grad for p in plain_model.parameters())
    model = FullyShardedDataParallel(
        plain_model,
        auto_wrap_policy=ModuleWrapPolicy(set(case.unit_classes)) if nested else None,
        device_id=torch.device("cpu"),  # without it, torch's class asks for an accelerator
        use_orig_params=frozen,  # the flat form refuses frozen parameters beside trainable ones
    )
    # In the other form frozen ones get a gradient of zeros: AdamW would let them decay.
    optimizer = OPTIMIZERS[optimizer_name](p for p in model.parameters() if p.requires_grad)
    for batch in case.batches(STEPS, dtype):
        optimizer.zero_grad()
        mine = my_part(batch)
        loss = case.loss(model(mine), mine)
        loss.backward()
        trace.losses.append(mean_over_ranks(loss))
        # With use_orig_params torch aborts when one rank's shard is nothing but padding.
        trace.gradients.append({} if frozen else torch_fsdp1_gradients(model))
        optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        trace.weights = copies(model.named_parameters())
    trace.buffers = copies(model.named_buffers())
    return trace


def torch_fsdp1_gradients(model: nn.Module) -> Gradients:
    """Gather the gradients of torch's class, under plain names. Collective."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    gradients: Gradients = {}
    for name, unit in model.named_modules():
        if not isinstance(unit, FullyShardedDataParallel) or unit._handle is None:
            continue
        flat, prefix = unit._handle.flat_param, plain_name(name + ".").lstrip(".")
        full = flat.grad
        if full is not None and unit._handle.uses_sharded_strategy:
            pieces = [torch.empty_like(full) for _ in range(dist.get_world_size())]
            dist.all_gather(pieces, full.detach())
            full = torch.cat(pieces)
        offset = 0
        for fqn, numel, shape in zip(flat._fqns, flat._numels, flat._shapes, strict=True):
            piece = None if full is None else full[offset : offset + numel].view(shape).clone()
            gradients[prefix + fqn] = piece
            offset += numel
    return gradients


# ---------------------------------------------------------------- comparing


def assert_same(
    found: Trace,
    expected: Trace,
    *,
    tolerance: float,
    without: str | None = None,
    buffers: bool = False,
) -> None:
    """Compare losses, gradients and weights; ``tolerance`` 0 asks for equal bits.

    Args:
        found: The run under test.
        expected: The reference.
        tolerance: Largest difference, relative to the largest element of each tensor.
        without: Prefix of parameters to leave out, because nothing uses them.
        buffers: Compare the buffers, too.
    """
    assert len(found.losses) == len(expected.losses) == STEPS
    close(torch.tensor(found.losses), torch.tensor(expected.losses), tolerance, "losses")
    pairs = list(zip(found.gradients, expected.gradients, strict=True))
    pairs.append((found.weights, expected.weights))
    if buffers:
        pairs.append((found.buffers, expected.buffers))
    for index, (mine, theirs) in enumerate(pairs):
        names = {name for name in theirs if without is None or not name.startswith(without)}
        missing = names - set(mine)
        assert not missing, f"entry {index} lacks {sorted(missing)}"
        for name in sorted(names):
            label = f"gradient of {name} in step {index}" if index < STEPS else name
            a, b = mine[name], theirs[name]
            if b is None:
                assert a is None, f"{label}: expected None, found a gradient"
                continue
            assert a is not None, f"{label}: expected a gradient, found None"
            close(a, b, tolerance, label)


def close(found: Tensor, expected: Tensor, tolerance: float, label: str) -> None:
    assert found.dtype == expected.dtype, f"{label}: {found.dtype} is not {expected.dtype}"
    assert found.shape == expected.shape, f"{label}: {found.shape} is not {expected.shape}"
    if tolerance == 0:
        assert torch.equal(found, expected), f"{label}: bits differ by {_gap(found, expected)}"
    else:
        limit = tolerance * max(1.0, _largest(expected))
        assert _gap(found, expected) <= limit, f"{label}: differs by {_gap(found, expected)}"


def _gap(a: Tensor, b: Tensor) -> float:
    return _largest(a.double() - b.double())


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0
