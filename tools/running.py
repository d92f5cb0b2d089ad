"""Runs one snippet file once, alone in an empty folder, and keeps all it wrote.

Two ways: under torchrun's agent from a process that has torch loaded (fast), or by the
literal command of the docstring (what a reader types). Both see only this tree's
`fsdp_ref`, never `tools`, `tests` or another snippet.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tools import processes
from tools.snippet_files import Snippet

PASSED_ON = (
    "PATH",
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "TMPDIR",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_HOME",
)
LIMIT_SECONDS = 180.0
GRACE_SECONDS = 15.0
"""How long the agents of other nodes may go on after the one of a node has failed."""
LOOK_SECONDS = 0.5
RENDEZVOUS_TROUBLE = re.compile(
    r"Rendezvous\w*(?:Error|Exception)|EADDRINUSE|(?i:address already in use)|DistNetworkError"
)

ABORT_AT_EXIT = "terminate called without an active exception"

LEADERS: set[int] = set()
"""Processes that lead the runs in progress; `stop_everything` ends them."""


def stop_everything() -> None:
    """Stop all runs in progress, with everything that they started."""
    for pid in list(LEADERS):
        processes.stop(pid)


@dataclass(frozen=True)
class Run:
    """One planned run of one file."""

    snippet: Snippet
    backend: str
    literal: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def how(self) -> str:
        """The run's conditions in a few words."""
        words = [self.backend]
        words += [f"{name}={value}" for name, value in self.variables.items()]
        return " ".join(words + (["literal command"] if self.literal else []))


@dataclass
class Outcome:
    """What one run did."""

    run: Run
    code: int
    printed: list[str]
    errors: dict[str, str]
    seconds: float
    timed_out: bool = False
    rendezvous_retries: int = 0
    exit_retries: int = 0

    @property
    def rendezvous_failed(self) -> bool:
        """Whether the processes did not find each other: no verdict on the snippet."""
        text = "\n".join(self.errors.values())
        return self.code != 0 and RENDEZVOUS_TROUBLE.search(text) is not None

    @property
    def aborted_at_exit(self) -> bool:
        """Whether a process died in C++ while Python was shutting down, its program done.

        Seen now and then on a busy machine, also with nothing but torch's own
        DistributedDataParallel: a thread of torch outlives the interpreter. No rank has a
        traceback then, and all output is there.
        """
        text = "\n".join(self.errors.values())
        return self.code != 0 and ABORT_AT_EXIT in text and "[rank" not in text

    @property
    def talkative_ranks(self) -> list[str]:
        """Ranks other than the first one that printed something."""
        return [name for name in self.errors if name.startswith("stdout of rank")]


def base_environment(backend: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables a run starts with; torchrun adds its own."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    found = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    found["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{found.get('PATH', os.defpath)}"
    found |= {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": loopback,
        "NCCL_SOCKET_IFNAME": loopback,
    }
    if backend == "gloo":
        found["CUDA_VISIBLE_DEVICES"] = ""
    else:  # ask the driver's library for devices: a CUDA context does not survive a fork
        found["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    return found | dict(variables)


@contextlib.contextmanager
def package_folder(root: Path) -> Iterator[Path]:
    """Yield a folder from which `fsdp_ref`, and nothing else of the repository, imports."""
    with tempfile.TemporaryDirectory(prefix="fsdp-ref-package-") as folder:
        Path(folder, "fsdp_ref").symlink_to(root / "fsdp_ref", target_is_directory=True)
        yield Path(folder)


class Launcher:
    """A process with torch loaded that runs one file at a time for us."""

    def __init__(self, environment: Mapping[str, str], package: Path) -> None:
        """Start the process; it is ready once torch is imported, which nobody waits for."""
        script = Path(__file__).with_name("launcher.py")
        self.process = subprocess.Popen(
            [sys.executable, "-I", str(script), str(package)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            text=True,
            bufsize=1,
            start_new_session=True,
        )
        LEADERS.add(self.process.pid)

    def run(self, request: dict[str, object], limit: float) -> tuple[int, bool]:
        """Run one file.

        Args:
            request: What `launcher.py` needs to know.
            limit: Seconds after which the run is stopped.

        Returns:
            The exit status, and whether the time ran out.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        child = int(self.answer()["started"])
        ready, _, _ = select.select([self.process.stdout], [], [], limit)
        if not ready:
            processes.stop(child)
        return int(self.answer()["ended"]), not ready

    def answer(self) -> dict[str, int]:
        """Read one line of the launcher's answers."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the snippet launcher ended; does `python -c 'import torch'` work?")
        answer: dict[str, int] = json.loads(line)
        return answer

    def close(self) -> None:
        """Let the process end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        LEADERS.discard(self.process.pid)


def run_under_agent(run: Run, launcher: Launcher, limit: float = LIMIT_SECONDS) -> Outcome:
    """Run a file under torchrun's agent, started by a launcher.

    Args:
        run: What to run; its backend and variables are those the launcher began with.
        launcher: The process that forks.
        limit: Seconds after which the run is stopped.

    Returns:
        What it did.
    """
    snippet = run.snippet
    with tempfile.TemporaryDirectory(prefix="fsdp-ref-snippet-") as folder:
        work, logs = Path(folder, "work"), Path(folder, "logs")
        work.mkdir()
        logs.mkdir()
        shutil.copy(snippet.path, work)
        port = free_port() if snippet.nodes > 1 else 0
        request: dict[str, object] = {
            "folder": str(work),
            "logs": str(logs),
            "file": snippet.path.name,
            "nodes": snippet.nodes,
            "processes": snippet.processes,
            "run_id": uuid.uuid4().hex,
            "endpoint": f"localhost:{port}",
            "limit": limit,
            "grace": GRACE_SECONDS,
            "environment": {},
        }
        start = time.monotonic()
        code, timed_out = launcher.run(request, limit)
        seconds = time.monotonic() - start
        printed, errors = collected(logs)
    return Outcome(run, code, printed, errors, seconds, timed_out)


def collected(logs: Path) -> tuple[list[str], dict[str, str]]:
    """Gather what the ranks wrote: the first talking rank's lines, and all that is beside them.

    Each agent has a folder of its own for its ranks and for itself.
    """
    printed: list[str] = []
    errors: dict[str, str] = {}
    ranks = {int(path.stem[4:]): path for path in logs.glob("node*/rank*.stdout")}
    for rank, path in sorted(ranks.items()):
        lines = path.read_text(errors="replace").splitlines()
        if lines and printed:
            errors[f"stdout of rank {rank}"] = "\n".join(lines)
        printed = printed or lines
    for rank, path in sorted(ranks.items()):
        errors[f"rank {rank}"] = own_part(path.with_suffix(".stderr").read_text(errors="replace"))
    if not any(text.strip() for text in errors.values()):  # only if no rank said anything
        agents = sorted(logs.glob("node*/agent.stderr"))
        for path in agents:
            name = "agent" if len(agents) == 1 else f"agent of {path.parent.name}"
            errors[name] = path.read_text(errors="replace")
    return printed, {name: text for name, text in errors.items() if text.strip()}


def own_part(text: str) -> str:
    """Drop what our launcher adds to a rank's stack when the time runs out."""
    kept = []
    for line in text.splitlines():
        if line.endswith("in run_rank") and "launcher.py" in line:
            break
        kept.append(line)
    return "\n".join(kept)


def run_literally(run: Run, package: Path, limit: float = LIMIT_SECONDS) -> Outcome:
    """Run a file by the command of its docstring, once per node.

    Nothing in the command is changed but the port where several nodes meet: another run on this
    machine may use it, and the two would join.

    Args:
        run: What to run.
        package: The folder that `package_folder` made.
        limit: Seconds after which the run is stopped.

    Returns:
        What it did; all ranks' errors are in one text, as in a reader's terminal.
    """
    environment = base_environment(run.backend, run.variables) | {"PYTHONPATH": str(package)}
    words = shlex.split(run.snippet.command)
    if run.snippet.nodes > 1:
        words = at_a_free_port(words)
    words[0] = str(Path(sys.executable).with_name("torchrun"))
    if not Path(words[0]).exists():
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    with tempfile.TemporaryDirectory(prefix="fsdp-ref-snippet-") as folder:
        work = Path(folder, "work")
        work.mkdir()
        shutil.copy(run.snippet.path, work)
        start = time.monotonic()
        started = [
            start_node(words, work, environment, Path(folder, str(node)))
            for node in range(run.snippet.nodes)
        ]
        codes, timed_out = waited_for(started, start + limit)
        seconds = time.monotonic() - start
        texts = [Path(folder, f"{node}.out").read_text() for node in range(len(started))]
        errors = {f"node {n}": Path(folder, f"{n}.err").read_text() for n in range(len(started))}
    printed = [line for text in texts for line in text.splitlines()]
    code = next((code for code in codes if code > 0), min(codes))  # a status before a signal
    return Outcome(run, code, printed, errors, seconds, timed_out)


def at_a_free_port(words: list[str]) -> list[str]:
    """Return a command whose rendezvous endpoint has another port: one that is free.

    Args:
        words: A torchrun command that `snippet_files.read` accepted.

    Returns:
        The same words, with `localhost:PORT` replaced.
    """
    return [
        re.sub(r"^(--rdzv[-_]endpoint=)?localhost:\d+$", rf"\g<1>localhost:{free_port()}", word)
        for word in words
    ]


def start_node(
    words: list[str], work: Path, environment: Mapping[str, str], name: Path
) -> subprocess.Popen[bytes]:
    """Start the command for one node as the leader of a process group of its own."""
    with open(f"{name}.out", "w") as out, open(f"{name}.err", "w") as err:
        return subprocess.Popen(
            words,
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def waited_for(started: list[subprocess.Popen[bytes]], deadline: float) -> tuple[list[int], bool]:
    """Wait for all processes; stop those that are late, or that go on long after another failed."""
    timed_out, in_time, looked = False, deadline, 0.0
    family: set[tuple[int, str]] = set()
    LEADERS.update(process.pid for process in started)
    while running := [process for process in started if process.poll() is None]:
        now = time.monotonic()
        if len(started) > 1 and now - looked > LOOK_SECONDS:  # an agent may be killed: whose ranks?
            looked = now
            family.update(*(processes.descendants(process.pid) for process in running))
        if any(process.returncode for process in started):
            in_time = min(in_time, now + GRACE_SECONDS)
        if now > in_time:
            timed_out = now > deadline
            for process in running:
                processes.stop(process.pid)
        time.sleep(0.02)
    LEADERS.difference_update(process.pid for process in started)
    processes.kill(family)
    return [process.wait() for process in started], timed_out


def free_port() -> int:
    """Return a port that is free at this moment."""
    import socket

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def cards() -> int:
    """Count the GPUs, asking torch only when the machine has any NVIDIA device at all."""
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    question = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    answer = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True)
    return int(answer.stdout or 0)
