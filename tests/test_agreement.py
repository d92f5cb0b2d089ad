"""Ranks that disagree, or stay silent, get an error that says who and in what."""

import re
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fsdp_ref import agreement, errors
from tests.provoked import provokes
from tests.ranks import run_ranks

SHORT = timedelta(seconds=1)


def message_of(texts: list[str], timeout: timedelta | None = None) -> str:
    """Compare this rank's text with the others'; return the error's message, or ''."""
    try:
        agreement.compare("structure", texts[dist.get_rank()], range(len(texts)), timeout=timeout)
    except errors.RankDisagreementError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_texts_pass_on_any_number_of_ranks(world_size):
    texts = ["layers.0 (2, 2)\nlayers.1 (2, 2)"] * world_size

    assert run_ranks(world_size, message_of, texts) == [""] * world_size


def test_a_disagreement_is_raised_on_every_rank_and_names_rank_and_line():
    texts = ["a\nweight (2, 2)", "a\nweight (2, 3)", "a\nweight (2, 2)"]

    messages = run_ranks(3, message_of, texts)

    for rank, message in enumerate(messages):
        assert message == (
            f"[rank {rank}] FSDP203 structure: expected the same on ranks 0 to 2, found "
            "rank 1 with `weight (2, 3)` in line 2 where ranks 0, 2 have `weight (2, 2)`. "
            "Run the same code with the same arguments on every rank."
        )


def test_texts_of_unequal_length_do_not_abort_the_process():
    messages = run_ranks(2, message_of, ["", "layer\n" * 100_000])

    assert all("rank 1 with `layer` in line 1 where rank 0 has ``" in text for text in messages)


def go_on_after_a_disagreement() -> list[str]:
    rank = dist.get_rank()
    return [message_of(["same"] * 2), message_of(["x", "y"]), message_of([f"{rank}"] * 2)[:8]]


def test_after_a_disagreement_the_next_comparison_starts_afresh():
    first, second = run_ranks(2, go_on_after_a_disagreement)

    assert first[0] == second[0] == ""
    assert "`y`" in first[1]
    assert "`y`" in second[1]
    assert first[2] == "[rank 0]"
    assert second[2] == "[rank 1]"


def compare_in_pairs_and_all_together() -> list[list[str]]:
    rank = dist.get_rank()
    pair = [0, 1] if rank < 2 else [2, 3]
    heard = []
    for _ in range(3 if rank < 2 else 1):  # the pairs meet a different number of times
        heard.append(agreement.exchange("greeting", f"from {rank}", pair))
    heard.append(agreement.exchange("greeting", f"from {rank}", range(4)))
    return heard


def test_groups_that_met_unequally_often_still_understand_each_other():
    everyone = ["from 0", "from 1", "from 2", "from 3"]

    heard = run_ranks(4, compare_in_pairs_and_all_together)

    assert heard[0] == heard[1] == [everyone[:2]] * 3 + [everyone]
    assert heard[2] == heard[3] == [everyone[2:], everyone]


def one_rank_stays_away() -> tuple[str, float]:
    dist.barrier()  # so that the short limit does not run while another rank still starts
    if dist.get_rank() == 1:
        return "", 0.0
    start = time.monotonic()
    with provokes(agreement.compare, errors.SilentRanksError) as caught:
        agreement.compare("structure", "text", range(3), timeout=SHORT)
    return caught.message, time.monotonic() - start


def test_a_silent_rank_is_named_once_the_limit_has_passed():
    outcomes = run_ranks(3, one_rank_stays_away)

    for message, seconds in (outcomes[0], outcomes[2]):
        assert "FSDP204 structure: expected a word from ranks 0 to 2 within 1 s" in message
        assert "found rank 1 silent" in message
        assert 0.5 < seconds < 10


def one_rank_comes_late() -> str:
    dist.barrier()
    if dist.get_rank() == 1:
        time.sleep(2.5)
    with provokes(agreement.exchange, errors.SilentRanksError) as caught:
        agreement.exchange("structure", "text", range(2), timeout=SHORT)
    return caught.message


def test_a_rank_that_comes_too_late_gets_the_error_as_well():
    first, late = run_ranks(2, one_rank_comes_late)

    assert "found rank 1 silent" in first
    assert "after rank 0 had stopped waiting" in late


def number_of_keys_after(rounds: int) -> int:
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    for _ in range(rounds):
        agreement.compare("structure", "text", range(2))
    dist.barrier()
    return store.num_keys() - before


def test_a_rank_that_comes_while_the_others_give_up_is_not_called_silent_without_a_number():
    store = dist.HashStore()
    for rank in (0, 1):
        store.set(f"round/{rank}", "here now")
    error = agreement._silent_ranks(store, "topic", "round", [0, 1], timedelta(seconds=1))
    assert "within 1 s, found the last of them just after it" in str(error)
    store.delete_key("round/1")
    error = agreement._silent_ranks(store, "topic", "round", [0, 1], timedelta(seconds=1))
    assert "found rank 1 silent" in str(error)


def test_the_store_does_not_grow_with_the_number_of_comparisons():
    # The texts of the last round stay, for a rank may still be reading them.
    assert run_ranks(2, number_of_keys_after, 50) == [2, 2]


def messages_in_a_second_default_group(folder: str) -> str:
    agreement.compare("structure", "first", range(2))
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/second", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return message_of(["second", "other"])


def test_a_new_default_group_is_a_new_mailbox(tmp_path):
    messages = run_ranks(2, messages_in_a_second_default_group, str(tmp_path))

    assert all("`other`" in message for message in messages)


def two_ranks_without_a_process_group_or_me() -> None:
    with provokes(agreement.compare, errors.GroupMembershipError, match="include rank"):
        agreement.compare("structure", "text", [1 - dist.get_rank()])
    with provokes(agreement.exchange, errors.GroupMembershipError, match="include rank"):
        agreement.exchange("structure", "text", [1 - dist.get_rank()])


def test_only_members_may_ask():
    run_ranks(2, two_ranks_without_a_process_group_or_me)


def test_others_cannot_be_reached_without_a_process_group():
    with provokes(agreement.compare, errors.GroupMembershipError, match="init_process_group"):
        agreement.compare("structure", "text", [0, 1])


def disagree() -> None:
    with provokes(agreement.compare, errors.RankDisagreementError, match="Ask again"):
        agreement.compare("topic", f"{dist.get_rank()}", range(2), fix="Ask again.")


def test_a_disagreement_says_what_to_do():
    run_ranks(2, disagree)


@given(st.dictionaries(st.integers(0, 63), st.text("ab\n", max_size=6), min_size=2))
def test_every_dissenting_text_is_described_by_a_line_that_differs(texts):
    if len(set(texts.values())) == 1:
        return
    clause = agreement.describe_differences(texts)

    for part in clause.split("; "):
        if not part.startswith("and "):
            match = re.fullmatch(r"rank.* with (.+) in line \d+ where rank.* ha(?:s|ve) (.+)", part)
            assert match is not None, part
            assert match[1] != match[2]


def test_many_different_texts_are_counted_not_listed():
    clause = agreement.describe_differences({rank: f"{rank}" for rank in range(10)})

    assert clause.endswith("; and 6 other texts")


def hear_through_rows_and_columns() -> dict[int, str]:
    rank = dist.get_rank()
    row, column = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
    return agreement.exchange_through("grid", f'text of "{rank}"\n', [row, column])


def test_through_rows_and_columns_everybody_hears_everybody():
    expected = {rank: f'text of "{rank}"\n' for rank in range(4)}
    for heard in run_ranks(4, hear_through_rows_and_columns):
        assert heard == expected
        assert list(heard) == sorted(heard)


def hear_nothing() -> None:
    rank = dist.get_rank()
    with provokes(agreement.exchange_through, errors.GroupMembershipError, match="include rank"):
        agreement.exchange_through("grid", "text", [[1 - rank]])
    if rank == 0:
        with provokes(agreement.exchange_through, errors.SilentRanksError, match="rank 1 silent"):
            agreement.exchange_through("grid", "text", [[0], [0, 1]])


def test_a_rank_that_is_silent_in_one_of_the_groups_is_named():
    run_ranks(2, hear_nothing, dist_timeout=5.0)  # the ranks also have to start within it
