"""Full weights: reading, editing, exporting and loading them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, timeline
from tests.parity.training import full_weights
from tests.questions.claims import (
    backward_beside,
    loss,
    numel,
    on_ranks,
)
from tests.ranks import run_ranks
from tests.toy import (
    Stack,
    assert_equal_gradients,
    my_part,
    nested,
    one_unit,
    seeded,
    whole_batch,
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


# pytorch/pytorch#104143 (the full form)
@on_ranks(2)
def test_an_export_gathers_one_unit_at_a_time():
    model = nested(seeded())
    model.state_dict()  # the first use of a model sets it up
    with timeline() as seen:
        model.state_dict()
    assert len(seen.lines("all-gather")) == 4
    assert seen.peak_unsharded_bytes == 8 * 36  # one layer


# huggingface/accelerate#2025
@on_ranks(2)
def test_an_export_through_the_wrapper_is_whole_and_one_around_it_is_refused():
    model = nested(seeded())
    exported = model.state_dict()
    assert sum(value.numel() for value in exported.values()) == numel(seeded())
    for inner in (model.module, model.layers[0].module, model.layers[0].linear):
        with pytest.raises(errors.NotGatheredError, match="on the wrapped model"):
            inner.state_dict()


# ROCm/Megatron-LM#63
def test_gathered_weights_do_not_depend_on_the_number_of_ranks():
    exported = run_ranks(4, export_numbered)[0]
    for world_size in (2, 3, 1):
        exported = run_ranks(world_size, load_numbered, exported)[0]
        assert torch.equal(exported["weight"], torch.arange(105.0).view(21, 5))
