"""The form of a state dict is chosen with torch's own words, and stays until another is chosen."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref.errors import StateDictTypeError
from fsdp_ref.state_dict_types import Export, Form, as_export, as_form, export_of
from tests.models import CASES
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import nested, seeded

CONFIGS = {
    "FULL_STATE_DICT": (
        fsdp_ref.FullStateDictConfig(offload_to_cpu=True, rank0_only=True),
        fsdp_ref.FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True),
    ),
    "SHARDED_STATE_DICT": (
        fsdp_ref.ShardedStateDictConfig(offload_to_cpu=True),
        fsdp_ref.ShardedOptimStateDictConfig(offload_to_cpu=False),
    ),
    "LOCAL_STATE_DICT": (
        fsdp_ref.LocalStateDictConfig(offload_to_cpu=True),
        fsdp_ref.LocalOptimStateDictConfig(offload_to_cpu=True),
    ),
}


# ---------------------------------------------------------------- choosing


@pytest.mark.parametrize("name", CONFIGS)
def test_torchs_enum_and_words_in_either_case_name_the_same_form(name):
    word = name.removesuffix("_STATE_DICT")
    for given in (fsdp_ref.StateDictType[name], name, name.lower(), word, word.lower()):
        assert as_form(given, "here") is Form[name]


def test_an_unknown_form_is_refused_with_what_was_meant():
    with provokes(as_form, StateDictTypeError, match=r"Did you mean 'sharded'\?"):
        as_form("shaded", "here")
    with provokes(as_export, StateDictTypeError, match="'refuse' or 'all' or 'mine'"):
        as_export("full", replicas="both", where="here")


def test_a_config_of_another_form_is_refused_by_its_name():
    for name, configs in CONFIGS.items():
        for other in CONFIGS.keys() - {name}:
            for number, config in enumerate(configs):
                pair = [None, None]
                pair[number] = config
                with provokes(as_export, StateDictTypeError, match=type(config).__name__) as caught:
                    as_export(other, *pair, where="here")
                expected = type(CONFIGS[other][number]).__name__
                assert f"expected torch's {expected}" in caught.message
    with provokes(as_export, StateDictTypeError, match="a dict of its settings"):
        as_export("full", {"offload": True}, where="here")


def settings() -> None:
    plain, model = seeded(), nested(seeded())
    default = FSDP.get_state_dict_type(model)
    assert default == FSDP.get_state_dict_type(plain)  # no units: what they would do
    assert default.state_dict_type is fsdp_ref.StateDictType.FULL_STATE_DICT
    assert default.state_dict_config == fsdp_ref.FullStateDictConfig()
    assert default.optim_state_dict_config == fsdp_ref.FullOptimStateDictConfig()
    previous = default
    for name, configs in CONFIGS.items():
        returned = FSDP.set_state_dict_type(model, fsdp_ref.StateDictType[name], *configs)
        assert returned == previous
        previous = FSDP.get_state_dict_type(model)
        expected = fsdp_ref.StateDictSettings(fsdp_ref.StateDictType[name], *configs)
        assert previous == expected
        assert FSDP.get_state_dict_type(model.layers[1]) == expected
    model.set_state_dict_type(model, "full", {"rank0_only": True})  # a method, as in torch's class
    assert FSDP.get_state_dict_type(model).state_dict_config.rank0_only
    assert export_of(model) == Export(rank0_only=True, optim_offload_to_cpu=True)


def test_what_was_set_before_is_returned_and_what_is_set_now_is_told():
    run_ranks(1, settings)


def context() -> None:
    """Each unit gets back what it had, also after an exception, which torch forgets."""
    model = nested(seeded())
    FSDP.set_state_dict_type(model.layers[0], "sharded")
    with FSDP.state_dict_type(model, "local"):
        assert {part._export.form.value for part in FSDP.fsdp_modules(model)} == {"local"}
    with pytest.raises(ZeroDivisionError), model.state_dict_type(model, "local"):
        raise ZeroDivisionError
    forms = [part._export.form.value for part in FSDP.fsdp_modules(model)]
    assert forms == ["full", "sharded", "full", "full"]
    with provokes(export_of, StateDictTypeError, match="FULL_STATE_DICT and SHARDED_STATE_DICT"):
        export_of(model)
    with provokes(FSDP.get_state_dict_type, StateDictTypeError, match="outermost"):
        FSDP.get_state_dict_type(model)
    with provokes(FSDP.set_state_dict_type, StateDictTypeError):
        FSDP.set_state_dict_type(model, "full")
    with provokes(FSDP.state_dict_type, StateDictTypeError), FSDP.state_dict_type(model, "none"):
        pass
    # The unit that is asked decides for those inside.
    assert all(type(value) is Tensor for value in model.state_dict().values())


def test_a_context_puts_back_what_each_unit_had():
    run_ranks(1, context)


# ---------------------------------------------------------------- the full form


def same_values(found: dict, expected: dict) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def first_rank_only(use_orig_params: bool, strategy: str, group: object) -> None:
    plain = seeded()
    model = nested(
        seeded(), process_group=group, sharding_strategy=strategy, use_orig_params=use_orig_params
    )
    seen = []
    model.layers[1].linear.register_state_dict_post_hook(
        lambda module, state, prefix, _: seen.append(state[prefix + "weight"].clone())
    )
    before = model.state_dict()
    with FSDP.state_dict_type(model, "full", {"offload_to_cpu": True, "rank0_only": True}):
        with fsdp_ref.timeline() as recorded:
            state = model.state_dict()
            given = {"epoch": 3}
            again = model.state_dict(destination=given)
        assert again is given
    if dist.get_rank() == 0:
        same_values(state, plain.state_dict())
        assert again.pop("epoch") == 3
        same_values(again, plain.state_dict())
        assert seen[1].any()
    else:
        assert state == {}
        assert again == {"epoch": 3}
        assert torch.equal(seen[1], torch.zeros(5, 5))  # hooks run on every rank
        # Nothing was gathered here: this rank only sent.
        assert all(event.live_unsharded_bytes == 0 for event in recorded.events)
    same_values(model.state_dict(), before)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    ("strategy", "group"),
    [("FULL_SHARD", None), ("NO_SHARD", None), ("HYBRID_SHARD", ("set2", "mod2"))],
)
def test_rank0_only_leaves_other_ranks_an_empty_dict_and_costs_them_no_memory(
    use_orig_params, strategy, group
):
    run_ranks(4, first_rank_only, use_orig_params, strategy, group)


def positions_and_devices() -> None:
    plain, model = seeded(), nested(seeded())
    given = {}
    result = model.state_dict(given, "model.")
    assert result is given
    same_values(result, plain.state_dict(prefix="model."))
    assert all(v.requires_grad for v in model.state_dict({}, "", True).values())
    model.state_dict_device = "meta"  # any device; this one is everywhere
    assert {value.device.type for value in model.state_dict().values()} == {"meta"}
    model.state_dict_device = torch.device("cpu")
    same_values(model.state_dict(), plain.state_dict())
    with FSDP.state_dict_type(model, "full", fsdp_ref.FullStateDictConfig(offload_to_cpu=True)):
        model.state_dict_device = "meta"  # what is asked for at the call counts more
        assert {value.device.type for value in model.state_dict().values()} == {"cpu"}


def test_arguments_by_position_and_the_device_of_values_are_chosen_as_in_torch_and_fairscale():
    run_ranks(2, positions_and_devices)


def all_memory_is_its_own() -> None:
    case = CASES["conv"]
    model = FSDP(case.model(torch.float32))
    for form in ("full", "sharded"):
        with FSDP.state_dict_type(model, form):
            before = model.state_dict()
            kept = {name: value.clone() for name, value in before.items()}
            for buffer in model.buffers():
                buffer.add_(1)
            assert any(model.state_dict()[name].ne(kept[name]).any() for name in kept)
        for name, value in before.items():
            assert torch.equal(_whole(value), _whole(kept[name])), name
    live = dict(model.named_buffers())
    held = model.state_dict(keep_vars=True)
    assert all(held[name] is buffer for name, buffer in live.items())


def _whole(value: Tensor) -> Tensor:
    return fsdp_ref.row_shards.whole(value)


def test_buffers_in_a_state_dict_are_copies_too():
    run_ranks(2, all_memory_is_its_own)
