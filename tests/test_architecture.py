"""The rules that keep `fsdp_ref` readable: imports point down, files and functions stay small."""

import ast
import io
import sys
import tokenize
from pathlib import Path

import pytest

import fsdp_ref

ROOT = Path(fsdp_ref.__file__).parent

# In import order, top first: a module may import only modules that stand below it.
ORDER = (
    "__main__",
    "__init__",
    "checkpoint",
    "fully_sharded",
    "weights",
    "saving",
    "optim_names",
    "optim_state",
    "optim_versions",
    "optim_load",
    "optim_gather",
    "optim_beginning",
    "optim_keys",
    "optim_words",
    "timelines",
    "ledger",
    "traces",
    "inspection",
    "places",
    "replicas",
    "columns",
    "unit_module",
    "wrapper",
    "wrapping",
    "plan",
    "policies",
    "asking",
    "recomputing",
    "unit_arguments",
    "marks",
    "strategies",
    "process_groups",
    "group_requests",
    "rank_words",
    "initialize",
    "deferred",
    "fingerprints",
    "loading",
    "sent_values",
    "local_shards",
    "state_dict",
    "consolidate",
    "checkpoint_files",
    "safetensors_file",
    "small_groups",
    "state_dict_types",
    "full_params",
    "edits",
    "full_grads",
    "votes",
    "grad_norm",
    "optimizer_watch",
    "schedule",
    "backward",
    "structure",
    "copying",
    "exact",
    "copies",
    "buckets",
    "comm_hooks",
    "unit",
    "unit_state",
    "inputs_outputs",
    "registered",
    "stand_ins",
    "flat_param",
    "flat_gradient",
    "leaves",
    "originals",
    "storage",
    "options",
    "precision",
    "row_shards",
    "agreement",
    "collectives",
    "rank_group",
    "layout",
    "states",
    "recording",
    "containers",
    "naming",
    "at_exit",
    "errors",
)
MAX_FILE_LINES = 250
MAX_FUNCTION_LINES = 40
# Calls that move tensor data; only collectives.py may make them.
MOVERS = {
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce"),
    *("all_to_all", "all_to_all_single", "broadcast", "gather", "irecv", "isend", "recv"),
    *("reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    *("scatter", "send", "batch_isend_irecv", "all_gather_object", "broadcast_object_list"),
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def sources() -> dict[str, str]:
    return {path.stem: path.read_text() for path in sorted(ROOT.glob("*.py"))}


def imported_modules(source: str) -> list[tuple[int, str]]:
    """Return line and dotted name of everything imported, wherever it stands in the file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            if base in ("fsdp_ref", "."):
                found += [(node.lineno, f"fsdp_ref.{alias.name}") for alias in node.names]
            else:
                found.append(
                    (node.lineno, base.replace(".", "fsdp_ref.", 1) if node.level else base)
                )
    return found


def upward_imports(files: dict[str, str]) -> list[str]:
    wrong = []
    for name, source in files.items():
        for line, target in imported_modules(source):
            package, _, module = target.partition(".")
            if package != "fsdp_ref":
                continue
            module = module.partition(".")[0] or "__init__"
            if module not in ORDER:
                module = "__init__"  # a name taken from the package itself
            if ORDER.index(module) <= ORDER.index(name):
                wrong.append(f"{name}.py:{line} imports {target}")
    return wrong


def foreign_imports(files: dict[str, str]) -> list[str]:
    return [
        f"{name}.py:{line} imports {target}"
        for name, source in files.items()
        for line, target in imported_modules(source)
        if target.partition(".")[0] not in {"torch", "fsdp_ref", *sys.stdlib_module_names}
    ]


def code_lines(source: str) -> set[int]:
    """Return the numbers of lines that hold code: no comment, no blank, no docstring."""
    quiet = {
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in quiet:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        # A string that stands alone documents what is around it, attributes included.
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if text and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def long_files(files: dict[str, str]) -> list[str]:
    counted = {name: len(code_lines(source)) for name, source in files.items()}
    return [f"{name}.py: {n} code lines" for name, n in counted.items() if n > MAX_FILE_LINES]


def long_functions(files: dict[str, str]) -> list[str]:
    wrong = []
    for name, source in files.items():
        lines = code_lines(source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, Function):
                n = len(lines & set(range(node.lineno, (node.end_lineno or 0) + 1)))
                if n > MAX_FUNCTION_LINES:
                    wrong.append(f"{name}.{node.name}: {n} code lines")
    return wrong


def public_functions(files: dict[str, str]) -> set[str]:
    return {
        node.name
        for source in files.values()
        for node in ast.parse(source).body
        if isinstance(node, Function) and not node.name.startswith("_")
    }


def data_movers(files: dict[str, str]) -> list[str]:
    wrong = []
    for name, source in files.items():
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Attribute) or node.attr not in MOVERS:
                continue
            if isinstance(node.value, ast.Name) and node.value.id in ("dist", "distributed"):
                wrong.append(f"{name}.py:{node.lineno} calls dist.{node.attr}")
    return [entry for entry in wrong if not entry.startswith("collectives.py")]


def test_every_module_has_a_place_in_the_order():
    assert set(sources()) <= set(ORDER)


def test_imports_point_down():
    assert upward_imports(sources()) == []


def test_nothing_but_torch_and_the_standard_library_is_imported():
    assert foreign_imports(sources()) == []


def test_no_module_has_the_name_of_a_public_function():
    files = sources()
    assert set(files) & (public_functions(files) | set(getattr(fsdp_ref, "__all__", ()))) == set()


def test_no_file_is_long():
    assert long_files(sources()) == []


def test_no_function_is_long():
    assert long_functions(sources()) == []


def test_only_collectives_moves_tensor_data_between_ranks():
    assert data_movers(sources()) == []


def test_every_public_name_exists():
    missing = [name for name in fsdp_ref.__all__ if not hasattr(fsdp_ref, name)]
    assert missing == []


@pytest.mark.parametrize(
    "line",
    [
        "import fsdp_ref",
        "import fsdp_ref.schedule",
        "from fsdp_ref import schedule",
        "from fsdp_ref.unit import Unit",
        "from . import wrap",
        "from .unit import Unit",
        "def f():\n    from fsdp_ref.schedule import x",
    ],
)
def test_an_upward_import_would_be_found(line):
    assert len(upward_imports({"unit": line})) == 1


def test_downward_imports_are_fine():
    below = "import torch\nfrom fsdp_ref.layout import FlatLayout\nfrom fsdp_ref import errors"
    assert upward_imports({"unit": below}) == []


def test_the_other_rules_would_notice_too():
    body = '"""Doc.\n\nMore."""\n# comment\n\n' + "x = 1\n" * 251
    assert long_files({"m": body}) == ["m.py: 251 code lines"]
    function = 'def f():\n    """Doc."""\n' + "    x = 1\n" * 40
    assert long_functions({"m": function}) == ["m.f: 41 code lines"]
    assert foreign_imports({"m": "import numpy.linalg"}) == ["m.py:1 imports numpy.linalg"]
    assert data_movers({"unit": "dist.all_reduce(x)"}) == ["unit.py:1 calls dist.all_reduce"]
    assert public_functions({"m": "def wrap(): ...\ndef _hidden(): ..."}) == {"wrap"}
