"""Are snippet files written so that a reader can copy one and run it?"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tools.checks.result import Result
from tools.paths import shown
from tools.prebuild.fragments import PrebuildError, homes
from tools.snippet_files import APIS, SUFFIXES, Snippet, api_file, folders, read_most

MARKER = re.compile(r"^\s*# --8<-- \[(?P<kind>start|end):(?P<name>[\w-]+)\]\s*$")
DEVICE_LINES = (
    'local_rank = int(os.environ["LOCAL_RANK"])',
    'device = torch.device("cuda", local_rank) if torch.cuda.is_available() '
    'else torch.device("cpu")',
)


def check_form(root: Path) -> Result:
    """Check files, sections, device lines, imports and the last line of every snippet."""
    snippets, broken = read_most(root)
    problems = list(broken.values())
    for folder in folders(root):
        problems += missing_files(folder, root)
    for snippet in snippets:
        path = shown(snippet.path, root)
        problems += [f"{path}:{line}: {text}" for line, text in faults(snippet)]
    files = len(snippets) + len(broken)
    return Result(f"{files} files in {len(folders(root))} snippets", problems)


def missing_files(folder: Path, root: Path) -> Iterator[str]:
    """Say which of the three files a folder lacks, and which it has too many."""
    wanted = [api_file(folder, api) for api in APIS]
    missing = [path.name for path in wanted if not path.exists()]
    if missing:
        yield f"{shown(folder, root)}: {', '.join(missing)} missing; show all three APIs"
    for path in sorted(folder.glob("*.py")):
        if path not in wanted:
            names = ", ".join(f"{folder.name}{suffix}.py" for suffix in SUFFIXES.values())
            yield f"{shown(path, root)}:1: no page shows this file; a snippet has {names}"


def faults(snippet: Snippet) -> Iterator[tuple[int, str]]:
    """Yield line and description of everything that is wrong with one file."""
    text = snippet.path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    lines = text.splitlines()
    yield from section_faults(tree, lines)
    yield from process_group_faults(tree)
    yield from import_faults(tree, snippet)
    for wanted in DEVICE_LINES:
        if wanted not in lines:
            yield 1, f"the line `{wanted}` is missing; all snippets choose the device alike"
    if not snippet.command.startswith("torchrun --") or ".." in snippet.command:
        yield 1, "the command must be `torchrun` with options and the file's own name"
    for number, line in enumerate(lines, 1):
        if re.search(r"#\s*\(\d+\)!?\s*$", line):
            yield number, "a page's annotation would be copied into the reader's file; use words"


def section_faults(tree: ast.Module, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Sections are balanced, have one name each, and `body` holds all code."""
    started: dict[str, int] = {}
    ended: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        match = MARKER.match(line)
        if match is None:
            if "--8<--" in line:
                yield number, "not a section marker: `# --8<-- [start:name]` or `[end:name]`"
            continue
        seen = started if match["kind"] == "start" else ended
        if match["name"] in seen:
            yield number, f"section {match['name']} has two {match['kind']}s"
        seen[match["name"]] = number
    for name in sorted(started.keys() | ended.keys()):
        if started.get(name, sys.maxsize) >= ended.get(name, 0):
            where = started.get(name, ended.get(name, 1))
            yield where, f"section {name} needs one start and, below it, one end"
    yield from body_faults(tree, started.get("body", 0), ended.get("body", 0))


def body_faults(tree: ast.Module, start: int, end: int) -> Iterator[tuple[int, str]]:
    """The body begins at the first import and ends after the last statement."""
    code = tree.body[1:]  # the docstring comes first, or the file could not be read
    if not code or not start:
        yield 1, "there is no section `body` around the code; pages show nothing else"
        return
    if not isinstance(code[0], ast.Import | ast.ImportFrom):
        yield code[0].lineno, "code must begin with its imports"
    for statement in code:
        if not start < statement.lineno <= (statement.end_lineno or 0) < end:
            yield statement.lineno, "this code is outside section `body`: a copied page lacks it"


def process_group_faults(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The process group is made without a backend, and destroyed at the very end."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [call for call in calls if dotted(call.func).endswith("init_process_group")]
    if not made:
        yield 1, "call `dist.init_process_group()`"
    for call in made:
        if call.args or any(word.arg == "backend" for word in call.keywords):
            yield call.lineno, "leave the backend out: the snippet runs on CPUs and on GPUs"
    last = tree.body[-1]
    if ast.unparse(last) != "dist.destroy_process_group()":
        yield last.lineno, "the last statement must be `dist.destroy_process_group()`"


def import_faults(tree: ast.Module, snippet: Snippet) -> Iterator[tuple[int, str]]:
    """Only the standard library, torch and (in the reference's file) fsdp_ref are imported."""
    allowed = {"torch", "fsdp_ref"} if snippet.api == "fsdp_ref" else {"torch"}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "."]
        where = getattr(node, "lineno", 1)
        for name in names:
            package = name.partition(".")[0]
            if package not in allowed and package not in sys.stdlib_module_names:
                yield where, f"imports {name}, which the reader's folder may not have"


def dotted(node: ast.expr) -> str:
    """Return a dotted name as text; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        parent = dotted(node.value)
        return f"{parent}.{node.attr}" if parent else ""
    return ""


def check_on_pages(root: Path) -> Result:
    """Check that every snippet is on exactly one page."""
    keys = [f"{folder.parent.name}/{folder.name}" for folder in folders(root)]
    try:
        found = homes(root, keys)
    except PrebuildError as error:
        return Result(f"{len(keys)} snippets", [str(error)])
    problems = [
        f"snippets/{key}:1: no page shows it; add the line "
        f'--8<-- "site/generated/snippets/{key}.md" to a page under site/'
        for key in keys
        if key not in found
    ]
    return Result(f"{len(keys)} snippets on {len(set(found.values()))} pages", problems)
