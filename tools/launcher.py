"""Runs snippets under torchrun's own agent without paying for `import torch` each time.

This file is started as a script by the snippet runner. It imports torch and nothing else,
then waits. For each request it forks: the child becomes the leader of a new process group,
moves into the given folder and starts torchrun's agent with start method *fork*, so every
rank begins with torch loaded and nothing more, as after `import torch` in a fresh Python.
Part of torch is its compiler, which no snippet uses. The first optimizer of a process and
`fully_shard` load it all the same, in each rank, and that took most of the time of their runs.

Requests and answers are lines of JSON on standard input and output.
"""

import faulthandler
import json
import os
import signal
import sys
import time
import traceback
import types

import torch  # loaded once, inherited by every rank
import torch._dynamo  # what the first optimizer of a process would load


def serve() -> None:
    """Answer requests until standard input closes."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a stray print must not be taken for an answer
    while line := sys.stdin.readline():
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            run_agents(request)
        replies.write(json.dumps({"started": child}) + "\n")
        _, status = os.waitpid(child, 0)
        replies.write(json.dumps({"ended": os.waitstatus_to_exitcode(status)}) + "\n")


def run_agents(request: dict) -> None:
    """Become the leader of a process group, run one agent per node, and leave."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.update(request["environment"])
    if request["nodes"] == 1:
        leave(run_agent(request, 0))
    agents = {}
    for node in range(request["nodes"]):
        child = os.fork()
        if child == 0:
            leave(run_agent(request, node))
        agents[child] = node
    code = wait_for(agents, request["grace"])
    if code != 0:  # an agent that was killed leaves its ranks behind
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    leave(code)


def wait_for(agents: dict, grace: float) -> int:
    """Wait for one agent per node; once one has failed, the others have so many seconds left.

    Ranks on other nodes notice the failure only when they next wait for a rank that is gone.
    """
    until, code = None, 0
    while agents:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in agents:
            del agents[child]
            code = code or os.waitstatus_to_exitcode(status)
            until = until or (code and time.monotonic() + grace)
        elif until and time.monotonic() > until:
            for pid in agents:
                os.kill(pid, signal.SIGTERM)
            until = None
        else:
            time.sleep(0.02)
    return code


def run_agent(request: dict, node: int) -> int:
    """Run torchrun's agent for one node; return the exit status a shell would see."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logs = os.path.join(request["logs"], f"node{node}")
    os.mkdir(logs)
    log = os.open(os.path.join(logs, "agent.stderr"), os.O_WRONLY | os.O_CREAT)
    for stream, descriptor in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
        os.dup2(descriptor, stream)
    config = LaunchConfig(
        min_nodes=request["nodes"],
        max_nodes=request["nodes"],
        nproc_per_node=request["processes"],
        run_id=request["run_id"],
        rdzv_backend="c10d",
        rdzv_endpoint=request["endpoint"],
        rdzv_configs={"timeout": request["limit"]},
        max_restarts=0,
        monitor_interval=0.02,
        start_method="fork",
        local_addr="localhost",
        shutdown_timeout=3,
    )
    try:
        elastic_launch(config, run_rank)(request["file"], logs, request["limit"])
    except ChildFailedError:
        return 1  # each rank has written its own traceback
    except BaseException:
        traceback.print_exc()
        return 2
    return 0


def run_rank(file: str, logs: str, limit: float) -> None:
    """Run the snippet as `__main__`, its output and errors kept apart from other ranks'."""
    rank = os.environ["RANK"]
    for stream, kind in ((1, "stdout"), (2, "stderr")):
        path = os.path.join(logs, f"rank{rank}.{kind}")
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    faulthandler.enable()
    # When the time is nearly up: where is this rank? A hang then names its line.
    faulthandler.dump_traceback_later(max(limit - 1.0, 0.5))
    module = types.ModuleType("__main__")
    module.__file__ = file
    sys.modules["__main__"] = module
    sys.argv = [file]
    sys.path.insert(0, os.getcwd())
    torch.seed()  # as in a fresh process: without a seed, ranks draw different numbers
    with open(file, encoding="utf-8") as source:
        code = compile(source.read(), file, "exec")
    try:
        exec(code, module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:
        frames = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, frames)
        sys.stderr.flush()
        sys.stdout.flush()
        sys.exit(1)
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()


def leave(code: int) -> None:
    """End this process without running what the parent registered for its own end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    for path in sys.argv[1:]:
        sys.path.insert(0, path)
    serve()
