"""`run_ranks` returns what ranks returned, and blames the rank that failed first."""

import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailure, run_ranks


def sum_of_ranks(offset: int) -> tuple[int, torch.Tensor]:
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), total


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_come_back_in_rank_order_tensors_included(world_size):
    results = run_ranks(world_size, sum_of_ranks, 10)
    expected = sum(rank + 10.0 for rank in range(world_size))
    assert [rank for rank, _ in results] == list(range(world_size))
    assert all(torch.equal(total, torch.tensor([expected])) for _, total in results)


def process_facts() -> dict[str, object]:
    x = torch.ones(3, requires_grad=True)
    x.sum().backward()  # leaves a trace in this process only
    return {
        "pid": os.getpid(),
        "threads": torch.get_num_threads(),
        "imported": "torch" in sys.modules,
        "colour": os.environ.get("COLOUR"),
        "backend": dist.get_backend(),
        "local_rank": os.environ["LOCAL_RANK"],
    }


def test_every_call_gets_fresh_processes_with_one_thread_each():
    first = run_ranks(2, process_facts, env={"COLOUR": "green"})
    second = run_ranks(2, process_facts)
    assert len({facts["pid"] for facts in first + second}) == 4
    assert {facts["threads"] for facts in first + second} == {1}
    assert {facts["backend"] for facts in first} == {"gloo"}
    assert [facts["local_rank"] for facts in first] == ["0", "1"]
    assert [facts["colour"] for facts in first + second] == ["green", "green", None, None]


def test_a_call_costs_a_fork_not_an_interpreter():
    run_ranks(2, process_facts)  # the server is up
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    one_interpreter = time.monotonic() - start  # as busy as the machine is now
    start = time.monotonic()
    for _ in range(3):
        run_ranks(2, process_facts)
    assert time.monotonic() - start < 3 * one_interpreter


def one_rank_raises(culprit: int) -> None:
    if dist.get_rank() == culprit:
        raise ValueError("the real cause")
    dist.all_reduce(torch.ones(1))  # fails because the culprit vanished


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_the_cause_is_named_before_its_victims(culprit):
    with pytest.raises(RankFailure) as caught:
        run_ranks(3, one_rank_raises, culprit)
    message = str(caught.value)
    assert message.startswith(f"rank {culprit} of 3 failed first in one_rank_raises")
    victims = [f"=== rank {rank} raised" for rank in range(3) if rank != culprit]
    assert all(message.index("ValueError: the real cause") < message.index(v) for v in victims)
    assert caught.value.first == culprit
    assert caught.value.error_type == "ValueError"
    assert sorted(caught.value.failed) == [0, 1, 2]


def everyone_raises_in_turn() -> None:
    time.sleep(0.4 * (dist.get_world_size() - dist.get_rank()))
    raise ValueError(f"from rank {dist.get_rank()}")


def test_the_order_of_failures_is_the_order_in_time():
    with pytest.raises(RankFailure) as caught:
        run_ranks(3, everyone_raises_in_turn)
    assert caught.value.failed == [2, 1, 0]


def one_rank_is_killed() -> None:
    if dist.get_rank() == 1:
        print("last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def test_a_killed_rank_is_blamed_with_its_signal_and_its_standard_error():
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, one_rank_is_killed)
    assert caught.value.first == 1
    assert "=== rank 1 died:\nkilled by SIGKILL" in str(caught.value)
    assert "last words" in str(caught.value)


def one_rank_aborts() -> None:
    if dist.get_rank() == 0:
        os.abort()
    dist.all_reduce(torch.ones(1))


def test_an_abort_shows_where_it_happened():
    with pytest.raises(RankFailure, match="killed by SIGABRT") as caught:
        run_ranks(2, one_rank_aborts)
    assert caught.value.first == 0
    assert "in one_rank_aborts" in str(caught.value)


def sleeps_forever_on(sleepers: list[int]) -> int:
    if dist.get_rank() in sleepers:
        while True:
            time.sleep(60)
    return dist.get_rank()


def test_a_hang_is_cut_off_and_lists_the_silent_ranks_and_where_they_were():
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(3, sleeps_forever_on, [0, 2], timeout=2.0)
    assert time.monotonic() - start < 10
    message = str(caught.value)
    assert message.startswith("ranks [0, 2] of 3 were silent in sleeps_forever_on after 2 s")
    assert caught.value.silent == [0, 2]
    assert caught.value.failed == []
    assert message.count("in sleeps_forever_on\n") == 2


def waits_for_a_peer_that_sleeps() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)
    dist.all_reduce(torch.ones(1))


def test_a_hang_inside_a_collective_shows_the_collective():
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, waits_for_a_peer_that_sleeps, timeout=2.0)
    assert caught.value.silent == [0, 1]
    assert "in all_reduce" in str(caught.value)


def raises_while_another_sleeps() -> None:
    dist.barrier()  # rank 1 has connected, or it would fail too when rank 0 goes away
    if dist.get_rank() == 0:
        raise KeyError("gave up")
    time.sleep(60)


def test_after_a_failure_the_others_get_a_short_grace_not_the_whole_limit():
    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, raises_while_another_sleeps, timeout=50.0)
    assert time.monotonic() - start < 30  # a busy machine takes long to start ranks
    assert caught.value.first == 0
    assert caught.value.silent == [1]
    assert "KeyError: 'gave up'" in str(caught.value)


def asserts_something_false() -> None:
    found = [1, 2]
    assert found == [1, 3]


def test_a_failing_assert_on_a_rank_shows_its_values():
    with pytest.raises(RankFailure, match=r"assert \[1, 2\] == \[1, 3\]"):
        run_ranks(1, asserts_something_false)


def test_the_server_survives_every_failure():
    with pytest.raises(RankFailure):
        run_ranks(2, one_rank_aborts)
    assert [rank for rank, _ in run_ranks(2, sum_of_ranks, 0)] == [0, 1]


def my_pid() -> int:
    return os.getpid()


def test_no_rank_outlives_its_call():
    pids = run_ranks(2, my_pid)
    with pytest.raises(RankFailure) as caught:
        run_ranks(2, sleeps_forever_on, [0], timeout=1.0)
    assert caught.value.silent == [0]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def prints_a_line() -> None:
    print("hello from", dist.get_rank())


def test_what_ranks_print_is_shown_with_their_number(capfd):
    run_ranks(2, prints_a_line)
    shown = capfd.readouterr().err
    assert "--- rank 0 printed:\nhello from 0" in shown
    assert "--- rank 1 printed:\nhello from 1" in shown


def test_a_closure_is_refused_with_the_reason():
    with pytest.raises(TypeError, match="importable function"):
        run_ranks(1, lambda: None)


def test_partials_of_importable_functions_work():
    assert [rank for rank, _ in run_ranks(2, partial(sum_of_ranks, 3))] == [0, 1]


def returns_something_unpicklable() -> object:
    return threading.Lock()


def test_a_result_that_cannot_be_pickled_is_that_rank_s_failure():
    with pytest.raises(RankFailure, match="cannot pickle"):
        run_ranks(1, returns_something_unpicklable)
