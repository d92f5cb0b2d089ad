"""What a snippet file says about itself: its command, its promised output, its body.

A snippet is a folder `snippets/<page>/<name>/` with one file per API. Everything that the
runner and the pages need to know stands in the file's docstring, so that a reader who has
only that file knows it as well.
"""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.paths import shown

APIS = ("fsdp_ref", "torch FSDP1", "torch FSDP2")
"""The tabs, in the order in which every page shows them."""

SUFFIXES = {"fsdp_ref": "", "torch FSDP1": "_torch_fsdp1", "torch FSDP2": "_torch_fsdp2"}

PROMISE_HEADING = "Expected output:"
COMMAND = re.compile(r"^\s+(torchrun\s.*\S)\s*$")


class SnippetError(Exception):
    """A snippet file is not written as the pages and the runner need it."""


@dataclass(frozen=True)
class Snippet:
    """One snippet file, read."""

    page: str
    name: str
    api: str
    path: Path
    title: str
    why: str
    notes: tuple[str, ...]
    command: str
    promise: tuple[str, ...]
    promise_line: int

    @property
    def key(self) -> str:
        """The folder's name as tips and the command line write it: `page/name`."""
        return f"{self.page}/{self.name}"

    @property
    def label(self) -> str:
        """The file's name for progress lines and failures."""
        return f"{self.page}/{self.path.name}"

    @property
    def processes(self) -> int:
        """Processes per node, from the command."""
        return int(option(self.command, "nproc-per-node", "1"))

    @property
    def ranks(self) -> int:
        """Processes on all nodes together."""
        return self.processes * self.nodes

    @property
    def nodes(self) -> int:
        """Nodes, from the command; each is one agent on this machine."""
        return int(option(self.command, "nnodes", "1"))

    @property
    def needs_gpu(self) -> bool:
        """Whether the snippet's name says that it needs a GPU."""
        return "gpu" in self.name.split("_")


def option(command: str, name: str, default: str) -> str:
    """Return the value of one option of a torchrun command, in either spelling.

    Args:
        command: The whole command line.
        name: The option without dashes in front, words joined by dashes.
        default: What torchrun assumes when the option is absent.

    Returns:
        The value as text.
    """
    words = [
        word.replace("_", "-") if word.startswith("--") else word for word in shlex.split(command)
    ]
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == f"--{name}":
            return following
        if word.startswith(f"--{name}="):
            return word.partition("=")[2]
    return default


def folders(root: Path) -> list[Path]:
    """Return every snippet folder, sorted."""
    found = (root / "snippets").glob("*/*")
    return sorted(path for path in found if path.is_dir() and path.name != "__pycache__")


def api_file(folder: Path, api: str) -> Path:
    """Return where the folder's file for one API belongs."""
    return folder / f"{folder.name}{SUFFIXES[api]}.py"


def read_all(root: Path) -> list[Snippet]:
    """Read every snippet file that exists, in the order of the pages' tabs.

    Args:
        root: The repository.

    Returns:
        One entry per file.

    Raises:
        SnippetError: If a file cannot be read as a snippet; all such files are named.
    """
    snippets, broken = read_most(root)
    if broken:
        raise SnippetError("\n".join(broken.values()))
    return snippets


def read_most(root: Path) -> tuple[list[Snippet], dict[Path, str]]:
    """Read every snippet file, and say what is wrong with those that cannot be read.

    Args:
        root: The repository.

    Returns:
        The readable files, and a message for each other one.
    """
    snippets: list[Snippet] = []
    broken: dict[Path, str] = {}
    for path, folder, api in [(api_file(f, api), f, api) for f in folders(root) for api in APIS]:
        if not path.exists():
            continue
        try:
            snippets.append(read(folder, api))
        except SnippetError as error:
            broken[path] = str(error).replace(str(path), shown(path, root))
        except SyntaxError as error:
            broken[path] = f"{shown(path, root)}:{error.lineno}: not valid Python: {error.msg}"
    return snippets, broken


def read(folder: Path, api: str) -> Snippet:
    """Read the file of one API in a snippet folder.

    Args:
        folder: `snippets/<page>/<name>`.
        api: One of `APIS`.

    Returns:
        What the file says about itself.

    Raises:
        SnippetError: If the docstring lacks its title, command or promise.
    """
    path = api_file(folder, api)
    docstring, first_line = docstring_of(path)
    lines = docstring.splitlines()
    command = next((match[1] for line in lines if (match := COMMAND.match(line))), None)
    if command is None:
        raise SnippetError(f"{path}:1: the docstring has no indented `torchrun ...` command")
    command = " ".join(command.split())  # a docstring swallows a backslash at the end of a line
    if shlex.split(command)[-1] != path.name:
        raise SnippetError(f"{path}:1: the command must end with {path.name}: {command}")
    if fault := command_fault(command):
        raise SnippetError(f"{path}:1: {fault}: {command}")
    start, promise = promised(lines, path)
    prose = [part.replace("\n", " ").strip() for part in docstring.strip().split("\n\n")]
    why = [part for part in prose[1:] if not part.startswith(("Run ", PROMISE_HEADING, "torchrun"))]
    return Snippet(
        page=folder.parent.name,
        name=folder.name,
        api=api,
        path=path,
        title=prose[0],
        why=sentence(why[0].removeprefix("Why: ")) if why else "",
        notes=tuple(before_the_command(prose)[1:]),
        command=command,
        promise=tuple(promise),
        promise_line=first_line + start + continued_lines(path),
    )


def continued_lines(path: Path) -> int:
    """Count the lines of a command that goes on after a backslash, which the docstring swallows."""
    head = path.read_text(encoding="utf-8").partition(PROMISE_HEADING)[0]
    return head.count("\\\n") if not re.match(r"\s*[rR]", head) else 0


def command_fault(command: str) -> str:
    """Say why the runner cannot take a command as the statement of nodes and processes.

    Args:
        command: A torchrun command line.

    Returns:
        What is wrong and what to write; empty if nothing is.
    """
    for name in ("nnodes", "nproc-per-node"):
        value = option(command, name, "1")
        if not value.isdigit() or int(value) < 1:
            return f"--{name} must be one number, not {value!r}, for the runner to count ranks"
    if option(command, "nnodes", "1") == "1":
        return ""
    if "--standalone" in command:
        return "--standalone means one host; leave it out or leave out --nnodes"
    meeting = option(command, "rdzv-backend", "static"), option(command, "rdzv-endpoint", "")
    if meeting[0] != "c10d" or not re.fullmatch(r"localhost:\d+", meeting[1]):
        return (
            "several nodes need a place to meet: write `--rdzv-backend c10d "
            "--rdzv-endpoint localhost:PORT`"
        )
    return ""


def before_the_command(prose: list[str]) -> list[str]:
    """Return the paragraphs after the title that explain, without command and promise."""
    return [*itertools.takewhile(lambda part: not part.startswith("Run "), prose[1:])]


def sentence(text: str) -> str:
    """Begin a text with a capital letter."""
    return text[:1].upper() + text[1:]


def docstring_of(path: Path) -> tuple[str, int]:
    """Return a file's docstring as written (not dedented) and the line it starts on.

    Args:
        path: A Python file.

    Returns:
        The text and its first line's number.

    Raises:
        SnippetError: If the file does not start with a docstring.
    """
    body = ast.parse(path.read_text(encoding="utf-8")).body
    first = body[0] if body else None
    if not (isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)):
        raise SnippetError(f"{path}:1: the file does not start with a docstring")
    if not isinstance(first.value.value, str):
        raise SnippetError(f"{path}:1: the file does not start with a docstring")
    return first.value.value, first.lineno


def promised(lines: list[str], path: Path) -> tuple[int, list[str]]:
    """Cut the promised output out of a docstring's lines.

    Args:
        lines: The docstring's lines.
        path: The file, for the message.

    Returns:
        The index of the first promised line, and the lines without their indentation.

    Raises:
        SnippetError: If there is no `Expected output:` with indented lines under it.
    """
    heading = next((i for i, line in enumerate(lines) if line.strip() == PROMISE_HEADING), None)
    if heading is None:
        raise SnippetError(f"{path}:1: the docstring has no line '{PROMISE_HEADING}'")
    start, stop = block_after(heading, lines)
    if start == stop:
        raise SnippetError(f"{path}:{heading + 1}: no indented line after '{PROMISE_HEADING}'")
    return start, dedented(lines[start:stop])


def block_after(heading: int, lines: list[str]) -> tuple[int, int]:
    """Return the range of the indented lines after a heading, without blank lines around."""
    start = heading + 1
    while start < len(lines) and not lines[start].strip():
        start += 1
    stop = start
    while stop < len(lines) and (not lines[stop].strip() or lines[stop].startswith(" ")):
        stop += 1
    while stop > start and not lines[stop - 1].strip():
        stop -= 1
    return start, stop


def dedented(lines: Iterable[str]) -> list[str]:
    """Drop the four spaces that set a block apart, and blanks at the ends of lines."""
    return [line.removeprefix("    ").rstrip() for line in lines]


def rewrite_promise(snippet: Snippet, output: Iterable[str]) -> None:
    """Put what a run printed in the place of what the file promised.

    Args:
        snippet: The file, as last read.
        output: The printed lines.
    """
    text = snippet.path.read_text(encoding="utf-8")
    raw = re.match(r"\s*[rR]", text) is not None
    lines = text.splitlines()
    heading = next(i for i, line in enumerate(lines) if line.strip() == PROMISE_HEADING)
    start, stop = block_after(heading, lines)
    if start == heading + 1:  # keep the blank line that Markdown needs
        lines.insert(start, "")
        start, stop = start + 1, stop + 1
    escaped = [line if raw else line.replace("\\", "\\\\") for line in output]
    lines[start:stop] = [f"    {line}".rstrip() for line in escaped]
    snippet.path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def chosen(snippets: list[Snippet], names: Iterable[str], root: Path) -> list[Snippet]:
    """Return the snippets that the names on a command line mean.

    Args:
        snippets: All of them.
        names: Pages (`wrapping`), snippets (`wrapping/policies`) or files.
        root: The repository, to understand paths.

    Returns:
        The chosen files in page order; all of them when no name is given.

    Raises:
        SnippetError: If a name means nothing.
    """
    names = list(names)
    for name in names:
        if not any(means(name, snippet, root) for snippet in snippets):
            known = ", ".join(sorted({snippet.page for snippet in snippets}))
            raise SnippetError(f"no page or snippet is called '{name}'. Pages: {known}")
    picked = [s for s in snippets if any(means(name, s, root) for name in names)]
    return picked if names else snippets


def means(name: str, snippet: Snippet, root: Path) -> bool:
    """Tell whether a name on the command line means this snippet file."""
    name = name.removeprefix("./").removeprefix("snippets/").rstrip("/")
    path = shown(snippet.path, root).removeprefix("snippets/")
    page = name.removesuffix(".md").rpartition("/")[2].replace("-", "_")
    return (
        name in (snippet.page, snippet.name, snippet.key, snippet.label, path, snippet.path.name)
        or page == snippet.page
    )
