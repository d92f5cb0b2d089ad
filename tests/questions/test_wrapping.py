"""Which modules become units, and what tied weights need."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy, auto_wrap, enable_wrap, errors, timeline
from tests.questions.claims import (
    SGD,
    backward_beside,
    loss,
    numel,
    numel_of,
    on_ranks,
    train,
)
from tests.toy import (
    WIDTH,
    Layer,
    assert_equal_gradients,
    assert_equal_weights,
    assert_near,
    nested,
    one_unit,
    seeded,
    whole_batch,
)


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


# facebookresearch/fairscale#815
@on_ranks(2)
def test_an_export_of_tied_weights_has_every_name_with_equal_values():
    plain, model = seeded(Tied), FSDP(seeded(Tied))
    exported = model.state_dict()
    assert list(exported) == list(plain.state_dict()) == ["emb.weight", "head.weight", "head.bias"]
    assert torch.equal(exported["emb.weight"], exported["head.weight"])
    plain.load_state_dict(exported)
    assert_equal_weights(model, plain)
