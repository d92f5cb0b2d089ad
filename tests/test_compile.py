"""`torch.compile` around a sharded model, and around modules inside of it."""

import pytest
import torch

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy
from tests.parity.training import full_weights
from tests.ranks import run_ranks
from tests.toy import Layer, assert_near, mean_square, my_part, seeded, whole_batch


def train(compile_it: str, use_orig_params: bool) -> dict[str, torch.Tensor]:
    """Compile from the first call on, or after an eager step, or nothing; return the weights."""
    model = FSDP(
        seeded(), auto_wrap_policy=ModuleWrapPolicy({Layer}), use_orig_params=use_orig_params
    )
    call, graphs = model, []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    if compile_it == "the model":
        call = torch.compile(model, backend="aot_eager")
    elif compile_it == "modules inside":
        for layer in model.layers:
            layer.module.compile(backend=backend)
    elif compile_it == "the model, later":
        mean_square(model(my_part(whole_batch()))).backward()
        model.zero_grad()
        call = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with torch.no_grad():
            call(whole_batch())
        with model.no_sync():
            mean_square(call(my_part(whole_batch()))).backward()
        mean_square(call(my_part(whole_batch()))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert bool(graphs) == (compile_it == "modules inside")
    return full_weights(model)


def beside_eager(compile_it: str) -> None:
    for use_orig_params in (False, True):
        eager = train("nothing", use_orig_params)
        for name, value in train(compile_it, use_orig_params).items():
            assert_near(value, eager[name], name)


@pytest.mark.parametrize("compile_it", ["the model", "the model, later", "modules inside"])
def test_a_compiled_model_trains_like_the_one_that_is_not(compile_it: str) -> None:
    run_ranks(2, beside_eager, compile_it, timeout=120)
