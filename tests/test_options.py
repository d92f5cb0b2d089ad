"""Options: their spellings, what is gathered ahead and in memory then, dtypes of gradients."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import errors, options, register_fsdp_forward_method, timeline
from fsdp_ref.options import Offload, Prefetch
from tests.parity.training import full_weights
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import Stack, mean_square, my_part, nested, seeded, whole_batch

# ---------------------------------------------------------------- spellings


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Offload()),
        (False, Offload()),
        (True, Offload(offload_params=True)),
        (CPUOffload(offload_params=True), Offload(offload_params=True)),
        (CPUOffload(), Offload()),
        ({"offload_gradients": True}, Offload(offload_gradients=True)),
        ({"offload_params": True}, Offload(offload_params=True)),
        ({}, Offload()),
        (Offload(offload_gradients=True), Offload(offload_gradients=True)),
    ],
)
def test_offload_is_understood_in_every_spelling(given, expected):
    assert options.as_offload(given, "here") == expected
    assert expected.gradients == (expected.offload_params or expected.offload_gradients)


@pytest.mark.parametrize("given", ["cpu", 1, {"params": True}, ["offload_params"]])
def test_an_offload_that_does_not_exist_is_refused(given):
    with provokes(options.as_offload, errors.OptionError, match="here, cpu_offload: .*CPUOffload"):
        options.as_offload(given, "here")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, Prefetch.NONE),
        ("none", Prefetch.NONE),
        ("pre", Prefetch.BACKWARD_PRE),
        ("BACKWARD_POST", Prefetch.BACKWARD_POST),
        ("Backward_Pre", Prefetch.BACKWARD_PRE),
        (BackwardPrefetch.BACKWARD_PRE, Prefetch.BACKWARD_PRE),
        (BackwardPrefetch.BACKWARD_POST, Prefetch.BACKWARD_POST),
        (Prefetch.NONE, Prefetch.NONE),
    ],
)
def test_prefetch_is_understood_in_every_spelling(given, expected):
    assert options.as_prefetch(given, "here") is expected


@pytest.mark.parametrize("given", ["backward_pro", True, 3, "later"])
def test_a_moment_that_does_not_exist_is_refused(given):
    with provokes(options.as_prefetch, errors.OptionError, match="here, backward_prefetch: "):
        options.as_prefetch(given, "here")


def test_a_misspelled_moment_names_the_nearest():
    with pytest.raises(errors.OptionError, match="Did you mean 'BACKWARD_PRE'"):
        options.as_prefetch("backward_pr", "here")


def test_each_argument_is_refused_by_the_function_that_reads_them_all():
    for arguments in ({"cpu_offload": "no"}, {"backward_prefetch": "no"}):
        with provokes(options.as_options, errors.OptionError):
            options.as_options(arguments, "here")
    with provokes(options.as_options, errors.PrecisionError):
        options.as_options({"mixed_precision": "float7"}, "here")


def refused_by_the_constructor() -> None:
    for arguments in (
        {"cpu_offload": "no"},
        {"backward_prefetch": "no"},
        {"param_init_fn": "not a function"},
    ):
        (name,) = arguments
        plain = nn.Linear(3, 2, device="meta" if name == "param_init_fn" else None)
        with provokes(FSDP, errors.OptionError, match=f"unit 'Linear'.*{name}"):
            FSDP(plain, **arguments)
        assert [name for name, _ in plain.named_parameters()] == ["weight", "bias"]  # unharmed


def test_the_constructor_refuses_them_and_leaves_the_module_alone():
    run_ranks(1, refused_by_the_constructor)


# ---------------------------------------------------------------- gathered ahead


class Pyramid(nn.Module):
    """Layers of very different sizes, the largest in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Linear(5, 8),
                nn.Linear(8, 64),
                nn.Linear(64, 48),
                nn.Linear(48, 4),
                nn.Linear(4, 9),
            ]
        )
        self.head = nn.Linear(9, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def deep() -> nn.Module:
    return Stack(depth=6)


MODELS = {"equal units": deep, "uneven units": Pyramid}
PREFETCH = [
    {"backward_prefetch": backward, "forward_prefetch": forward}
    for backward in ("pre", "post", None)
    for forward in (False, True)
]


def same_bits(model_name: str, more: dict[str, Any]) -> None:
    results = []
    for prefetch in PREFETCH:
        model = nested(seeded(MODELS[model_name]), **prefetch, **more)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            if step == 1:
                with model.no_sync():
                    mean_square(model(2 * my_part(whole_batch()))).backward()
            mean_square(model(my_part(whole_batch()))).backward()
            optimizer.step()
            with torch.no_grad():
                model(my_part(whole_batch()))
        results.append(full_weights(model))
    for other in results[1:]:
        for name, weight in results[0].items():
            assert torch.equal(other[name], weight), name


@pytest.mark.parametrize("more", [{}, {"use_orig_params": True}, {"cpu_offload": True}], ids=str)
@pytest.mark.parametrize("model_name", MODELS)
def test_when_units_are_gathered_changes_no_bit(model_name, more):
    run_ranks(2, same_bits, model_name, more)


def memory(model_name: str, strategy: str, prefetch: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return the peak of a step, the root's bytes, and those of the two largest units."""
    model = nested(seeded(MODELS[model_name]), sharding_strategy=strategy, **prefetch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    peak = 0
    for _ in range(3):
        with timeline() as recorded:
            mean_square(model(my_part(whole_batch()))).backward()
            optimizer.step()
        peak = max(peak, *(event.live_unsharded_bytes for event in recorded.events))
        assert recorded.events[-1].live_unsharded_bytes == 0
    full = [
        sum(p._layout.padded_numel * p.element_size() for p in part._unit.flat_params)
        for part in FSDP.fsdp_modules(model)
    ]
    root, units = full[0], sorted(full[1:], reverse=True)
    return peak, root, units[0], sum(units)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("model_name", MODELS)
def test_never_more_than_the_root_and_twice_the_largest_unit(model_name, world_size):
    for prefetch in PREFETCH:
        for peak, root, largest, _ in run_ranks(
            world_size, memory, model_name, "FULL_SHARD", prefetch
        ):
            ahead = prefetch["backward_prefetch"] == "pre" or prefetch["forward_prefetch"]
            assert root + largest <= peak <= root + (2 if ahead else 1) * largest, prefetch


@pytest.mark.parametrize("model_name", MODELS)
def test_a_strategy_that_keeps_parameters_keeps_all_of_them(model_name):
    for peak, root, _, all_units in run_ranks(2, memory, model_name, "SHARD_GRAD_OP", {}):
        # While small units take theirs out of a shared message, what is in it exists twice.
        assert root + all_units <= peak <= root + all_units + all_units / 8


def gathers(prefetch: dict[str, Any]) -> list[str]:
    """Return the order of a step, the second one, from which on the order is known."""
    model, x = nested(seeded(), **prefetch), my_part(whole_batch())
    mean_square(model(x)).backward()
    with timeline() as recorded:
        mean_square(model(x)).backward()
    return recorded.lines("all-gather", "unshard", "reshard", "reduce-scatter")


def order_of(lines: list[str], *wanted: str) -> list[int]:
    """Return where each wanted line stands, the last of its kind."""
    return [len(lines) - 1 - lines[::-1].index(line) for line in wanted]


def test_pre_gathers_before_and_post_after_the_gradients_and_none_when_needed():
    for lines in run_ranks(2, gathers, {"backward_prefetch": "pre"}):
        ahead, dropped = order_of(lines, "all-gather layers.1", "reshard layers.2")
        assert ahead < dropped
    for lines in run_ranks(2, gathers, {"backward_prefetch": "post"}):
        dropped, ahead, reduced = order_of(
            lines, "reshard layers.2", "all-gather layers.1", "reduce-scatter layers.2"
        )
        assert dropped < ahead < reduced
    for lines in run_ranks(2, gathers, {"backward_prefetch": None}):
        reduced, gathered = order_of(lines, "reduce-scatter layers.2", "all-gather layers.1")
        assert reduced < gathered


def test_forward_prefetch_gathers_the_next_unit_before_this_one_is_dropped():
    for lines in run_ranks(2, gathers, {"forward_prefetch": True}):
        assert lines.index("all-gather layers.1") < lines.index("reshard layers.0")
        assert len([line for line in lines if line == "all-gather layers.1"]) == 2
    for lines in run_ranks(2, gathers, {}):
        assert lines.index("all-gather layers.1") > lines.index("reshard layers.0")


def limit_changes_nothing() -> tuple[list[str], list[str]]:
    return gathers({"limit_all_gathers": True}), gathers({"limit_all_gathers": False})


def test_limit_all_gathers_changes_nothing():
    for limited, unlimited in run_ranks(2, limit_changes_nothing):
        assert limited == unlimited


# ---------------------------------------------------------------- gradient dtypes, and eval()


def low_precision_gradients(use_orig_params: bool) -> None:
    """`.grad` keeps the reduced dtype, as in torch's class, while the parameters are float32."""
    from torch.distributed.fsdp import FullyShardedDataParallel as Torch
    from torch.distributed.fsdp import MixedPrecision

    low = {"mixed_precision": MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)}
    x = my_part(whole_batch()).float()
    model = FSDP(seeded().float(), use_orig_params=use_orig_params, **low)
    theirs = Torch(
        seeded().float(),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
        **low,
    )
    for one in (model, theirs):
        one(x).float().square().mean().backward()
    for found, expected in zip(model.parameters(), theirs.parameters(), strict=True):
        assert found.dtype == expected.dtype == torch.float32
        assert found.grad.dtype == torch.bfloat16
        assert expected.grad is None or expected.grad.dtype == torch.bfloat16  # None: no piece here
    gradients = [
        [p.grad for p in one.parameters() if p.grad is not None] for one in (model, theirs)
    ]
    totals = [sum(g.double().sum() for g in found) for found in gradients]
    both = torch.stack(totals)
    torch.distributed.all_reduce(both)
    torch.testing.assert_close(both[0], both[1], rtol=2e-2, atol=1e-3)
    once = [p.grad.clone() for p in model.parameters()]
    model(x).float().square().mean().backward()  # accumulates in that dtype
    for parameter, before in zip(model.parameters(), once, strict=True):
        assert parameter.grad.dtype == torch.bfloat16
        torch.testing.assert_close(parameter.grad, 2 * before)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    plainly = FSDP(seeded().float(), mixed_precision="bf16", use_orig_params=use_orig_params)
    plainly(x).float().square().mean().backward()
    assert {p.grad.dtype for p in plainly.parameters()} == {torch.float32}


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_gradients_keep_the_reduced_dtype_on_request(use_orig_params):
    run_ranks(2, low_precision_gradients, use_orig_params)


def full_precision_in_eval(more: dict[str, Any]) -> None:
    """An evaluation in between equals the plain model bit for bit, and leaves no trace."""
    results = []
    for evaluate in (False, True):
        model = nested(
            seeded().float(),
            mixed_precision={"param_dtype": "bf16", "full_precision_in_eval": True},
            **more,
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(3):
            if evaluate:
                reference = seeded().float()
                reference.load_state_dict(copy.deepcopy(model.state_dict()))
                model.eval()
                x = whole_batch().float()
                with torch.no_grad():
                    assert torch.equal(model(x), reference(x))
                assert model(x).dtype == torch.float32  # also with gradients, and no backward
                model.train()
            optimizer.zero_grad()
            output = model(my_part(whole_batch()).float())
            assert output.dtype == torch.bfloat16
            output.float().square().mean().backward()
            optimizer.step()
        results.append(full_weights(model))
    never, often = results
    for name, weight in never.items():
        assert torch.equal(often[name], weight), name


@pytest.mark.parametrize(
    "more",
    [{}, {"use_orig_params": True}, {"cpu_offload": True}, {"sharding_strategy": "SHARD_GRAD_OP"}],
    ids=str,
)
def test_full_precision_in_eval_equals_the_plain_model_and_leaves_no_trace(more):
    run_ranks(2, full_precision_in_eval, more)


# ---------------------------------------------------------------- all arguments together

WHERE = "unit 'layer'"


def test_what_is_no_option_is_refused_by_name():
    with provokes(options.as_offload, errors.OptionError, match=r"cpu_offload.*offload_params"):
        options.as_offload({"offload_paramz": True}, WHERE)
    with provokes(options.as_prefetch, errors.OptionError, match="Did you mean 'BACKWARD_PRE'"):
        options.as_prefetch("BACKWARD_PRO", WHERE)
    with provokes(options.as_options, errors.OptionError, match=r"backward_prefetch"):
        options.as_options({"backward_prefetch": 3}, WHERE)
    with provokes(options.as_options, errors.PrecisionError, match="Did you mean 'bf16'"):
        options.as_options({"mixed_precision": "bf61"}, WHERE)


def test_options_come_from_all_arguments_and_ignore_the_others():
    low = MixedPrecision(param_dtype=torch.bfloat16)
    understood = options.as_options(
        {"use_orig_params": True, "mixed_precision": low, "process_group": "self"}, WHERE
    )
    assert understood.use_orig_params
    assert understood.precision.param_dtype is torch.bfloat16
    assert understood.backward_prefetch is Prefetch.NONE
    assert (
        options.as_options({"backward_prefetch": "BACKWARD_PRE"}, WHERE).forward_prefetch is False
    )


def test_a_device_may_be_left_out():
    assert options.as_device(None) is None
    assert options.as_device(torch.device("cpu")) == torch.device("cpu")


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
