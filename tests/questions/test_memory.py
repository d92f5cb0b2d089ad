"""What is in memory and what is sent: checkpointing, peaks, traffic, offload."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy, timeline
from tests.parity.training import full_gradients, full_weights
from tests.questions.claims import (
    loss,
    on_ranks,
)
from tests.toy import (
    WIDTH,
    Layer,
    Stack,
    assert_equal_gradients,
    assert_near,
    mean_square,
    my_part,
    nested,
    seeded,
    whole_batch,
)

# ---------------------------------------------------------------- activation checkpointing


def gathers_in_one_step(model: nn.Module) -> list[str]:
    with timeline() as seen:
        loss(model).backward()
    return seen.lines("all-gather")


# facebookresearch/fairscale#777, pytorch/pytorch#105635
@on_ranks(2)
def test_checkpointing_in_either_order_gathers_each_block_twice_and_changes_no_gradient():
    plain = seeded()
    loss(plain, whole=True).backward()
    for order in (lambda layer: checkpoint_wrapper(FSDP(layer)),
                  lambda layer: FSDP(checkpoint_wrapper(layer)), FSDP):  # fmt: skip
        model = seeded()
        for index, layer in enumerate(model.layers):
            model.layers[index] = order(layer)
        model = FSDP(model)
        gathers = gathers_in_one_step(model)
        assert len(gathers) == 2 * 3 + 1  # the blocks twice, the root once
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters()])
        assert_near(model.clip_grad_norm_(1e9), norm, "norm")


# pytorch/pytorch#153354
@on_ranks(2)
def test_a_policy_and_a_reference_forward_with_checkpointing_equal_plain_pytorch():
    def compare(policy: nn.Module, reference: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            aim = reference(x)
        chosen, rejected = policy(x), policy(-x)
        return mean_square(chosen - aim) - 0.5 * mean_square(rejected)

    plain, model = seeded(), seeded()
    other, reference = seeded(), nested(seeded())
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(FSDP(layer))
    model = FSDP(model)
    compare(plain, other, whole_batch()).backward()
    compare(model, reference, my_part(whole_batch())).backward()
    names = {name.replace("_checkpoint_wrapped_module.", ""): name for name in full_weights(model)}
    found = full_gradients(model)
    for name, parameter in plain.named_parameters():
        assert_near(found[names[name]], parameter.grad, name)


# facebookresearch/fairscale#758
@on_ranks(2)
def test_the_first_block_gets_its_gradient_under_a_checkpoint_without_reentry():
    plain, model = seeded(), nested(seeded())
    loss(plain, whole=True).backward()
    mean_square(checkpoint(model, my_part(whole_batch()), use_reentrant=False)).backward()
    assert_equal_gradients(model, plain)
    assert full_gradients(model)["layers.0.linear.weight"].abs().max() > 0


# facebookresearch/fairseq2#1032
@on_ranks(2)
def test_a_class_policy_looks_through_checkpoint_wrappers():
    model = seeded()
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Layer}))
    assert len(FSDP.fsdp_modules(model)) == 1 + 3


class Block(nn.Sequential):
    """Two layers, whose results in between a backward needs."""

    def __init__(self) -> None:
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        super().__init__(*layers)


def kept_after_forward(model: nn.Module) -> dict[str, int]:
    """Count which inputs and inner results of blocks are still in memory after a forward."""
    inputs, results = [], []
    for module in model.modules():
        if isinstance(module, Block):
            module.register_forward_pre_hook(lambda _, args: inputs.append(storage_of(args[0])))
            module[1].register_forward_hook(lambda _, args, y: results.append(storage_of(y)))
    value = loss(model)
    kept = {
        name: sum(not reference.expired() for reference in references)
        for name, references in (("inputs", inputs), ("results", results))
    }
    value.backward()
    return kept


def storage_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


# huggingface/accelerate#4172
@on_ranks(2)
def test_checkpointing_what_the_policy_matches_keeps_one_input_per_block_and_nothing_inside():
    def build() -> FSDP:
        torch.manual_seed(0)
        model = nn.Sequential(Block(), Block(), Block()).double()
        return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))

    plain, model = build(), build()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    assert sum(isinstance(module, CheckpointWrapper) for module in model.modules()) == 3
    assert kept_after_forward(plain) == {"inputs": 3, "results": 3}
    assert kept_after_forward(model) == {"inputs": 3, "results": 0}
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_near(found.grad, expected.grad, "gradient")


# ---------------------------------------------------------------- memory, traffic


# facebookresearch/fairscale#1050
@on_ranks(2)
def test_between_steps_a_rank_holds_its_share_of_each_unit():
    model = nested(seeded())
    assert [p.numel() for p in model.parameters()] == [6, 18, 18, 18]  # of 12, 35, 35, 35


# allenai/OLMo#762
@on_ranks(4)
def test_a_step_of_full_sharding_sends_half_as_much_again_as_without():
    sent = {}
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        model = FSDP(
            nn.Sequential(nn.Linear(8, 8, bias=False)),
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )
        with timeline() as seen:
            mean_square(model(torch.ones(2, 8))).backward()
        sent[strategy] = seen.bytes_sent("all-gather") + seen.bytes_sent("reduce-scatter")
    share = 64 * 4 * 3 // 4  # (W - 1) / W of the model
    assert sent == {"FULL_SHARD": 3 * share, "SHARD_GRAD_OP": 2 * share}


# pytorch/pytorch#104509
@on_ranks(2)
def test_never_more_than_the_root_and_two_layers_are_in_memory():
    for arguments in ({}, {"forward_prefetch": True}, {"limit_all_gathers": False}):
        policy = ModuleWrapPolicy({Layer})
        model = FSDP(seeded(lambda: Stack(depth=6)), auto_wrap_policy=policy, **arguments)
        with timeline() as seen:
            for _ in range(2):  # the first forward shows the order
                loss(model).backward()
        assert seen.peak_unsharded_bytes <= 8 * (12 + 2 * 36)


# discuss.pytorch.org/t/222103 (torch's fully_shard)
@on_ranks(4)
def test_fully_shard_with_a_number_keeps_a_larger_shard_after_the_forward_and_the_same_gradient():
    plain, model = (
        seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))) for _ in range(2)
    )
    mesh = init_device_mesh("cpu", (4,))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)
    shards = [p.to_local().numel() for p in model.parameters()]
    value = mean_square(model(my_part(whole_batch(width=8))))
    assert [p.to_local().numel() for p in model.parameters()] == [2 * numel for numel in shards]
    value.backward()
    mean_square(plain(whole_batch(width=8))).backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_near(found.grad.full_tensor(), expected.grad, "gradient")
