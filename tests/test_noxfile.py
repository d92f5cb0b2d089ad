"""The commands: they set themselves up once, say what is wrong, and never build quietly."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path
from types import ModuleType

import nox
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
QUIET = {"-q", "--quiet", "-qq"}


@pytest.fixture
def noxfile(tmp_path: Path) -> ModuleType:
    """The noxfile, loaded from a folder of its own, so that no test touches the real .nox."""
    for name in ("noxfile.py", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    specification = importlib.util.spec_from_file_location("noxfile", tmp_path / "noxfile.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    nox.registry.reset()  # or each loading would warn that it declares the commands again
    specification.loader.exec_module(module)
    return module


# --- The trap that would switch strict builds off -------------------------------------------------


def quiet_builds(source: str) -> list[int]:
    """Return the lines of statements that name mkdocs or mike together with a quiet option."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or hasattr(node, "body"):
            continue
        inside = list(ast.walk(node))
        words = {
            n.value for n in inside if isinstance(n, ast.Constant) and isinstance(n.value, str)
        }
        names = {n.id for n in inside if isinstance(n, ast.Name)}
        builder = {word for word in words | names if word in {"mkdocs", "mike"}}
        if builder and QUIET & words:
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    "source",
    [
        'run(session, "-m", "mkdocs", "build", "-q")',
        'mike(folder, "--quiet", "deploy")',
        'command = ["mike", "-q", "deploy"]',
        'def build():\n    run(["mkdocs", "build", *["-qq"]])',
    ],
)
def test_a_quiet_build_would_be_noticed(source: str):
    assert quiet_builds(source)


def test_mkdocs_and_mike_are_never_quiet():
    sources = [ROOT / "noxfile.py", *(ROOT / "tools").rglob("*.py")]
    found = {path.name: quiet_builds(path.read_text()) for path in sources}
    assert {name: lines for name, lines in found.items() if lines} == {}

    shell = (ROOT / ".ci" / "run").read_text()
    assert not re.search(r"\b(mkdocs|mike)\b.*\s(-q+|--quiet)\b", shell)


def test_no_fork_of_mkdocs_is_installed_for_mike_to_prefer():
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("properdocs")


# --- What is installed ----------------------------------------------------------------------------


def pins() -> dict[str, str]:
    """Return constraints.txt as package and version; a line that pins nothing is an error."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            (version,) = requirement.specifier
            assert version.operator == "=="
            found[canonicalize_name(requirement.name)] = version.version
    return found


def installed_closure() -> dict[str, str]:
    """Return every installed package that the project or one of its extras brings along."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    waiting = [Requirement(text) for group in (project["dependencies"], *extras) for text in group]
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        # A CUDA build of torch states the exact release of each of these by itself.
        if name.startswith(("nvidia-", "cuda-", "triton")):
            continue
        key = (name, frozenset(requirement.extras))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            found.setdefault(name, "not installed")
            continue
        if key in seen:
            continue
        seen.add(key)
        found[name] = distribution.version.partition("+")[0]
        for text in distribution.requires or []:
            needed = Requirement(text)
            environments = [{"extra": extra} for extra in ("", *requirement.extras)]
            if needed.marker is None or any(map(needed.marker.evaluate, environments)):
                waiting.append(needed)
    return found


def test_everything_the_project_brings_along_is_pinned():
    assert sorted(set(installed_closure()) - set(pins())) == []


def test_every_pinned_release_accepts_the_oldest_python_that_is_promised():
    oldest = "3.11.0"
    refused = {}
    for name, version in installed_closure().items():
        if version != "not installed":
            needed = metadata.metadata(name)["Requires-Python"] or ""
            if oldest not in SpecifierSet(needed):
                refused[name] = needed
    assert refused == {}


def test_torch_is_pinned_without_saying_where_it_comes_from():
    assert pins()["torch"] == "2.13.0"


def test_building_the_package_needs_no_torch():
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert [Requirement(text).name for text in required] == ["setuptools"]


# --- The stamp: what makes a second run install nothing -------------------------------------------


def test_the_stamp_stays_when_only_tool_settings_change(noxfile: ModuleType, tmp_path: Path):
    before = noxfile.contents_wanted()
    pyproject = tmp_path / "pyproject.toml"
    pyproject.write_text(pyproject.read_text().replace("line-length = 100", "line-length = 90"))
    assert noxfile.contents_wanted() == before


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("constraints.txt", "mkdocs==1.6.1", "mkdocs==1.6.0"),
        ("pyproject.toml", '"torch>=2.13"', '"torch>=2.14"'),
        ("pyproject.toml", "setuptools>=77", "setuptools>=78"),
    ],
)
def test_the_stamp_changes_with_what_should_be_installed(
    noxfile: ModuleType, tmp_path: Path, name: str, old: str, new: str
):
    before, path = noxfile.contents_wanted(), tmp_path / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert noxfile.contents_wanted() != before


def test_an_environment_made_in_another_folder_is_deleted_and_one_made_here_is_kept(
    noxfile: ModuleType, tmp_path: Path
):
    noxfile.ENV.mkdir(parents=True)
    noxfile.STAMP.write_text(noxfile.contents_wanted())
    noxfile.forget_moved_environment()
    assert noxfile.ENV.is_dir()

    moved = {**json.loads(noxfile.STAMP.read_text()), "root": str(tmp_path / "before the move")}
    noxfile.STAMP.write_text(json.dumps(moved))
    noxfile.forget_moved_environment()
    assert not noxfile.ENV.exists()


# --- Starting without nox -------------------------------------------------------------------------


def test_without_pip_the_answer_names_the_package_to_install(tmp_path: Path):
    venv.create(tmp_path / "bare", with_pip=False)
    for name in ("noxfile.py", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)

    bare = str(tmp_path / "bare" / "bin" / "python")
    done = subprocess.run(
        [bare, "noxfile.py", "-s", "tests"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert "sudo apt install python3-pip" in done.stderr
    assert bare in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".nox").exists()


def test_a_finished_launcher_is_used_as_it_is(noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch):
    noxfile.LAUNCHER.mkdir(parents=True)
    (noxfile.LAUNCHER / "ready").write_text(noxfile.pinned("nox"))

    def refuse(*command, **options):
        raise AssertionError(f"ran {command}")

    monkeypatch.setattr(noxfile.subprocess, "run", refuse)
    noxfile.make_launcher(Path(sys.executable))

    (noxfile.LAUNCHER / "ready").write_text("nox==2001.1.1")
    with pytest.raises(AssertionError, match="pip"):
        noxfile.make_launcher(Path(sys.executable))


def test_an_old_python_is_refused_in_one_line(noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(noxfile.sys, "version_info", (3, 10, 4))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11 or newer, and .* is 3\.10\.4"):
        noxfile.require_python()


def test_a_package_that_is_not_pinned_is_named(noxfile: ModuleType):
    with pytest.raises(SystemExit, match="does not pin flit"):
        noxfile.pinned("flit")


# --- Serving --------------------------------------------------------------------------------------


def test_a_taken_port_is_seen_and_a_released_one_is_free(noxfile: ModuleType):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not noxfile.port_is_free(port)
    assert noxfile.port_is_free(port)


def test_the_port_can_be_chosen(noxfile: ModuleType):
    assert noxfile.port_of(["--build-only"]) == 8000
    assert noxfile.port_of(["--port", "8123"]) == 8123
    for wrong in (["--port"], ["--port", "http"]):
        with pytest.raises(SystemExit, match="needs a number"):
            noxfile.port_of(wrong)


# --- What the documents say about the commands ----------------------------------------------------


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_documents_name_only_commands_that_exist(noxfile: ModuleType, document: str):
    text = (ROOT / document).read_text()
    lines = re.findall(r"(?:noxfile\.py|nox) -s ([a-z -]+?)(?: -- |[^a-z -]|$)", text, re.MULTILINE)
    named = {name for line in lines for name in line.split()}
    assert named, f"{document} names no command"
    assert named <= set(nox.registry.get())


def test_ci_calls_the_test_command_of_the_readme():
    command = "python3 noxfile.py -s tests docs-test"
    assert f"\n{command}\n" in (ROOT / "README.md").read_text()
    assert command in (ROOT / ".ci" / "run").read_text()


def test_the_ci_script_is_valid_and_can_be_executed():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


TOOLS_OF_CI = ("bash", "dirname", "env", "grep", "head", "id", "mktemp", "rm", "tee")


def run_ci_with(python3: str, folder: Path, **stand_ins: str) -> subprocess.CompletedProcess[str]:
    """Run a copy of the CI script in which `python3 noxfile.py` is a stand-in, as others may be."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    programs = folder / "bin"
    programs.mkdir()
    for name in TOOLS_OF_CI:
        (programs / name).symlink_to(shutil.which(name))
    # Nothing else of this machine is found, and so nothing is installed on it.
    for name, script in {"python3": python3, "apt-get": ":", "sudo": ":", **stand_ins}.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": str(programs)}
    command = [str(programs / "bash"), str(folder / ".ci" / "run")]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


SUMMARY = "==== 12 passed, 1 skipped in 3.40s ===="


def test_ci_closes_with_the_summary_of_the_tests_and_names_each_part(tmp_path: Path):
    tests = f'case "$*" in *tests*) echo "{SUMMARY}";; esac; echo later'
    done = run_ci_with(tests, tmp_path, chromium=":")
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[-1] == SUMMARY
    for part in (
        "set-up",
        "lint",
        "types",
        "tests and docs-test",
        "docs-versions",
        "docs-browser",
        "in all",
    ):
        assert any(re.fullmatch(rf" *\d+ s  {part}", line) for line in lines), part


def test_ci_installs_a_browser_where_it_may_and_says_so_where_it_may_not(tmp_path: Path):
    tests = f'echo "{SUMMARY}"'
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    installs = 'case "$*" in *install*) echo "#!/bin/sh" > "${0%/*}/chromium";; esac; '
    installs += 'case "$*" in *install*) /bin/chmod 755 "${0%/*}/chromium";; esac'
    done = run_ci_with(tests, tmp_path / "a", **{"apt-get": installs, "sudo": 'shift; "$@"'})
    assert re.search(r"^ *\d+ s  docs-browser$", done.stdout, re.MULTILINE), done.stdout
    assert "SKIPPED" not in done.stdout
    done = run_ci_with(tests, tmp_path / "b", **{"apt-get": "exit 100"})
    assert done.returncode == 0
    assert "SKIPPED  docs-browser: no chromium here" in done.stdout


def test_ci_fails_when_any_part_fails_and_still_runs_the_others(tmp_path: Path):
    done = run_ci_with(f'case "$*" in *lint*) exit 3;; *tests*) echo "{SUMMARY}";; esac', tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert lines[-2:] == ["FAILED: lint (exit 3)", SUMMARY]
    assert any(line.endswith("docs-versions") for line in lines)


@pytest.mark.parametrize(("ci", "code"), [("", 0), ("true", 1)])
def test_without_chromium_the_browser_session_says_so_and_fails_only_in_ci(ci: str, code: int):
    programs = str(Path(sys.executable).parent)
    done = subprocess.run(
        [sys.executable, "-m", "nox", "-f", str(ROOT / "noxfile.py"), "-s", "docs-browser", "-R"],
        cwd=ROOT,
        env={**os.environ, "PATH": programs, "CI": ci},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert "there is no `chromium` on this machine" in done.stderr


def test_ci_does_not_pass_when_no_test_is_known_to_have_run(tmp_path: Path):
    done = run_ci_with("echo fine", tmp_path)
    assert done.returncode == 1
    assert "no summary line" in done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_readme_example_trains_on_two_ranks(tmp_path: Path):
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    # The last line but one is where the group ends; say what was trained just before.
    report = (
        "if dist.get_rank() == 0:\n    print(sorted(type(m).__name__ for m in model.modules()))\n"
    )
    end = "dist.destroy_process_group()"
    (tmp_path / "train.py").write_text(example.replace(end, report + end))

    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *command, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("FullyShardedDataParallel") == 2
