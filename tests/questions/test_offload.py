"""CPU offload: shards and gradients on the CPU, and the numbers of plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import ModuleWrapPolicy
from tests.questions.claims import SGD, backward_beside, loss, on_ranks, train
from tests.toy import (
    Layer,
    assert_equal_gradients,
    assert_equal_weights,
    assert_near,
    mean_square,
    my_part,
    seeded,
    whole_batch,
)

ON_CPU = CPUOffload(offload_params=True)


def offloaded(model: nn.Module) -> FSDP:
    policy = ModuleWrapPolicy({Layer})
    return FSDP(model, cpu_offload=ON_CPU, auto_wrap_policy=policy)


# pytorch/pytorch#148532
@on_ranks(2)
def test_clipping_works_on_offloaded_gradients():
    plain, model = seeded(), offloaded(seeded())
    backward_beside(plain, model)
    assert {p.grad.device.type for p in model.parameters()} == {"cpu"}
    true = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    assert_near(model.clip_grad_norm_(0.01), true, "norm")
    assert_equal_gradients(model, plain)


# modelscope/ms-swift#9844
@on_ranks(2)
def test_forwards_without_gradients_may_come_between_offloaded_steps():
    plain, model = seeded(), offloaded(seeded())
    for _ in range(2):
        with torch.no_grad():
            for _ in range(3):
                loss(model)
        train(SGD, plain, model, steps=1)
    assert_equal_weights(model, plain)


# verl-project/verl#3332
@on_ranks(2)
def test_offload_and_micro_batches_train_as_plain_pytorch_does():
    def steps(model: nn.Module, micro_batches: Sequence[Tensor]) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            for micro in micro_batches:
                mean_square(model(micro)).backward()
            optimizer.step()
            optimizer.zero_grad()

    plain, model = seeded(), offloaded(seeded())
    steps(model, my_part(whole_batch()).split(3))
    steps(plain, whole_batch().split(6))  # the ranks' parts alternate in it
    assert_equal_weights(model, plain)
