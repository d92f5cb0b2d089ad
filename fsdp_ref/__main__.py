"""The command line: `python -m fsdp_ref consolidate CHECKPOINT OUT.safetensors`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fsdp_ref.checkpoint_files import open_checkpoint
from fsdp_ref.consolidate import Progress, chosen_tensors, consolidate_checkpoint
from fsdp_ref.errors import FSDPError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: What stands behind `python -m fsdp_ref`; by default what was typed.

    Returns:
        0, or 1 after an error, which is printed.
    """
    given = _parser().parse_args(arguments)
    try:
        checkpoint = open_checkpoint(Path(given.checkpoint))
        kinds = [tensor.kind for tensor in chosen_tensors(checkpoint, given.key).values()]
        with _progress(len(kinds), sum(kind.nbytes for kind in kinds)) as progress:
            written = consolidate_checkpoint(
                given.checkpoint,
                given.out,
                key=given.key,
                max_shard_size=given.max_shard_size,
                progress=progress,
            )
    except (FSDPError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for path in written:
        print(path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fsdp_ref")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "Write whole weights from a checkpoint of torch.distributed.checkpoint."
    command = commands.add_parser("consolidate", help=about, description=about)
    command.add_argument("checkpoint", help="the folder that was saved")
    command.add_argument("out", help="the file to write, such as model.safetensors")
    command.add_argument("--key", help="the key of the model in what was saved; default: model")
    command.add_argument(
        "--max-shard-size", default="5GB", help="split into files no larger; default: %(default)s"
    )
    return parser


@contextmanager
def _progress(count: int, nbytes: int) -> Iterator[Progress]:
    """Show how far it is: a bar where `rich` is installed and somebody looks, lines otherwise."""
    bar = _rich() if sys.stderr.isatty() else None
    if bar is None:
        yield _lines(count)
        return
    columns = (bar.TextColumn("{task.description}"), bar.BarColumn(), bar.DownloadColumn())
    console = importlib.import_module("rich.console").Console(stderr=True)
    with bar.Progress(*columns, console=console) as shown:
        task = shown.add_task("consolidating", total=nbytes)
        yield lambda name, done: shown.update(task, advance=done, description=name)


def _rich() -> Any:
    try:
        return importlib.import_module("rich.progress")
    except ImportError:
        return None


def _lines(count: int) -> Callable[[str, int], None]:
    done = 0

    def show(name: str, nbytes: int) -> None:
        nonlocal done
        done += 1
        print(f"{done} of {count}: {name}", file=sys.stderr)

    return show


if __name__ == "__main__":
    sys.exit(main())
