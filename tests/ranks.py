"""Run one function on several ranks, fast, and say which rank failed first.

    from tests.ranks import run_ranks

    def whose_turn(offset):
        return dist.get_rank() + offset

    assert run_ranks(2, whose_turn, 10) == [10, 11]

A *fork server* (this file, started once as a script) imports torch and then only ever
forks: one child per rank and call, so a call costs a fork instead of a fresh interpreter.
The server must stay pristine. It never runs a backward and never holds a thread, because
a child forked from a process that did either inherits locks that nobody will release.
Whatever a rank does dies with its process.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import re
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

DIST_TIMEOUT = 20.0  # seconds: the limit of one collective inside a rank
GRACE = 3.0  # seconds that the other ranks get to finish once one has failed
# What a rank says when the *other* side went away: never the cause.
VANISHED_PEER = re.compile(
    r"Connection (closed|reset) by peer|Connection refused|Broken pipe|Socket closed|recvValue"
)


class RankFailure(AssertionError):
    """At least one rank failed; the message opens with the rank that failed first.

    Attributes:
        first: The rank that failed first, or the first silent one if none raised.
        failed: Ranks that raised or died, in the order in which they did.
        silent: Ranks that had not answered when they were cut off.
        error_type: Name of the first failing rank's exception class, if it raised one.
    """

    def __init__(self, message: str, outcomes: list[Outcome]) -> None:
        super().__init__(message)
        self.failed = [outcome.rank for outcome in outcomes if outcome.kind in ("raised", "died")]
        self.silent = [outcome.rank for outcome in outcomes if outcome.kind == "silent"]
        self.first = (self.failed + self.silent)[0]
        self.error_type = next((o.error_type for o in outcomes if o.kind == "raised"), None)


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    dist_timeout: float = DIST_TIMEOUT,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` gloo ranks and return what each rank returned.

    Each rank is a fresh child with its own process group (gloo, loopback, one thread) and
    the variables that torchrun sets. What the ranks print is printed here, rank by rank.

    Args:
        world_size: Number of ranks.
        fn: A function that can be imported by name: top level, or a method of a class.
        *args: Its arguments; pickled, so tensors are copied.
        timeout: Seconds after which ranks that have not answered are cut off.
        dist_timeout: Seconds that one collective may take inside a rank.
        env: Extra environment variables for the ranks.

    Returns:
        The results in rank order.

    Raises:
        RankFailure: If any rank raised, died or did not answer in time.
        TypeError: If ``fn`` or an argument cannot be pickled.
    """
    try:
        job = pickle.dumps((fn, args))
    except Exception as error:  # pickle raises several kinds
        raise TypeError(f"run_ranks needs an importable function and arguments: {error}") from error
    request = {
        "world_size": world_size,
        "module": getattr(fn, "__module__", None),
        "main_file": getattr(sys.modules["__main__"], "__file__", None),
        "job": job,
        "timeout": timeout,
        "dist_timeout": dist_timeout,
        "env": env or {},
        "path": [os.path.abspath(entry) for entry in sys.path],
        "cwd": os.getcwd(),
    }
    outcomes = _server().ask(request)
    for outcome in outcomes:
        if outcome.output:
            print(f"--- rank {outcome.rank} printed:\n{outcome.output}", file=sys.stderr)
    bad = sorted((o for o in outcomes if o.kind != "returned"), key=Outcome.blame)
    if bad:
        raise RankFailure(_report(world_size, fn, bad, timeout), bad)
    return [pickle.loads(outcome.payload) for outcome in outcomes]


@dataclasses.dataclass
class Outcome:
    """What became of one rank.

    Attributes:
        rank: The rank.
        kind: ``returned``, ``raised``, ``died`` (without a word) or ``silent`` (cut off).
        when: Monotonic time of the end, as the rank itself saw it if it could.
        payload: The pickled result, when it returned.
        text: Traceback, way of dying, or where a silent rank was.
        error_type: Name of the exception class, when it raised.
        output: What it wrote to standard output and standard error.
    """

    rank: int
    kind: str
    when: float
    payload: bytes = b""
    text: str = ""
    error_type: str | None = None
    output: str = ""

    def blame(self) -> tuple[bool, bool, float]:
        """Sort key: causes before victims of a vanished peer, then by time; silent ones last."""
        victim = self.kind == "raised" and bool(VANISHED_PEER.search(self.text))
        return self.kind == "silent", victim, self.when


def _report(world_size: int, fn: Callable[..., Any], bad: list[Outcome], timeout: float) -> str:
    """Compose the message: the first failure whole, every other one after it."""
    name = getattr(fn, "__qualname__", repr(fn))
    lines = []
    for outcome in bad:
        if outcome.kind == "silent":
            title = f"rank {outcome.rank} was silent and was cut off; it was here:"
        else:
            title = f"rank {outcome.rank} {outcome.kind}:"
        lines += [f"=== {title}", outcome.text.rstrip()]
        if outcome.output:
            lines += [f"    --- rank {outcome.rank} printed:", outcome.output.rstrip()]
    silent = [outcome.rank for outcome in bad if outcome.kind == "silent"]
    head = f"rank {bad[0].rank} of {world_size} failed first in {name}"
    if bad[0].kind == "silent":
        head = f"ranks {silent} of {world_size} were silent in {name} after {timeout:g} s"
    elif silent:
        head += f"; silent: {silent}"
    return "\n".join([head, *lines])


# ---------------------------------------------------------------- the caller's side


class _Server:
    """The fork server as its caller sees it: one request, one answer."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self.lock = threading.Lock()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        environment["RANKS_EXPLAIN_ASSERTS"] = "1" if "pytest" in sys.modules else ""
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Its own session: Ctrl-C reaches the caller, who then closes the server's input.
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    def alive(self) -> bool:
        return self.owner == os.getpid() and self.process.poll() is None

    def ask(self, request: dict[str, Any]) -> list[Outcome]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self.lock:
            try:
                _send(self.process.stdin, request)
                answer = _receive(self.process.stdout)
            except BaseException:
                self.close()  # an interrupted conversation cannot be resumed
                raise
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return [Outcome(**fields) for fields in answer]

    def close(self) -> None:
        """End the server, which ends the ranks that it still has."""
        if self.owner != os.getpid():
            return
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


_the_server: _Server | None = None


def _server() -> _Server:
    global _the_server
    if _the_server is None or not _the_server.alive():
        _the_server = _Server()
        atexit.register(_the_server.close)
    return _the_server


def warm_up() -> None:
    """Start the fork server without waiting for it; the first `run_ranks` finds it ready."""
    _server()


def _send(stream: BinaryIO, message: Any) -> None:
    body = pickle.dumps(message)
    stream.write(struct.pack("!Q", len(body)) + body)
    stream.flush()


def _receive(stream: BinaryIO) -> Any:
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError("the fork server ended")
    return pickle.loads(stream.read(struct.unpack("!Q", header)[0]))


# ---------------------------------------------------------------- the server


def _serve() -> None:
    """Answer requests until the caller closes our input."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not end up among the answers
    _preload()
    while True:
        try:
            request = _receive(sys.stdin.buffer)
        except EOFError:
            return
        sys.path[:] = request["path"]
        os.chdir(request["cwd"])
        try:
            _import_and_stay_pristine(request["module"])
            answer: Any = [dataclasses.asdict(outcome) for outcome in _Call(request).run()]
        except Exception:
            answer = "the fork server failed:\n" + traceback.format_exc()
        _send(answers, answer)


def _explain_asserts() -> None:
    """Let a failing `assert` on a rank show its values, as pytest does in its own process."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config([])).mark_rewrite("tests")


def _preload() -> None:
    """Import once what ranks would otherwise import each time."""
    import torch
    import torch._dynamo  # an optimizer's first step imports it
    import torch.distributed.fsdp
    import torch.distributed.optim
    import torch.nn.parallel
    import torch.profiler._cupti_monitor  # the first backward imports it
    import torch.utils.checkpoint

    torch.set_num_threads(1)
    if os.environ.get("RANKS_EXPLAIN_ASSERTS"):
        with contextlib.suppress(Exception):  # pytest's own affair: plain asserts work as well
            _explain_asserts()


def _import_and_stay_pristine(module: str | None) -> None:
    """Import the caller's module here, once, and refuse to go on with threads around."""
    if module not in (None, "__main__"):
        with contextlib.suppress(ImportError):  # the rank will raise it, with its traceback
            importlib.import_module(module)
    tasks = Path("/proc/self/task")
    if tasks.is_dir() and len(list(tasks.iterdir())) > 1:
        raise RuntimeError(f"importing {module} started threads; forking is no longer safe")
    gc.collect()
    gc.freeze()


class _Call:
    """One call of `run_ranks`: fork the ranks, collect what they say, cut off the rest."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.world_size: int = request["world_size"]
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self.stay, self.release = os.pipe()  # a rank that is done stays until this is closed
        self.pids: dict[int, int] = {}
        self.pipes: dict[int, int] = {}
        self.said: dict[int, bytes] = {}
        self.outcomes: dict[int, Outcome] = {}

    def run(self) -> list[Outcome]:
        store_pid, port = self._fork_store()
        try:
            for rank in range(self.world_size):
                self._fork_rank(rank, port)
            self._collect(time.monotonic() + self.request["timeout"])
            self._cut_off_the_silent()
        finally:
            os.close(self.release)
            os.close(self.stay)
            for pid in [*self.pids.values(), store_pid]:
                _end(pid)
            for outcome in self.outcomes.values():
                outcome.output = self._read(f"output-{outcome.rank}")
            self.folder.cleanup()
        return [self.outcomes[rank] for rank in range(self.world_size)]

    def _fork_store(self) -> tuple[int, int]:
        """Start the key-value store in a child of its own: it outlives every rank."""
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        pid = os.fork()
        if pid == 0:
            _become_child(self.release)
            _host_store(listener, port, self.world_size)
        listener.close()
        return pid, port

    def _fork_rank(self, rank: int, port: int) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            _become_child(self.release)
            _be_rank(rank, port, self.request, writer, Path(self.folder.name), self.stay)
        os.close(writer)
        os.set_blocking(reader, False)
        self.pids[rank], self.pipes[rank], self.said[rank] = pid, reader, b""

    def _collect(self, deadline: float) -> None:
        """Read from all ranks at once until all ended, time is up or the caller is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin.buffer, selectors.EVENT_READ, None)
            for rank, pipe in self.pipes.items():
                selector.register(pipe, selectors.EVENT_READ, rank)
            while len(self.outcomes) < self.world_size:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                for key, _ in selector.select(left):
                    if key.data is None:  # the caller waits for us, so this is its end
                        return
                    if self._listen(key.data):
                        selector.unregister(key.fd)
                        os.close(key.fd)
                        if self.outcomes[key.data].kind != "returned":
                            deadline = min(deadline, time.monotonic() + GRACE)

    def _listen(self, rank: int) -> bool:
        """Take in what a rank has said; return whether it has ended."""
        piece = os.read(self.pipes[rank], 1 << 20)
        if piece:
            self.said[rank] += piece
            return False
        try:
            fields = pickle.loads(self.said[rank])
            self.outcomes[rank] = Outcome(rank=rank, **fields)
        except (EOFError, pickle.UnpicklingError):
            self.outcomes[rank] = self._post_mortem(rank)
        return True

    def _post_mortem(self, rank: int) -> Outcome:
        status = _end(self.pids[rank], wait=2.0)
        how = f"exit code {os.waitstatus_to_exitcode(status)}"
        if os.WIFSIGNALED(status):
            how = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        return Outcome(rank, "died", time.monotonic(), text=f"{how}\n{self._read(f'dump-{rank}')}")

    def _cut_off_the_silent(self) -> None:
        silent = [rank for rank in range(self.world_size) if rank not in self.outcomes]
        for rank in silent:
            os.kill(self.pids[rank], signal.SIGUSR1)  # faulthandler writes where it is
        if silent:
            time.sleep(0.3)
        for rank in silent:
            where = self._read(f"dump-{rank}") or "(no answer to the request for a stack)"
            self.outcomes[rank] = Outcome(rank, "silent", time.monotonic(), text=where)

    def _read(self, name: str) -> str:
        path = Path(self.folder.name, name)
        text = path.read_text(errors="replace") if path.exists() else ""
        lines = [line for line in text.splitlines() if not line.startswith("[Gloo] Rank")]
        return "\n".join(lines[-200:])


def _end(pid: int, wait: float = 0.0) -> int:
    """Reap our child ``pid``, by force after ``wait`` seconds; return its status."""
    deadline = time.monotonic() + wait
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return status
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # the group that the child made for itself
        os.kill(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1]
    except (ChildProcessError, ProcessLookupError):
        return 0  # reaped before


# ---------------------------------------------------------------- a rank


def _become_child(release: int) -> None:
    os.setpgid(0, 0)
    os.close(release)
    if sys.platform == "linux":  # die with the server, whatever ends it
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)


def _host_store(listener: socket.socket, port: int, world_size: int) -> None:
    from torch.distributed import TCPStore

    try:
        store = TCPStore(
            "127.0.0.1",
            port,
            world_size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        signal.pause()
        del store
    finally:
        os._exit(0)


def _be_rank(
    rank: int, port: int, request: dict[str, Any], writer: int, folder: Path, stay: int
) -> None:
    """Run the job in this child, say how it ended, and vanish."""
    # Kept open until the process is gone: faulthandler writes into it from a signal handler.
    dump = open(folder / f"dump-{rank}", "w")  # noqa: SIM115
    faulthandler.enable(dump)
    faulthandler.register(signal.SIGUSR1, dump, all_threads=True)
    with open(folder / f"output-{rank}", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    try:
        _start_process_group(rank, port, request)
        fields = {"kind": "returned", "payload": pickle.dumps(_do(request))}
    except BaseException as error:
        fields = {
            "kind": "raised",
            "text": "".join(traceback.format_exception(error)),
            "error_type": type(error).__name__,
        }
    fields["when"] = time.monotonic()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with os.fdopen(writer, "wb") as pipe:
        pickle.dump(fields, pipe)
    if fields["kind"] == "returned":
        # The peers may still be reading what we sent: leaving now would reset the connection.
        # After a failure, on the other hand, leaving is what tells them.
        os.read(stay, 1)
    os._exit(0)  # no clean-up of ours may hide or delay what was said


def _start_process_group(rank: int, port: int, request: dict[str, Any]) -> None:
    import torch.distributed as dist

    size = request["world_size"]
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            **request["env"],
        }
    )
    limit = timedelta(seconds=request["dist_timeout"])
    store = dist.TCPStore("127.0.0.1", port, size, False, wait_for_workers=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)


def _do(request: dict[str, Any]) -> Any:
    if request["module"] == "__main__":  # a script: load its definitions, not its main part
        spec = importlib.util.spec_from_file_location("__ranks_main__", request["main_file"])
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["__main__"] = module
        spec.loader.exec_module(module)
    fn, args = pickle.loads(request["job"])
    with warnings.catch_warnings():
        return fn(*args)


if __name__ == "__main__":
    _serve()
