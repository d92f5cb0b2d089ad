"""What only a GPU can show: streams, copies that overlap, pinned memory, and NCCL.

Ranks start with gloo, as in all tests; here each then takes a card and starts over with NCCL.
Where there are fewer cards than a test wants, it runs on one; without any it is skipped.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy
from tests.parity.training import OPTIMIZERS, full_weights
from tests.ranks import run_ranks
from tests.toy import Layer, assert_near, mean_square, my_part, seeded, whole_batch


def missing() -> str | None:
    """Say what this machine lacks, or `None`."""
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        return "no GPU is visible" if built else f"torch {torch.__version__} is built for the CPU"
    return None if dist.is_nccl_available() else f"torch {torch.__version__} is built without NCCL"


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(missing() is not None, reason=f"needs a GPU and NCCL: {missing()}"),
]
POLICY = ModuleWrapPolicy({Layer})
OFFLOADS = {"off": None, "all": True, "gradients": {"offload_gradients": True}}


def on_cards(test: str, *arguments: Any) -> None:
    """Run a function of this module on all cards, four at most, and on one."""
    for world_size in {1, min(torch.cuda.device_count(), 4)}:
        run_ranks(world_size, start_over_with_nccl, test, *arguments, timeout=180.0)


def start_over_with_nccl(test: str, *arguments: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    torch.cuda.set_device(rank)
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, size, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=dist.PrefixStore("cards", store), rank=rank, world_size=size
    )
    globals()[test](*arguments)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def sharded(**arguments: Any) -> FSDP:
    return FSDP(
        seeded(), auto_wrap_policy=POLICY, device_id=torch.cuda.current_device(), **arguments
    )


def my_batch() -> torch.Tensor:
    return my_part(whole_batch()).cuda()


def flat_params(model: FSDP) -> list[Any]:
    return [p for unit in FSDP.fsdp_modules(model) for p in unit._unit.flat_params]


# ---------------------------------------------------------------- the same numbers


def trains_like_plain(arguments: dict[str, Any]) -> None:
    plain, model = seeded().cuda(), sharded(**arguments)
    one, other = OPTIMIZERS["adamw"](plain.parameters()), OPTIMIZERS["adamw"](model.parameters())
    for _ in range(3):
        one.zero_grad()
        other.zero_grad()
        mean_square(plain(whole_batch().cuda())).backward()
        with model.no_sync():
            (0.5 * mean_square(model(my_batch()))).backward()
        (0.5 * mean_square(model(my_batch()))).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert_near(model.clip_grad_norm_(0.1).cpu(), norm.cpu(), "norm")
        one.step()
        other.step()
    weights = full_weights(model)
    for name, parameter in plain.named_parameters():
        assert_near(weights[name].cpu(), parameter.detach().cpu(), name)
    exported = model.state_dict()
    assert_near(exported["head.bias"].cpu(), plain.head.bias.detach().cpu(), "exported")


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_training_over_nccl_equals_plain_pytorch(strategy, offload, use_orig_params):
    arguments = {"cpu_offload": OFFLOADS[offload], "use_orig_params": use_orig_params}
    on_cards("trains_like_plain", {"sharding_strategy": strategy, **arguments})


# ---------------------------------------------------------------- pinned memory


def is_pinned(cpu_offload: Any) -> None:
    model = sharded(cpu_offload=cpu_offload)
    for _ in range(2):
        mean_square(model(my_batch())).backward()
    for flat_param in flat_params(model):
        assert flat_param.grad.device.type == "cpu"
        assert flat_param._cpu_grad.is_pinned()
        assert flat_param.grad.data_ptr() == flat_param._cpu_grad.data_ptr()
        if cpu_offload is True:
            assert flat_param.device.type == "cpu"
            assert flat_param.is_pinned()
            assert flat_param._fp32_shard.is_pinned()
        assert flat_param._full_param_padded.device.type == "cuda"


@pytest.mark.parametrize("offload", ["all", "gradients"])
def test_what_is_offloaded_lies_in_pinned_memory(offload):
    on_cards("is_pinned", OFFLOADS[offload])


# ---------------------------------------------------------------- streams and events


def busy() -> None:
    """Occupy the current stream for a while: whoever does not wait reads too early."""
    torch.cuda._sleep(50_000_000)


def waits_for_late_writes(cpu_offload: Any) -> None:
    """Behind a stream that lags, gathers, reductions and copies still see what came before."""
    prompt, late = sharded(cpu_offload=cpu_offload), sharded(cpu_offload=cpu_offload)
    for layer in late.module.layers:
        layer.register_forward_pre_hook(lambda *_: busy())
        layer.register_full_backward_hook(lambda *_: busy())
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (prompt, late)]
    for _ in range(2):
        for model, optimizer in zip((prompt, late), optimizers, strict=True):
            optimizer.zero_grad()
            mean_square(model(my_batch())).backward()
            optimizer.step()  # on the CPU, when offloaded: the gradient must have arrived
    for name, weight in full_weights(prompt).items():
        assert torch.equal(weight, full_weights(late)[name]), name


@pytest.mark.parametrize("offload", OFFLOADS)
def test_a_stream_that_lags_behind_changes_no_bit(offload):
    on_cards("waits_for_late_writes", OFFLOADS[offload])


def runs_on_a_side_stream() -> None:
    """A step under another stream, ordered by an event, gives the bits of the default one."""
    results = []
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        model, done = sharded(), torch.cuda.Event()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            busy()
            for _ in range(2):
                optimizer.zero_grad()
                mean_square(model(my_batch())).backward()
                optimizer.step()
            done.record()
        torch.cuda.current_stream().wait_event(done)
        results.append(full_weights(model))
    for name, weight in results[0].items():
        assert torch.equal(weight, results[1][name]), name


def test_a_step_may_run_on_a_stream_of_its_own():
    on_cards("runs_on_a_side_stream")


def frees_memory() -> None:
    """Between steps the memory of the full parameters is free again."""
    wide = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    policy = ModuleWrapPolicy({torch.nn.Linear})
    model = FSDP(wide, auto_wrap_policy=policy, device_id=torch.cuda.current_device())
    with torch.no_grad():
        model(torch.ones(2, 512, device="cuda"))
    shards = sum(p.nbytes for p in model.parameters())
    whole = 8 * (512 * 512 + 512) * 4
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        model(torch.ones(2, 512, device="cuda"))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before < 1.2 * shards
    assert torch.cuda.max_memory_allocated() - before < 0.5 * whole


def test_full_parameters_take_memory_only_while_they_are_used():
    on_cards("frees_memory")
