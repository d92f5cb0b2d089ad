"""Units in groups of their own are averaged over those groups and over nobody else.

The reference is one plain model per rank whose gradients are averaged by hand, each over its
unit's group.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_ref import CustomPolicy
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref.process_groups import rank_lists
from tests.parity.training import OPTIMIZERS, full_weights
from tests.ranks import run_ranks
from tests.toy import Layer, mean_square, my_part, seeded, whole_batch

WORLD = 4
PLACES = {
    "pairs": {"layers.0": "set2"},
    "alone": {"layers.1": "self"},
    "all kinds": {"layers.0": "set2", "layers.1": "self", "layers.2": "mod2"},
}


def groups_of(word: str) -> list[dist.ProcessGroup]:
    """Make the groups of a word by hand, on all ranks alike."""
    return [dist.new_group(ranks) for ranks in rank_lists(word, WORLD)]


def mine(word: str, groups: list[dist.ProcessGroup]) -> tuple[list[int], dist.ProcessGroup]:
    lists = rank_lists(word, WORLD)
    index = next(i for i, ranks in enumerate(lists) if dist.get_rank() in ranks)
    return lists[index], groups[index]


def by_hand(words: dict[str, str], how: str) -> FSDP:
    model = seeded()
    for index in range(3):
        word = words.get(f"layers.{index}")
        group: object = word
        if word is not None and how != "word":
            ranks, live = mine(word, groups_of(word))
            group = ranks if how == "rank list" else live
        model.layers[index] = FSDP(model.layers[index], process_group=group)
    return FSDP(model)


def by_policy(words: dict[str, str], how: str) -> FSDP:
    model = seeded()
    chosen = {model.get_submodule(name): word for name, word in words.items()}

    def policy(module: nn.Module) -> bool | dict[str, str]:
        if module in chosen:
            return {"process_group": chosen[module]}
        return isinstance(module, Layer)

    return FSDP(model, auto_wrap_policy=CustomPolicy(policy))


def train(place: str, how: str) -> None:
    words = PLACES[place]
    model = by_policy(words, how) if how == "policy" else by_hand(words, how)
    plain = seeded()
    live = {name: mine(word, groups_of(word)) for name, word in words.items()}
    optimizers = [OPTIMIZERS["adamw"](m.parameters()) for m in (model, plain)]
    for _ in range(3):
        for optimizer, one in zip(optimizers, (model, plain), strict=True):
            optimizer.zero_grad()
            mean_square(one(my_part(whole_batch()))).backward()
            if one is plain:
                for name, parameter in plain.named_parameters():
                    ranks, group = live.get(name[: len("layers.0")], (range(WORLD), None))
                    dist.all_reduce(parameter.grad, group=group)
                    parameter.grad /= len(ranks)
            optimizer.step()
    found = full_weights(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-9, atol=1e-10, msg=name)
    for unit in FSDP.fsdp_modules(model)[1:]:
        word = words.get(unit._unit.name)
        ranks = list(range(WORLD)) if word is None else live[unit._unit.name][0]
        assert dist.get_process_group_ranks(unit.process_group) == ranks


@pytest.mark.parametrize("how", ["word", "rank list", "group", "policy"])
@pytest.mark.parametrize("place", PLACES)
def test_each_unit_is_averaged_over_its_own_group(place, how):
    run_ranks(WORLD, train, place, how)


def small_root() -> None:
    """The root itself in pairs: two independent models."""
    model, plain = FSDP(seeded(), process_group="set2"), seeded()
    _, group = mine("set2", groups_of("set2"))
    mean_square(model(my_part(whole_batch()))).backward()
    mean_square(plain(my_part(whole_batch()))).backward()
    flat = torch.cat([p.grad.flatten() for p in plain.parameters()])
    dist.all_reduce(flat, group=group)
    [flat_param] = model.parameters()
    pieces = [torch.empty_like(flat_param.grad) for _ in range(2)]
    dist.all_gather(pieces, flat_param.grad, group=group)
    torch.testing.assert_close(torch.cat(pieces)[: flat.numel()], flat / 2, rtol=1e-10, atol=1e-12)
    assert torch.equal(model.clip_grad_norm_(1e9), model.clip_grad_norm_(1e9))


def test_a_root_in_a_small_group_is_a_model_of_that_group():
    run_ranks(WORLD, small_root)
