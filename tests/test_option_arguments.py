"""Options of a unit: every spelling, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, register_fsdp_forward_method
from fsdp_ref.options import Offload, Prefetch, as_device, as_offload, as_options, as_prefetch
from tests.provoked import provokes
from tests.ranks import run_ranks

WHERE = "unit 'layer'"


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        (None, Offload()),
        (False, Offload()),
        (True, Offload(offload_params=True)),
        (CPUOffload(offload_params=True), Offload(offload_params=True)),
        (CPUOffload(offload_params=False), Offload()),
        ({"offload_gradients": True}, Offload(offload_gradients=True)),
        (Offload(offload_params=True), Offload(offload_params=True)),
    ],
)
def test_offload_is_understood_in_each_spelling(given, understood):
    assert as_offload(given, WHERE) == understood


def test_gradients_go_where_the_parameters_go():
    assert Offload(offload_params=True).gradients
    assert Offload(offload_gradients=True).gradients
    assert not Offload().gradients


@pytest.mark.parametrize(
    ("given", "understood"),
    [
        (None, Prefetch.NONE),
        (BackwardPrefetch.BACKWARD_PRE, Prefetch.BACKWARD_PRE),
        (BackwardPrefetch.BACKWARD_POST, Prefetch.BACKWARD_POST),
        ("backward_pre", Prefetch.BACKWARD_PRE),
        ("POST", Prefetch.BACKWARD_POST),
        (Prefetch.NONE, Prefetch.NONE),
    ],
)
def test_prefetch_is_understood_in_each_spelling(given, understood):
    assert as_prefetch(given, WHERE) is understood


def test_what_is_no_option_is_refused_by_name():
    with provokes(as_offload, errors.OptionError, match=r"cpu_offload.*offload_params"):
        as_offload({"offload_paramz": True}, WHERE)
    with provokes(as_prefetch, errors.OptionError, match="Did you mean 'BACKWARD_PRE'"):
        as_prefetch("BACKWARD_PRO", WHERE)
    with provokes(as_options, errors.OptionError, match=r"backward_prefetch"):
        as_options({"backward_prefetch": 3}, WHERE)
    with provokes(as_options, errors.PrecisionError, match="Did you mean 'bf16'"):
        as_options({"mixed_precision": "bf61"}, WHERE)


def test_options_come_from_all_arguments_and_ignore_the_others():
    low = MixedPrecision(param_dtype=torch.bfloat16)
    options = as_options(
        {"use_orig_params": True, "mixed_precision": low, "process_group": "self"}, WHERE
    )
    assert options.use_orig_params
    assert options.precision.param_dtype is torch.bfloat16
    assert options.backward_prefetch is Prefetch.NONE
    assert as_options({"backward_prefetch": "BACKWARD_PRE"}, WHERE).forward_prefetch is False


def test_a_device_may_be_left_out():
    assert as_device(None) is None
    assert as_device(torch.device("cpu")) == torch.device("cpu")


class Encoder(nn.Linear):
    def encode(self, batch):
        return self(batch)


def _refusals_of_the_wrapper() -> bool:
    model = nn.Sequential(FSDP(Encoder(2, 2)), nn.Linear(2, 2))
    model = FSDP(model)
    inner = model[0]
    with provokes(FSDP.register_comm_hook, errors.RootOnlyError, match="outermost"):
        inner.register_comm_hook(None, lambda state, gradient, shard: None)
    with provokes(FSDP.register_comm_hook, errors.OptionError):
        model.register_comm_hook(None, "no function")
    with provokes(FSDP.set_gradient_divide_factors, errors.OptionError, match="above 0"):
        model.set_gradient_divide_factors(0.0, 1.0)
    with provokes(register_fsdp_forward_method, errors.OptionError, match=r"method of Encoder"):
        register_fsdp_forward_method(inner, "decode")
    with (
        model.summon_full_params(),
        provokes(FSDP.unshard, errors.SummonContextError, match="summon_full_params"),
    ):
        model.unshard()
    return True


def test_the_wrapper_refuses_what_it_cannot_do():
    assert run_ranks(2, _refusals_of_the_wrapper, timeout=60, dist_timeout=20) == [True, True]
