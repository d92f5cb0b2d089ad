"""The snippet runner: what it reads, how it runs, what it accepts and what it says."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tools import running, snippets
from tools.compare import differences
from tools.running import Outcome, Run
from tools.snippet_files import (
    SnippetError,
    chosen,
    command_fault,
    option,
    read,
    read_all,
    read_most,
    rewrite_promise,
)

REPOSITORY = Path(__file__).resolve().parents[1]

SUM = '''\
"""Add the rank numbers with one all-reduce.

Why: everyone ends with the same sum.

Run on any machine, no GPU needed:

    torchrun --standalone --nproc-per-node 2 {file}

Expected output:

    the sum is 1
      a third is 0.333
"""

# --8<-- [start:body]
import os

import torch
import torch.distributed as dist

dist.init_process_group()
value = torch.ones(1) * dist.get_rank()
{work}
dist.all_reduce(value)
if dist.get_rank() == 0:
    print(f"the sum is {{int(value)}}")
    print("  a third is 0.333")

dist.destroy_process_group()
# --8<-- [end:body]
'''


def write_snippet(root: Path, name: str = "sum_ranks", work: str = "", page: str = "fake") -> Path:
    folder = root / "snippets" / page / name
    folder.mkdir(parents=True)
    path = folder / f"{name}.py"
    path.write_text(SUM.format(file=path.name, work=textwrap.dedent(work)))
    return path


@pytest.fixture(scope="module")
def run_alone():
    """Run the one snippet below a folder; the process that has torch loaded is shared."""
    with running.package_folder(REPOSITORY) as package:
        launcher = running.Launcher(running.base_environment("gloo", {}), package)

        def run(root: Path, *, literal: bool = False, limit: float = 60.0) -> Outcome:
            planned = Run(read_all(root)[0], "gloo", literal=literal)
            if literal:
                return running.run_literally(planned, package, limit)
            return running.run_under_agent(planned, launcher, limit)

        yield run
        launcher.close()


# What may differ


@pytest.mark.parametrize(
    ("promise", "printed"),
    [
        ("loss 0.123", "loss 0.124"),
        ("loss 0.123", "loss 0.122"),
        ("loss 9.99", "loss 10.00"),
        ("   9.99 |", "  10.00 |"),
        ("-0.00", "0.00"),
        ("1.23e-05 and 2.0", "1.24e-05 and 2.1"),
        ("[1.0, 2.0]", "[1.1, 1.9]"),
        ("ends in blanks  ", "ends in blanks"),
    ],
)
def test_a_decimal_may_differ_by_one_in_its_last_digit(promise, printed):
    assert differences([promise], [printed]) == []


@pytest.mark.parametrize(
    ("promise", "printed"),
    [
        ("loss 0.123", "loss 0.125"),
        ("loss 0.123", "loss 0.12"),
        ("loss 0.123", "loss 0.1230"),
        ("3 of 6 elements", "4 of 6 elements"),
        ("torch 2.13.0", "torch 2.13.1"),
        ("torch 2.13.0", "torch 2.14.0"),
        ("layer1.5x", "layer1.6x"),
        ("1.23e-05", "1.23e-06"),
        ("a   1.0", "a  1.0"),
        ("loss nan", "loss 0.0"),
        ("equal: True", "equal: False"),
    ],
)
def test_nothing_else_may_differ(promise, printed):
    assert len(differences([promise], [printed])) == 1


def test_a_missing_and_a_surplus_line_are_differences():
    assert differences(["a", "b"], ["a"]) == ["line 2: promised 'b', printed nothing"]
    assert differences(["a"], ["a", "b"]) == ["line 2: promised nothing, printed 'b'"]


# What a file says about itself


def test_the_docstring_is_the_only_statement_of_command_and_promise(tmp_path):
    path = write_snippet(tmp_path)
    snippet = read(path.parent, "fsdp_ref")
    assert (snippet.processes, snippet.nodes) == (2, 1)
    assert snippet.promise == ("the sum is 1", "  a third is 0.333")
    assert snippet.why == "Everyone ends with the same sum."
    assert path.read_text().splitlines()[snippet.promise_line - 1] == "    the sum is 1"


def test_ranks_without_a_seed_draw_different_numbers_as_in_fresh_processes(tmp_path, run_alone):
    work = """
        drawn = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(drawn, torch.rand(1))
        value += float(drawn[0] == drawn[1])
    """
    write_snippet(tmp_path, work=work)
    assert run_alone(tmp_path).printed[0] == "the sum is 1"


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nnodes 2 --nproc-per-node 3 x.py",
        "torchrun --nnodes=2 --nproc_per_node=3 x.py",
        "torchrun --nproc-per-node=3 --nnodes=2 x.py",
    ],
)
def test_every_spelling_of_torchruns_options_is_understood(command):
    assert (option(command, "nnodes", "1"), option(command, "nproc-per-node", "1")) == ("2", "3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost:29400", None),
        ("--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=localhost:29400", None),
        ("--standalone --nnodes 1", None),
        ("--nnodes 1:2", "--nnodes must be one number, not '1:2'"),
        ("--nproc-per-node gpu", "--nproc-per-node must be one number, not 'gpu'"),
        ("--nproc-per-node 0", "--nproc-per-node must be one number"),
        ("--standalone --nnodes 2", "--standalone means one host"),
        ("--nnodes 2", "several nodes need a place to meet"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint localhost", "a place to meet"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint other.example:29400", "a place to meet"),
    ],
)
def test_a_command_that_the_runner_would_misread_is_refused(options, message):
    fault = command_fault(f"torchrun {options} x.py")
    assert (message in fault) if message else fault == ""


def test_a_command_may_go_on_after_a_backslash_and_the_promise_is_still_found(tmp_path):
    path = write_snippet(tmp_path)
    together = read(path.parent, "fsdp_ref")
    path.write_text(path.read_text().replace(" --nproc-per", " \\\n        --nproc-per"))
    snippet = read(path.parent, "fsdp_ref")
    assert snippet.command == together.command
    assert snippet.promise_line == together.promise_line + 1
    assert path.read_text().splitlines()[snippet.promise_line - 1] == "    the sum is 1"


def test_only_the_port_of_a_command_for_several_nodes_is_changed():
    for joint in (" ", "="):
        command = f"torchrun --nnodes 2 --rdzv-endpoint{joint}localhost:29400 at_localhost:1.py"
        words = running.at_a_free_port(shlex.split(command))
        changed = [(a, b) for a, b in zip(shlex.split(command), words, strict=True) if a != b]
        assert len(changed) == 1
        assert changed[0][1].rpartition(":")[0] == changed[0][0].removesuffix(":29400")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("    torchrun", "    python", "has no indented `torchrun"),
        ("sum_ranks.py", "other.py", "the command must end with sum_ranks.py"),
        ("Expected output:", "Output:", "has no line 'Expected output:'"),
        ('print("  a third', 'print("  a', None),
        ("import torch\n", "import torch(\n", "not valid Python"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, old, new, message):
    path = write_snippet(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    snippets_read, broken = read_most(tmp_path)
    if message is None:
        assert len(snippets_read) == 1
        assert not broken
    else:
        assert not snippets_read
        assert message in broken[path]
        with pytest.raises(SnippetError, match=r"snippets/fake/sum_ranks/sum_ranks\.py:\d+"):
            read_all(tmp_path)


@pytest.mark.parametrize(
    "name", ["fake", "fake/sum_ranks", "sum_ranks.py", "snippets/fake/sum_ranks/sum_ranks.py"]
)
def test_pages_snippets_and_files_can_be_named(tmp_path, name):
    write_snippet(tmp_path)
    write_snippet(tmp_path, "other", page="elsewhere")
    assert [s.name for s in chosen(read_all(tmp_path), [name], tmp_path)] == ["sum_ranks"]


def test_an_unknown_name_is_answered_with_the_known_pages(tmp_path):
    write_snippet(tmp_path)
    with pytest.raises(SnippetError, match=r"no page or snippet is called 'fkae'\. Pages: fake"):
        chosen(read_all(tmp_path), ["fkae"], tmp_path)


def test_one_file_per_page_and_every_named_file_also_run_literally(tmp_path):
    for name in ("first", "second", "third"):
        write_snippet(tmp_path, name)
    everything = read_all(tmp_path)

    def literal(names):
        planned = snippets.plan(everything, names, literal=False, gpus=0)
        return [run.snippet.name for run in planned.runs if run.literal]

    assert literal([]) == ["first"]
    assert literal(["fake"]) == ["first"]
    assert literal(["fake/third"]) == ["first", "third"]
    assert literal(["snippets/fake/second/second.py"]) == ["first", "second"]


def test_the_tutorial_also_runs_with_the_plainest_kernels(tmp_path):
    write_snippet(tmp_path, page="tutorial")
    planned = snippets.plan(read_all(tmp_path), [], literal=False, gpus=0)
    assert [run.how for run in planned.runs] == [
        "gloo",
        "gloo literal command",
        "gloo ATEN_CPU_CAPABILITY=default",
    ]


def test_what_needs_more_cards_than_there_are_is_listed_by_name(tmp_path):
    write_snippet(tmp_path)
    everything = read_all(tmp_path)
    none = snippets.plan(everything, [], literal=False, gpus=0)
    assert none.not_run == ["fake/sum_ranks.py on nccl: needs 2 GPUs, this machine has none"]
    enough = snippets.plan(everything, [], literal=False, gpus=2)
    assert not enough.not_run
    assert [run.backend for run in enough.runs] == ["gloo", "gloo", "nccl"]


# Running


@pytest.mark.parametrize("literal", [False, True])
def test_a_kept_promise_passes(tmp_path, run_alone, literal):
    write_snippet(tmp_path)
    outcome = run_alone(tmp_path, literal=literal)
    assert snippets.verdict(outcome, tmp_path) == ""


def test_a_broken_promise_names_file_line_and_remedy(tmp_path, run_alone):
    write_snippet(tmp_path, work="value += 1")
    told = snippets.verdict(run_alone(tmp_path), tmp_path)
    assert told.startswith("snippets/fake/sum_ranks/sum_ranks.py:11: [gloo] prints something else")
    assert "line 1: promised 'the sum is 1', printed 'the sum is 3'" in told
    assert "nox -s docs-update -- fake/sum_ranks" in told


def test_a_failing_rank_shows_its_own_traceback(tmp_path, run_alone):
    work = "if dist.get_rank() == 1:\n    raise KeyError('mine')"
    write_snippet(tmp_path, work=work)
    told = snippets.verdict(run_alone(tmp_path), tmp_path)
    assert "failed with status 1" in told
    own = told.partition("rank 1:")[2]
    assert "raise KeyError('mine')" in own
    assert "launcher.py" not in told


def test_a_hang_is_cut_off_shows_where_each_rank_was_and_leaves_no_process(tmp_path, run_alone):
    marker = tmp_path / "pids"
    write_snippet(
        tmp_path,
        work=f"""\
            import time
            open({str(marker)!r} + str(dist.get_rank()), "w").write(str(os.getpid()))
            time.sleep(600 if dist.get_rank() else 0)""",
    )
    start = time.monotonic()
    outcome = run_alone(tmp_path, limit=5)
    assert outcome.timed_out
    assert time.monotonic() - start < 40
    told = snippets.verdict(outcome, tmp_path)
    assert 'File "sum_ranks.py", line' in told.partition("rank 1:")[2]
    for rank in "01":
        pid = int(Path(f"{marker}{rank}").read_text())
        assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


def test_a_termination_signal_stops_what_was_started(tmp_path):
    marker = tmp_path / "pid"
    work = f"""\
        import time
        open({str(marker)!r} + str(dist.get_rank()), "w").write(str(os.getpid()))
        time.sleep(600)"""
    write_snippet(tmp_path, work=work)
    for name in ("tools", "fsdp_ref"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    program = (
        "import sys; from pathlib import Path; from tools import snippets\n"
        "from tools.snippet_files import read_all\n"
        "root = Path(sys.argv[1]); snippets.end_cleanly()\n"
        "todo = snippets.plan(read_all(root), [], literal=False, gpus=0)\n"
        "snippets.execute(todo, root)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.DEVNULL) as process:
        until = time.monotonic() + 60
        while not Path(f"{marker}1").exists() and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(0.2)
        process.terminate()
        process.wait(30)
    for path in tmp_path.glob("pid*"):
        stat = Path(f"/proc/{path.read_text()}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


def test_output_from_several_ranks_is_refused(tmp_path, run_alone):
    write_snippet(tmp_path, work="print('hello')")
    told = snippets.verdict(run_alone(tmp_path), tmp_path)
    assert "several ranks print" in told


def test_a_snippet_sees_an_empty_folder_the_package_and_torchruns_variables_only(
    tmp_path, run_alone
):
    os.environ["FSDP_REF_TEST_LEAK"] = "1"
    try:
        write_snippet(
            tmp_path,
            work="""\
                import importlib.util, sys
                assert os.listdir() == ["sum_ranks.py"], os.listdir()
                assert importlib.util.find_spec("fsdp_ref") is not None
                assert importlib.util.find_spec("tools") is None
                assert "fsdp_ref" not in sys.modules
                assert "FSDP_REF_TEST_LEAK" not in os.environ
                assert os.environ["OMP_NUM_THREADS"] == "1"
                assert os.environ["WORLD_SIZE"] == "2"
                assert __name__ == "__main__" and sys.argv == ["sum_ranks.py"]""",
        )
        assert snippets.verdict(run_alone(tmp_path), tmp_path) == ""
    finally:
        del os.environ["FSDP_REF_TEST_LEAK"]


TWO_NODES = (
    "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint localhost:29400"
)


def write_for_two_nodes(root: Path, work: str) -> None:
    path = write_snippet(root, work=work)
    text = path.read_text().replace("torchrun --standalone --nproc-per-node 2", TWO_NODES)
    path.write_text(text.replace("the sum is 1\n", "the sum is 6\n"))
    snippet = read_all(root)[0]
    assert (snippet.nodes, snippet.processes, snippet.ranks) == (2, 2, 4)


@pytest.mark.parametrize("literal", [False, True])
def test_two_nodes_are_two_agents_with_two_ranks_each(tmp_path, run_alone, literal):
    write_for_two_nodes(
        tmp_path,
        work="""
            assert os.environ["WORLD_SIZE"] == "4"
            assert os.environ["LOCAL_WORLD_SIZE"] == "2"
            assert os.environ["GROUP_WORLD_SIZE"] == "2"  # torchrun's word for nodes
            places = [None] * 4
            agent = (os.environ["GROUP_RANK"], os.getppid())
            dist.all_gather_object(places, (*agent, int(os.environ["LOCAL_RANK"])))
            assert [place[2] for place in places] == [0, 1, 0, 1], places
            assert len({place[:2] for place in places}) == 2, "one agent for each node"
        """,
    )
    outcome = run_alone(tmp_path, literal=literal)
    assert snippets.verdict(outcome, tmp_path) == ""


@pytest.mark.parametrize("literal", [False, True])
def test_a_rank_that_fails_on_the_second_node_fails_the_run_and_is_shown(
    tmp_path, run_alone, literal
):
    write_for_two_nodes(tmp_path, "if dist.get_rank() == 3:\n    raise KeyError('mine')")
    outcome = run_alone(tmp_path, literal=literal)
    assert not outcome.timed_out
    told = snippets.verdict(outcome, tmp_path)
    assert "failed with status 1" in told
    own = told.partition("node 1:" if literal else "rank 3:")[2]
    assert "raise KeyError('mine')" in own


@pytest.mark.parametrize("literal", [False, True])
def test_an_agent_that_is_killed_ends_the_run_and_leaves_no_process(
    tmp_path, run_alone, monkeypatch, literal
):
    monkeypatch.setattr(running, "GRACE_SECONDS", 1.0)
    marker = tmp_path / "pid"
    write_for_two_nodes(
        tmp_path,
        work=f"""
            import signal, time
            open({str(marker)!r} + str(dist.get_rank()), "w").write(str(os.getpid()))
            dist.barrier()
            if dist.get_rank() == 3:
                time.sleep(1)
                os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        """,
    )
    start = time.monotonic()
    outcome = run_alone(tmp_path, literal=literal)
    assert outcome.code != 0
    assert not outcome.timed_out
    assert time.monotonic() - start < 40
    pids = [int(path.read_text()) for path in tmp_path.glob("pid*")]
    assert len(pids) == 4
    until = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def a_run(tmp_path):
    write_snippet(tmp_path)
    return Run(read_all(tmp_path)[0], "gloo")


class Recorded:
    """Stands in for the launchers; gives prepared outcomes and counts the runs."""

    def __init__(self, outcomes):
        self.outcomes, self.runs = list(outcomes), 0

    def run(self, run, limit):
        self.runs += 1
        return dataclasses.replace(self.outcomes.pop(0), run=run)

    def close(self):
        pass


@pytest.mark.parametrize(
    ("first", "runs", "retried"),
    [
        (Outcome(None, 1, [], {"agent": "RendezvousTimeoutError: late"}, 1.0), 2, 1),
        (Outcome(None, 1, [], {"rank 0": "error: Address already in use"}, 1.0), 2, 1),
        (Outcome(None, 1, [], {"rank 0": "ValueError: shapes"}, 1.0), 1, 0),
        (Outcome(None, 0, ["the sum is 2"], {}, 1.0), 1, 0),
        (Outcome(None, 1, ["the sum is 2"], {"node 0": running.ABORT_AT_EXIT}, 1.0), 1, 0),
    ],
    ids=["rendezvous late", "port taken", "snippet failed", "promise broken", "broken and abort"],
)
def test_only_a_failed_rendezvous_is_repeated_and_counted(
    tmp_path, monkeypatch, first, runs, retried
):
    kept = Outcome(None, 0, ["the sum is 1", "  a third is 0.333"], {}, 1.0)
    recorded = Recorded([first, kept])
    monkeypatch.setattr(snippets, "Launchers", lambda package: recorded)
    report = snippets.execute(snippets.Plan([a_run(tmp_path)]), REPOSITORY)
    assert recorded.runs == runs
    assert report.retried == retried
    assert bool(snippets.verdict(report.outcomes[0], tmp_path)) == (runs == 1)


def test_an_abort_after_the_last_line_is_repeated_and_counted(tmp_path, monkeypatch):
    lines = ["the sum is 1", "  a third is 0.333"]
    aborted = Outcome(None, 1, lines, {"node 0": f"{running.ABORT_AT_EXIT}\nexitcode -6"}, 1.0)
    monkeypatch.setattr(snippets, "Launchers", lambda package: Recorded([aborted] * 4))
    report = snippets.execute(snippets.Plan([a_run(tmp_path)]), REPOSITORY)
    assert "3 repeated after an abort at Python's exit" in report.summary
    assert "failed with status 1" in snippets.verdict(report.outcomes[0], tmp_path)


def test_docs_update_writes_what_was_printed_and_nothing_else(tmp_path):
    run = a_run(tmp_path)
    before = run.snippet.path.read_text()
    printed = ["the sum is 2", "", "  a \\ and a third 0.334"]
    report = snippets.Report(snippets.Plan([run]), [Outcome(run, 0, printed, {}, 1.0)], 1.0)
    assert snippets.update(report) == [run.snippet]
    assert read_all(tmp_path)[0].promise == tuple(printed)
    after = run.snippet.path.read_text()
    assert after.partition("# --8<--")[2] == before.partition("# --8<--")[2]


def test_docs_update_leaves_the_promise_of_a_failed_run(tmp_path):
    run = a_run(tmp_path)
    before = run.snippet.path.read_text()
    report = snippets.Report(snippets.Plan([run]), [Outcome(run, 1, ["half"], {}, 1.0)], 1.0)
    assert snippets.update(report) == []
    assert run.snippet.path.read_text() == before


def test_rewriting_the_same_promise_changes_nothing(tmp_path):
    path = write_snippet(tmp_path)
    before = path.read_text()
    snippet = read(path.parent, "fsdp_ref")
    rewrite_promise(snippet, snippet.promise)
    assert path.read_text() == before


def test_the_gpus_are_hidden_from_a_run_on_gloo():
    assert running.base_environment("gloo", {})["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in running.base_environment("nccl", {}) or os.environ.get(
        "CUDA_VISIBLE_DEVICES"
    )
