"""What people ask about FSDP in public, and the right answer, on ranks beside plain PyTorch.

Each test is named after what it claims; the comment above it names the report.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.checkpoint import checkpoint

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy, auto_wrap, enable_wrap, errors, process_groups, timeline
from tests.parity.training import full_gradients, full_weights
from tests.ranks import run_ranks
from tests.toy import (
    WIDTH,
    Layer,
    Stack,
    assert_equal_gradients,
    assert_equal_weights,
    assert_near,
    mean_square,
    my_part,
    nested,
    one_unit,
    seeded,
    whole_batch,
)

CLAIMS: dict[str, Callable[[], None]] = {}


def on_ranks(world_size: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Make a function that runs on ranks a test."""

    def claim(function: Callable[[], None]) -> Callable[[], None]:
        CLAIMS[function.__name__] = function

        def test() -> None:
            run_ranks(world_size, check, function.__name__)

        test.__name__ = function.__name__
        return test

    return claim


def check(name: str) -> None:
    CLAIMS[name]()


def loss(model: nn.Module, *, whole: bool = False) -> Tensor:
    batch = whole_batch()
    return mean_square(model(batch if whole else my_part(batch)))


def backward_beside(plain: nn.Module, model: nn.Module) -> None:
    loss(plain, whole=True).backward()
    loss(model).backward()


def train(optimizers: tuple[type, dict], plain: nn.Module, model: nn.Module, steps=3) -> None:
    """Train both with one kind of optimizer, on the parameters that are trainable."""
    kind, arguments = optimizers
    one, other = (
        kind([p for p in m.parameters() if p.requires_grad], **arguments) for m in (plain, model)
    )
    for _ in range(steps):
        one.zero_grad()
        other.zero_grad()
        backward_beside(plain, model)
        one.step()
        other.step()


SGD = (torch.optim.SGD, {"lr": 0.1})
ADAMW = (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1})


def numel_of(unit: FSDP) -> int:
    return sum(p._layout.total_numel for p in unit.parameters(recurse=False))


def numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


# ---------------------------------------------------------------- wrapping


# pytorch/pytorch#113794
@on_ranks(2)
def test_a_list_of_modules_is_refused_by_name_and_its_elements_can_be_wrapped():
    plain, model = seeded(), seeded()
    with pytest.raises(errors.ContainerWithoutForwardError, match="ModuleList"):
        FSDP(model.layers)
    model = nested(model)
    assert_near(model(whole_batch()), plain(whole_batch()), "output")


# facebookresearch/fairscale#783
@on_ranks(2)
def test_auto_wrap_wraps_large_children_and_leaves_the_rest_to_the_enclosing_unit():
    plain = nn.Sequential(nn.Linear(4, 2), nn.Linear(9, 20))  # 10 and 200 elements
    with enable_wrap(wrapper_cls=FSDP):
        model = FSDP(auto_wrap(plain, min_num_params=100))
    assert [isinstance(child, FSDP) for child in model.module] == [False, True]
    assert [numel_of(unit) for unit in FSDP.fsdp_modules(model)] == [10, 200]


# facebookresearch/fairscale#791
@on_ranks(2)
def test_parameters_outside_every_unit_are_not_synchronised_and_an_outer_unit_cures_it():
    bare = seeded()
    for index, layer in enumerate(bare.layers):
        bare.layers[index] = FSDP(layer)
    loss(bare).backward()
    both = [torch.empty_like(bare.head.weight) for _ in range(2)]
    dist.all_gather(both, bare.head.weight.grad)
    assert not torch.allclose(*both)
    plain, model = seeded(), nested(seeded())
    backward_beside(plain, model)
    assert_equal_gradients(model, plain)


# facebookresearch/fairscale#1123
@on_ranks(2)
def test_leaving_a_class_out_of_the_policy_changes_the_grouping_and_not_the_sharding():
    plain, model = seeded(), seeded()
    model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Layer}))
    units = [numel_of(unit) for unit in FSDP.fsdp_modules(model)]
    assert units[0] == numel(plain.head)
    assert sum(units) == numel(plain)


# facebookresearch/fairscale#971
@on_ranks(2)
def test_nesting_lowers_the_peak_to_the_root_and_one_block_for_more_gathers():
    peaks, gathers = [], []
    for wrapping in (nested, one_unit):
        model = wrapping(seeded())
        with torch.no_grad(), timeline() as seen:
            model(whole_batch())
        peaks.append(seen.peak_unsharded_bytes)
        gathers.append(len(seen.lines("all-gather")))
    assert gathers == [4, 1]
    elements = [12 + 36, 118]  # with padding: the head and one layer; the whole model
    assert peaks == [8 * numel for numel in elements]


# huggingface/transformers#34113
@on_ranks(2)
def test_wrapping_again_is_refused_and_leaves_the_first_model_usable():
    model = nested(seeded())
    before = model(whole_batch())
    with pytest.raises(errors.AlreadyWrappedError):
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Layer}))
    assert torch.equal(model(whole_batch()), before)


# huggingface/accelerate#3748
@on_ranks(2)
def test_a_policy_takes_several_classes():
    layers = [nn.Linear(3, 3), nn.Linear(3, 3), nn.LayerNorm(3), nn.LayerNorm(3), nn.LayerNorm(3)]
    policy = ModuleWrapPolicy({nn.Linear, nn.LayerNorm})
    model = FSDP(nn.Sequential(*layers), auto_wrap_policy=policy)
    assert len(FSDP.fsdp_modules(model)) == 1 + 5


# pytorch/pytorch#107830
@on_ranks(4)
def test_a_policy_may_give_single_units_their_own_arguments():
    def choose(module: nn.Module) -> bool | dict:
        if isinstance(module, nn.LayerNorm):
            return {"process_group": "self"}
        return isinstance(module, nn.Linear)

    model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), auto_wrap_policy=choose)
    assert len(model[0]._unit.group.ranks) == 4
    assert len(model[1]._unit.group.ranks) == 1
    assert sum(p.numel() for p in model[1].parameters()) == 8


# ---------------------------------------------------------------- tied weights


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.emb(x)))


# NVIDIA-NeMo/RL#227
@on_ranks(2)
def test_tied_weights_in_two_units_are_refused_and_in_one_unit_right():
    model = seeded(Tied)
    model.emb = FSDP(model.emb)
    with pytest.raises(errors.TiedParametersError, match=r"head\.weight"):
        FSDP(model)
    plain, model = seeded(Tied), FSDP(seeded(Tied))
    train(SGD, plain, model, steps=1)
    assert_equal_weights(model, plain)


# Lightning-AI/pytorch-lightning#21613
@on_ranks(2)
def test_a_policy_that_separates_tied_weights_is_refused_before_anything_is_sharded():
    model = seeded(Tied)
    with pytest.raises(errors.TiedParametersError, match=r"emb\.weight") as caught:
        FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert "head.weight" in str(caught.value)
    assert len(list(model.parameters())) == 2  # as before


# pytorch/pytorch#83052
@on_ranks(2)
def test_a_shared_bias_is_refused_like_a_shared_weight():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].bias = model[0].bias
    model[0] = FSDP(model[0])
    with pytest.raises(errors.TiedParametersError, match=r"1\.bias.*bias"):
        FSDP(model)


# facebookresearch/lingua#84
@on_ranks(2)
def test_a_weight_shared_by_all_layers_sums_the_gradients_of_its_uses():
    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        for layer in model[1:]:
            layer.weight = model[0].weight
        return model

    with pytest.raises(errors.TiedParametersError):
        FSDP(seeded(build), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    plain, model = seeded(build), FSDP(seeded(build))
    backward_beside(plain, model)
    assert_near(
        model.clip_grad_norm_(1e9),
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9),
        "norm",
    )


# ---------------------------------------------------------------- summon_full_params


# pytorch/pytorch#107081
@on_ranks(2)
def test_edits_inside_summon_persist_only_with_writeback():
    model = nested(seeded())
    before = full_weights(model)
    for writeback in (False, True):
        with model.summon_full_params(writeback=writeback), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0)
        for name, weight in full_weights(model).items():
            expected = torch.zeros_like(weight) if writeback else before[name]
            assert torch.equal(weight, expected)


# pytorch/pytorch#83111
@on_ranks(2)
def test_edits_on_one_rank_only_raise_instead_of_leaving_a_patchwork():
    model = one_unit(seeded())
    before = full_weights(model)
    factor = 0.0 if dist.get_rank() == 0 else 1.0
    with pytest.raises(errors.SummonDisagreementError), model.summon_full_params():
        model.head.weight.data.mul_(factor)
    after = full_weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


# pytorch/pytorch#73890
@on_ranks(2)
def test_names_shapes_and_order_inside_summon_are_those_of_the_plain_model():
    plain, model = seeded(), nested(seeded())
    with model.summon_full_params():
        found = [(name, p.shape) for name, p in model.named_parameters()]
    assert found == [(name, p.shape) for name, p in plain.named_parameters()]


# facebookresearch/fairscale#490
@on_ranks(2)
def test_summoning_a_child_first_does_not_make_it_a_root():
    plain, model = seeded(), nested(seeded())
    with model.layers[0].summon_full_params():
        pass
    assert not model.layers[0].check_is_root()
    backward_beside(plain, model)
    assert_equal_gradients(model, plain)


# pytorch/pytorch#138467
@on_ranks(2)
def test_a_wrapped_model_can_be_cast_and_exported():
    plain, model = seeded(), nested(seeded())
    model(my_part(whole_batch()))
    exported = model.to(torch.bfloat16).state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(exported[name], value.to(torch.bfloat16))


# ---------------------------------------------------------------- state dict


# pytorch/pytorch#73383
@on_ranks(2)
def test_state_dict_on_all_ranks_has_the_keys_and_values_of_the_plain_model():
    plain, exported = seeded().state_dict(), nested(seeded()).state_dict()
    assert list(exported) == list(plain)
    assert all(torch.equal(exported[name], plain[name]) for name in plain)


# pytorch/pytorch#105379
@on_ranks(2)
def test_a_partial_dict_loads_what_it_has_and_reports_the_rest():
    model = nested(seeded())
    before = model.state_dict()
    new = torch.full_like(before["head.bias"], 7)
    result = model.load_state_dict({"head.bias": new}, strict=False)
    assert sorted(result.missing_keys) == sorted(set(before) - {"head.bias"})
    assert result.unexpected_keys == []
    for name, value in model.state_dict().items():
        assert torch.equal(value, new if name == "head.bias" else before[name])


# huggingface/transformers#31034
@on_ranks(2)
def test_export_is_a_pure_read():
    losses = []
    for export in (False, True):
        model = nested(seeded())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            value = loss(model)
            value.backward()
            optimizer.step()
            if export:
                once, again = model.state_dict(), model.state_dict()
                assert all(torch.equal(once[name], again[name]) for name in once)
        losses.append(value)
    assert torch.equal(*losses)


# huggingface/accelerate#3487
@on_ranks(2)
def test_exported_values_are_plain_tensors_of_the_plain_shapes():
    shapes = {name: value.shape for name, value in seeded().state_dict().items()}
    for name, value in nested(seeded()).state_dict().items():
        assert type(value) is Tensor
        assert value.shape == shapes[name]


# pytorch/pytorch#109666 (the full form)
@on_ranks(1)
def test_export_and_load_work_with_one_rank():
    model, other = nested(seeded()), nested(Stack().double())
    exported = model.state_dict()
    other.load_state_dict(exported)
    assert all(torch.equal(other.state_dict()[name], exported[name]) for name in exported)


def export_numbered() -> dict[str, Tensor]:
    layer = nn.Linear(5, 21, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(105.0).view(21, 5))
    return FSDP(layer).state_dict()


def load_numbered(exported: dict[str, Tensor]) -> dict[str, Tensor]:
    model = FSDP(nn.Linear(5, 21, bias=False))
    model.load_state_dict(exported)
    return model.state_dict()


# ROCm/Megatron-LM#63
def test_gathered_weights_do_not_depend_on_the_number_of_ranks():
    exported = run_ranks(4, export_numbered)[0]
    for world_size in (2, 3, 1):
        exported = run_ranks(world_size, load_numbered, exported)[0]
        assert torch.equal(exported["weight"], torch.arange(105.0).view(21, 5))


# ---------------------------------------------------------------- clipping


# pytorch/pytorch#72548, pytorch/torchtitan#766
@on_ranks(2)
def test_the_models_own_clipping_uses_the_true_norm_on_every_rank():
    plain, model = seeded(), nested(seeded())
    backward_beside(plain, model)
    true = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    local = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert_near(model.clip_grad_norm_(1e9), true, "norm")
    assert local < 0.99 * true


# pytorch/pytorch#149768
@on_ranks(2)
def test_clipping_is_right_for_tiny_norms():
    plain, model = seeded().float(), nested(seeded().float())
    batch = whole_batch().float()
    (1e-6 * mean_square(plain(batch))).backward()
    (1e-6 * mean_square(model(my_part(batch)))).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e-7)
    model.clip_grad_norm_(1e-7)
    expected = {name: p.grad for name, p in plain.named_parameters()}
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-13)


def clip_beside_experts(group: str) -> None:
    """Experts differ from group to group: each counts, and so does the dense part, once."""
    torch.manual_seed(0)
    dense = nn.Linear(WIDTH, WIDTH)
    members = process_groups.rank_lists(group, 4)
    mine = next(i for i, ranks in enumerate(members) if dist.get_rank() in ranks)
    torch.manual_seed(1 + mine)
    expert = nn.Linear(WIDTH, 3)
    model = FSDP(nn.Sequential(dense, FSDP(expert, process_group=group)))
    x = whole_batch().float()[3 * dist.get_rank() :][:3]
    mean_square(model(x)).backward()
    norms = []
    for unit in FSDP.fsdp_modules(model):
        for flat_param in unit.parameters(recurse=False):
            norms.append(flat_param.grad.double().square().sum())
    total = torch.stack(norms).sum()  # shards do not overlap: within a group, or across groups
    dist.all_reduce(total)
    norm = model.clip_grad_norm_(1e9)
    torch.testing.assert_close(norm.double(), total.sqrt(), rtol=1e-6, atol=0)
    every = [torch.empty_like(norm) for _ in range(4)]
    dist.all_gather(every, norm)
    assert len({value.item() for value in every}) == 1


# pytorch/pytorch#180346 (strided groups), lab:self-expert-clip
@pytest.mark.parametrize("group", ["mod2", "self"])
def test_clipping_beside_experts_gives_one_norm_on_all_ranks(group):
    run_ranks(4, clip_beside_experts, group)


# Lightning-AI/pytorch-lightning#19235
@on_ranks(2)
def test_clipping_by_value_needs_only_the_shards():
    plain, model = seeded(), nested(seeded())
    backward_beside(plain, model)
    limit = 0.01
    for part in (plain, model):
        torch.nn.utils.clip_grad_value_(part.parameters(), limit)
    assert_equal_gradients(model, plain)


# ---------------------------------------------------------------- accumulation, averaging


# pytorch/torchtitan#1710, pytorch/pytorch#73784 (without offload), huggingface/accelerate#2531
@on_ranks(2)
def test_accumulating_gives_the_same_sum_with_and_without_no_sync_and_costs_reductions():
    plain = seeded()
    for _ in range(3):
        loss(plain, whole=True).backward()
    for quiet, reductions in ((True, 1), (False, 3)):
        model = one_unit(seeded())
        with timeline() as seen:
            for index in range(3):
                if quiet and index < 2:
                    with model.no_sync():
                        loss(model).backward()
                else:
                    loss(model).backward()
        assert len(seen.lines("reduce-scatter")) == reductions
        assert_equal_gradients(model, plain)
        assert [p.grad.numel() for p in model.parameters()] == [59]  # the shard's


# pytorch/pytorch#118298
@on_ranks(2)
def test_a_step_with_unreduced_gradients_only_is_refused():
    model = nested(seeded())
    before = full_weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        loss(model).backward()
    with pytest.raises(errors.UnsynchronizedStepError, match="no_sync"):
        optimizer.step()
    after = full_weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def rows_of_rank(counts: list[int]) -> Tensor:
    """Rank r's tokens, when ranks have unequal numbers of them."""
    return whole_batch()[: sum(counts)].split(counts)[dist.get_rank()]


def token_losses(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean(dim=1)


def against_token_mean(counts: list[int]) -> None:
    plain, right, naive = seeded(), nested(seeded()), nested(seeded())
    token_losses(plain, whole_batch()[: sum(counts)]).mean().backward()
    mine = rows_of_rank(counts)
    scale = dist.get_world_size() / sum(counts)
    (token_losses(right, mine).sum() * scale).backward()
    token_losses(naive, mine).mean().backward()
    assert_equal_gradients(right, plain)
    gap = (naive.clip_grad_norm_(1e9) - right.clip_grad_norm_(1e9)).abs()
    assert (gap > 1e-3) == (len(set(counts)) > 1)


# meta-pytorch/torchtune#2172, ChenmienTan/RL2#11, pytorch/torchtitan#1803
@pytest.mark.parametrize("counts", [[1, 3], [4, 4], [1, 3, 2, 2]])
def test_a_token_mean_needs_world_size_over_all_tokens_unless_counts_are_equal(counts):
    run_ranks(len(counts), against_token_mean, counts)


# verl-project/verl#5625
@on_ranks(2)
def test_one_token_count_serves_all_micro_batches_of_a_step():
    plain, model = seeded(), nested(seeded())
    batch = whole_batch()[:10]
    token_losses(plain, batch).mean().backward()
    for micro in batch.split([1, 5, 2, 2])[dist.get_rank() :: 2]:
        (token_losses(model, micro).sum() * 2 / 10).backward()
    assert_equal_gradients(model, plain)


# nvidia-cosmos/cosmos-predict1#122
@on_ranks(2)
def test_ranks_with_different_halves_of_a_batch_give_the_gradient_of_the_whole():
    plain, model = seeded(), nested(seeded())
    backward_beside(plain, model)
    assert_equal_gradients(model, plain)


# ---------------------------------------------------------------- precision


# pytorch/pytorch#75478, facebookresearch/fairscale#442
@on_ranks(2)
def test_batch_norm_in_a_unit_of_its_own_keeps_full_precision_statistics():
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(WIDTH)
    low = {"param_dtype": torch.bfloat16, "cast_forward_inputs": True}
    full = {"param_dtype": torch.float32, "cast_forward_inputs": True}
    parts = [nn.Linear(WIDTH, WIDTH), FSDP(norm, mixed_precision=full)]
    parts += [FSDP(nn.Linear(WIDTH, 2), mixed_precision=low)]
    model = FSDP(nn.Sequential(*parts), mixed_precision=low)
    seen = []
    norm.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].detach()))
    loss(model.float()).backward()
    assert norm.running_mean.dtype == torch.float32
    assert norm.num_batches_tracked.dtype == torch.int64
    torch.testing.assert_close(norm.running_mean, 0.1 * seen[0].float().mean(0))


# pytorch/pytorch#115710
@on_ranks(2)
def test_with_torchs_sharded_scaler_all_ranks_skip_a_step_or_none():
    model = one_unit(seeded().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    before = full_weights(model)
    scaler.scale(mean_square(model(my_part(whole_batch()).float()))).backward()
    if dist.get_rank() == 0:
        next(model.parameters()).grad[0] = float("inf")
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    after = full_weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


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


# ---------------------------------------------------------------- frozen parameters


# facebookresearch/fairscale#721, facebookresearch/audiocraft#260
@on_ranks(2)
def test_frozen_weights_never_change_whether_frozen_before_or_after_wrapping():
    for late in (False, True):
        plain, model = seeded(), seeded()
        plain.layers.requires_grad_(False)
        if not late:
            model.layers.requires_grad_(False)
        model = nested(model)
        if late:
            for layer in model.layers:
                layer.requires_grad_(False)
        before = full_weights(model)
        train(ADAMW, plain, model)
        assert_equal_weights(model, plain)
        after = full_weights(model)
        trunk = [name for name in before if name.startswith("layers.")]
        assert all(torch.equal(before[name], after[name]) for name in trunk)


# pytorch/pytorch#105371
@on_ranks(2)
def test_unfreezing_after_an_evaluation_takes_effect_in_every_strategy():
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        plain, model = seeded(), seeded()
        for part in (plain, model):
            part.layers.requires_grad_(False)
        policy = ModuleWrapPolicy({Layer})
        model = FSDP(model, sharding_strategy=strategy, auto_wrap_policy=policy)
        train(SGD, plain, model, steps=1)
        with torch.no_grad():
            loss(model)
        plain.requires_grad_(True)
        model.requires_grad_(True)
        train(SGD, plain, model, steps=1)
        assert_equal_gradients(model, plain)


# pytorch/pytorch#111958
@on_ranks(2)
def test_freezing_does_not_change_repeated_forwards():
    plain, model = seeded(), seeded()
    model.layers[1].requires_grad_(False)
    model.layers[0].linear.requires_grad_(False)
    model = nested(model)
    for _ in range(3):
        with torch.no_grad():
            assert_near(model(whole_batch()), plain(whole_batch()), "output")


# ---------------------------------------------------------------- uneven work, unused parameters


class Branches(nn.Module):
    """Each half of the batch may take another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, choice: int) -> Tensor:
        return self.head(torch.tanh(self.branches[choice](x)))


def branch_units(model: Branches) -> FSDP:
    for index, branch in enumerate(model.branches):
        model.branches[index] = FSDP(branch)
    return FSDP(model)


# pytorch/pytorch#132068, pytorch/pytorch#84175
@on_ranks(2)
def test_alternating_branches_on_all_ranks_alike_train_like_plain_pytorch():
    plain, model = seeded(Branches), branch_units(seeded(Branches))
    for choice in (0, 1, 1, 0):
        plain.zero_grad()
        model.zero_grad()
        mean_square(plain(whole_batch(), choice)).backward()
        mean_square(model(my_part(whole_batch()), choice)).backward()
        assert_equal_gradients(model, plain)


def different_branches() -> None:
    model = branch_units(seeded(Branches))
    model(whole_batch(), 0)
    model.reshard()
    with pytest.raises(errors.SilentRanksError, match=r"unit 'branches\.[01]'"):
        model(my_part(whole_batch()), dist.get_rank())


# pytorch/pytorch#75902
def test_ranks_in_different_branches_get_an_error_instead_of_wrong_numbers():
    run_ranks(2, different_branches, dist_timeout=3.0)


def export_on_one_rank() -> None:
    model = nested(seeded())
    model(whole_batch())
    if dist.get_rank() == 0:
        with pytest.raises(errors.SilentRanksError, match="no answer"):
            model.state_dict()
    else:
        time.sleep(4)


# pytorch/pytorch#73383
def test_state_dict_on_one_rank_only_ends_in_an_error_after_the_time_limit():
    run_ranks(2, export_on_one_rank, dist_timeout=2.0)


# deepspeedai/DeepSpeed#4808
@on_ranks(2)
def test_experts_chosen_per_rank_work_when_the_whole_block_is_one_unit():
    plain, model = seeded(Branches), FSDP(seeded(Branches))
    halves = whole_batch().chunk(2)
    (sum(mean_square(plain(half, choice)) for choice, half in enumerate(halves)) / 2).backward()
    rank = dist.get_rank()
    mean_square(model(halves[rank], rank)).backward()
    assert_equal_gradients(model, plain)


# pytorch/pytorch#87308
@on_ranks(2)
def test_an_unused_parameter_inside_a_used_unit_decays_and_one_in_a_unit_of_its_own_does_not():
    rate, decay = 0.1, 0.5
    for wrap, factor in ((FSDP, 1 - rate * decay), (branch_units, 1.0)):
        model = wrap(seeded(Branches))
        before = full_weights(model)["branches.1.weight"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
        mean_square(model(my_part(whole_batch()), 0)).backward()
        optimizer.step()
        assert_near(full_weights(model)["branches.1.weight"], factor * before, "unused")


# ---------------------------------------------------------------- process groups


# mosaicml/composer#2006
@on_ranks(4)
def test_words_name_these_ranks():
    def lists(word: str) -> list[list[int]]:
        return [list(ranks) for ranks in process_groups.rank_lists(word, 4, 2)]

    assert lists("set2") == [[0, 1], [2, 3]] == lists("node")
    assert lists("mod2") == [[0, 2], [1, 3]] == lists("local_rank_across_nodes")
    assert lists("self") == [[0], [1], [2], [3]]
    with pytest.raises(errors.GroupWordError, match="divides the world size"):
        lists("set3")


# pytorch/pytorch#149396
@on_ranks(4)
def test_a_parent_leaves_out_experts_that_have_a_group_of_their_own():
    model = seeded()
    model.layers[0] = FSDP(model.layers[0], process_group="set2")
    model = FSDP(model)
    assert numel_of(model) == numel(seeded()) - numel(Layer())


# facebookresearch/fairscale#1039
@on_ranks(4)
def test_small_groups_train_different_models_unless_they_have_copies():
    sums = {}
    for name, arguments in (
        ("alone", {"process_group": "set2"}),
        ("copies", {"process_group": ("set2", "mod2"), "sharding_strategy": "HYBRID_SHARD"}),
    ):
        plain, model = seeded(), FSDP(seeded(), **arguments)
        train(SGD, plain, model, steps=1)
        mine = full_weights(model)["head.weight"]
        sums[name] = [torch.empty_like(mine) for _ in range(4)]
        dist.all_gather(sums[name], mine)
        if name == "copies":
            assert_equal_weights(model, plain)
    assert not torch.allclose(sums["alone"][0], sums["alone"][2])
    assert torch.equal(sums["copies"][0], sums["copies"][2])


# pytorch/pytorch#124019
@on_ranks(2)
def test_calling_the_module_inside_a_unit_says_what_to_call_instead():
    model = FSDP(seeded())
    with pytest.raises(errors.NotGatheredError, match=r"Call the (wrapped )?module"):
        model.module(whole_batch())


# RLinf/RLinf#1522
@on_ranks(2)
def test_copies_of_one_rank_each_are_averaged():
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    plain = seeded()
    model = FSDP(seeded(), device_mesh=mesh, sharding_strategy="HYBRID_SHARD")
    backward_beside(plain, model)
    assert_equal_gradients(model, plain)


# pytorch/pytorch#104081
@on_ranks(4)
def test_the_second_copy_can_export_too():
    arguments = {"process_group": ("set2", "mod2"), "sharding_strategy": "HYBRID_SHARD"}
    exported = FSDP(seeded(), **arguments).state_dict()
    assert all(torch.equal(exported[name], value) for name, value in seeded().state_dict().items())


# ---------------------------------------------------------------- forwards of all kinds


# pytorch/pytorch#136861
@on_ranks(2)
def test_two_forwards_may_be_followed_by_two_backwards_or_by_one_of_the_sum():
    plain = seeded()
    (loss(plain, whole=True) + mean_square(plain(-whole_batch()))).backward()
    for together in (False, True):
        model = nested(seeded())
        first, second = loss(model), mean_square(model(-my_part(whole_batch())))
        for part in [first + second] if together else [first, second]:
            part.backward()
        assert_equal_gradients(model, plain)


# pytorch/pytorch#82461
@on_ranks(2)
def test_generation_with_the_root_gathered_keeps_one_inner_unit_in_memory_at_a_time():
    plain, model = seeded(), nested(seeded())
    with torch.no_grad(), timeline() as seen, model.summon_full_params(recurse=False):
        x = y = whole_batch()[:1]
        for _ in range(8):
            y, x = plain(y).repeat(1, 3)[:, :WIDTH], model.module(x).repeat(1, 3)[:, :WIDTH]
            assert_near(x, y, "state")
    assert seen.peak_unsharded_bytes == 8 * (12 + 36)  # the head and one layer


# pytorch/pytorch#131965
@on_ranks(2)
def test_the_root_is_dropped_after_a_forward_without_gradients_and_by_reshard():
    model = nested(seeded())
    (root,) = model.parameters(recurse=False)
    with torch.no_grad():
        loss(model)
    assert root._full_param_padded.untyped_storage().nbytes() == 0
    loss(model)  # a backward may follow: the root stays
    assert root._full_param_padded.untyped_storage().nbytes() == 8 * 12
    model.reshard()
    assert root._full_param_padded.untyped_storage().nbytes() == 0


class Shifted(nn.Linear):
    def forward(self, *, x: Tensor | None = None) -> Tensor:
        return super().forward(torch.ones(2, self.in_features).double() if x is None else x)


# pytorch/pytorch#147531
@on_ranks(2)
def test_calls_without_arguments_or_with_keywords_only_work():
    plain, model = seeded(lambda: Shifted(3, 2)), FSDP(seeded(lambda: Shifted(3, 2)))
    assert_near(model(), plain(), "no argument")
    x = torch.ones(1, 3).double()
    assert_near(model(x=x), plain(x=x), "keyword")


# ---------------------------------------------------------------- optimizers, copies


# intelligent-machine-learning/dlrover#584
@on_ranks(2)
def test_an_optimizer_from_before_wrapping_is_refused_and_changes_nothing():
    plain = seeded()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = nested(plain)
    before = full_weights(model)
    loss(model).backward()
    with pytest.raises(errors.OptimizerBeforeWrappingError, match="Wrap first"):
        optimizer.step()
    after = full_weights(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


# facebookresearch/fairscale#767
@on_ranks(2)
def test_adagrad_works_element_by_element_and_so_on_shards():
    plain, model = seeded(), nested(seeded())
    train((torch.optim.Adagrad, {"lr": 0.1}), plain, model)
    assert_equal_weights(model, plain)


# pytorch/pytorch#101343
@on_ranks(2)
def test_units_of_their_own_allow_other_weight_decay_for_some_parameters():
    def groups(model: nn.Module) -> list[dict]:
        spared = list(model.head.parameters())
        rest = [p for p in model.parameters() if all(p is not other for other in spared)]
        return [{"params": rest}, {"params": spared, "weight_decay": 0.0}]

    plain, model = seeded(), seeded()
    model.head = FSDP(model.head)
    model = nested(model)
    pair = [(m, torch.optim.AdamW(groups(m), lr=0.1, weight_decay=0.5)) for m in (plain, model)]
    for _ in range(2):
        for part, optimizer in pair:
            optimizer.zero_grad()
            loss(part, whole=part is plain).backward()
            optimizer.step()
    assert_equal_weights(model, plain)


# facebookresearch/fairscale#789
@on_ranks(2)
def test_an_average_of_the_weights_can_be_kept_on_shards_without_collectives():
    plain, model, average = seeded(), nested(seeded()), nested(seeded())
    expected = copy.deepcopy(plain)
    for _ in range(3):
        train(SGD, plain, model, steps=1)
        with torch.no_grad(), timeline() as seen:
            for mean, weight in zip(expected.parameters(), plain.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
            for mean, weight in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(weight, 0.1)
        assert seen.events == []
    assert_equal_weights(average, expected)


# pytorch/pytorch#117742
@on_ranks(2)
def test_a_shard_edited_between_two_evaluations_changes_the_second():
    plain, model = seeded(), nested(seeded())
    with torch.no_grad():
        before = loss(model)
        for part in (plain, model):
            for parameter in part.parameters():
                parameter.mul_(0.5)
        assert_near(model(whole_batch()), plain(whole_batch()), "output")
        assert not torch.equal(loss(model), before)


# pytorch/pytorch#82070
@on_ranks(2)
def test_a_deep_copy_is_refused_with_the_remedy_and_the_remedy_works():
    model = nested(seeded())
    with pytest.raises(errors.CopyError, match="Copy before wrapping"):
        copy.deepcopy(model)
    second = nested(Stack().double())
    second.load_state_dict(model.state_dict())
    first = model.state_dict()
    assert all(torch.equal(value, first[name]) for name, value in second.state_dict().items())


# pytorch/pytorch#111648
@on_ranks(2)
def test_no_name_shows_the_wrappers():
    model = nested(seeded())
    names = [name for name, _ in model.named_parameters()]
    assert names == ["_flat_param", *(f"layers.{index}._flat_param" for index in range(3))]
    assert list(model.state_dict()) == list(seeded().state_dict())


# ---------------------------------------------------------------- memory, traffic, limits


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


# verl-project/verl#6317
@on_ranks(1)
def test_an_option_that_is_not_known_is_refused_by_name():
    with pytest.raises(TypeError, match="forward_prefetchh"):
        FSDP(nn.Linear(2, 2), forward_prefetchh=True)


class WithExtra(nn.Linear):
    def __init__(self, extra: Tensor) -> None:
        super().__init__(2, 2)
        self.extra = nn.Parameter(extra, requires_grad=extra.is_floating_point())


# pytorch/pytorch#123528, bitsandbytes-foundation/bitsandbytes#1232, pytorch/pytorch#132934
@on_ranks(2)
def test_integer_and_scalar_parameters_are_refused_by_name_with_a_way_out():
    for dtype in (torch.int64, torch.uint8):
        with pytest.raises(errors.NonFloatingParameterError, match=r"'extra'.*buffer"):
            FSDP(WithExtra(torch.zeros(3, dtype=dtype)))
    with pytest.raises(errors.ScalarParameterError, match=r"'extra'.*\(1,\)"):
        FSDP(WithExtra(torch.tensor(1.0)))


class Nothing(nn.Module):
    """A layer of no outputs, and a parameter of one element."""

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self.none = nn.Linear(WIDTH, 1)
            self.none.weight = nn.Parameter(torch.empty(0, WIDTH))
            self.none.bias = nn.Parameter(torch.empty(0))
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.one * x + self.none(x).sum()


def tiny_and_empty() -> None:
    plain, model = seeded(Nothing), seeded(Nothing)
    model.none = FSDP(model.none)
    model = FSDP(model)
    backward_beside(plain, model)
    assert_near(full_gradients(model)["one"], plain.one.grad, "one")
    assert model.state_dict()["none.weight"].shape == (0, WIDTH)


# deepspeedai/DeepSpeed#8375, pytorch/pytorch#144045
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_parameters_of_one_element_and_of_none_work_at_any_number_of_ranks(world_size):
    run_ranks(world_size, tiny_and_empty)


# pytorch/pytorch#151223
@on_ranks(1)
def test_a_model_on_one_rank_can_be_cast_and_trained_on():
    model = nested(seeded().to(torch.bfloat16)).to(torch.float64)
    plain = seeded().to(torch.bfloat16).to(torch.float64)
    train(SGD, plain, model)
    with model.summon_full_params():
        pass
    assert_equal_weights(model, plain)
