"""Deploys versions of the site, and checks that they stay apart.

    python -m tools.versions check
    python -m tools.versions tree FOLDER
    python -m tools.versions deploy VERSION [ALIAS]

`check` works on a temporary clone of this checkout, with uncommitted changes laid over it: there it
deploys `dev` and the changelog's newest release, one page of which differs, and looks at the
result. `tree` keeps these two versions in a folder, for a browser. `deploy` writes to the local
branch gh-pages. Nothing here pushes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote

from tools import site_tree, wheel
from tools.changelog import newest_release, releases
from tools.paths import ROOT

BRANCH = "gh-pages"
DEVELOPMENT = "dev"
LATEST = "latest"
CHANGED_PAGE = "changelog"
DOWNLOAD = "shard_a_model.py"
MARK = "This sentence stands only in the release that the check has made."
OWN_IDENTITY = {
    f"GIT_{role}_{part}": value
    for role in ("AUTHOR", "COMMITTER")
    for part, value in (("NAME", "fsdp-ref check"), ("EMAIL", "check@fsdp-ref.example"))
}


class VersionsError(Exception):
    """What is wrong with the versioned site, or with the request, in words for the caller."""


# --- Deploying: the same for the check and the real thing ----------------------------------------


def run(command: Sequence[str], folder: Path, **environment: str) -> str:
    """Run a command in a folder; return what it printed, or raise with all of it."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise VersionsError(f"`{' '.join(command)}` failed:\n{done.stdout}")
    return done.stdout


def mike(folder: Path, *arguments: str, **environment: str) -> str:
    """Run mike, never quietly: its quiet mode would also switch off the strict build."""
    command = [str(Path(sys.executable).with_name("mike")), arguments[0], "-b", BRANCH]
    return run([*command, *arguments[1:]], folder, **environment)


def deploy_version(folder: Path, version: str, aliases: Sequence[str], **environment: str) -> None:
    """Build the site of `folder`, with its wheel, and commit it to the folder's own gh-pages."""
    environment = {wheel.SITE_VERSION: version, **environment}
    run([sys.executable, "-m", "tools.prebuild"], folder, **environment)
    mike(folder, "deploy", "--update-aliases", version, *aliases, **environment)


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print what is being done, then how long it took."""
    print(f"{what} ...", flush=True)
    start = time.monotonic()
    yield
    print(f"  done in {time.monotonic() - start:.1f} s", flush=True)


def require_mkdocs() -> None:
    """Refuse to go on where mike would silently build with a fork of mkdocs."""
    try:
        metadata.version("properdocs")
    except metadata.PackageNotFoundError:
        return
    raise VersionsError(
        "properdocs is installed, and mike would build with it in place of mkdocs. Remove the "
        "package that brought it: `pip show properdocs` names it under 'Required-by'."
    )


# --- The check ------------------------------------------------------------------------------------


def clone_with_changes(root: Path, clone: Path) -> None:
    """Clone a checkout without its remotes, and lay its uncommitted files over the clone."""
    run(["git", "clone", "--quiet", str(root), str(clone)], root)
    run(["git", "remote", "remove", "origin"], clone)

    def listed(*options: str) -> list[str]:
        command = ["git", "ls-files", "-z", *options]
        return [name for name in run(command, root).split("\0") if name]

    for name in listed("--cached", "--others", "--exclude-standard"):
        if (root / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, clone / name)
    for name in listed("--deleted"):
        (clone / name).unlink(missing_ok=True)
    if (root / "build" / "cache").is_dir():  # recorded runs, kept under a hash of their sources
        shutil.copytree(root / "build" / "cache", clone / "build" / "cache")


def extract(clone: Path, tree: Path) -> None:
    """Lay the files of the clone's gh-pages branch out in a folder."""
    tree.mkdir()
    archive = tree.with_suffix(".tar")
    run(["git", "archive", "--output", str(archive), BRANCH], clone)
    run(["tar", "--extract", "--file", str(archive)], tree)


def check_tree(tree: Path, release: str) -> Iterator[str]:
    """Yield one line per thing that holds of the extracted branch.

    Raises:
        VersionsError: At the first thing that does not hold.
    """
    listed = site_tree.listed_versions(tree)
    _expect(listed, {DEVELOPMENT: [], release: [LATEST]}, "versions.json lists")
    yield f"selector: {DEVELOPMENT}, {release} ({LATEST})"

    redirect = (tree / "index.html").read_text()
    _expect(f'"{LATEST}/"' in redirect, True, f"index.html leads to {LATEST}/:")
    _expect((tree / LATEST).resolve().name, release, f"{LATEST} is")
    yield f"default: / leads to {LATEST}/, which is {release}"

    sets = {name: _page_names(tree / name) for name in listed}
    _expect(sets[release], sets[DEVELOPMENT], f"the pages of {release}, beside those of dev, are")
    for name in listed:
        found = list(site_tree.faults(tree / name))
        if found:
            raise VersionsError("\n".join([f"{len(found)} wrong addresses:", *found[:20]]))
    yield f"addresses: {len(sets[release])} pages a version, each stays in its version"

    marked = {name for name in listed if MARK in _changed_page(tree / name).read_text()}
    _expect(marked, {release}, f"versions whose {CHANGED_PAGE} page has the changed sentence:")
    yield f"separate: a change to {CHANGED_PAGE} is in {release} and not in {DEVELOPMENT}"


def _expect(found: object, expected: object, what: str) -> None:
    if found != expected:
        raise VersionsError(f"{what} {found!r}; expected {expected!r}")


def _page_names(version: Path) -> list[str]:
    return [str(page.relative_to(version)) for page in site_tree.pages(version)]


def _changed_page(version: Path) -> Path:
    return version / CHANGED_PAGE / "index.html"


def offered_wheel(tree: Path, version: str) -> Path:
    """Return the one wheel that a version of the site offers on its home page."""
    wanted = wheel.wheel_version(wheel.project_version(ROOT), version)
    found = list((tree / version).rglob("*.whl"))
    names = [path.name for path in found]
    _expect(names, [f"fsdp_ref-{wanted}-py3-none-any.whl"], f"wheels in version {version}:")
    home = site_tree.references(tree / version / "index.html")
    linked = any(unquote(reference.address).endswith(names[0]) for reference in home)
    _expect(linked, True, f"the home page of {version} links to {names[0]}:")
    return found[0]


def check_wheel(tree: Path, release: str, work: Path) -> str:
    """Run a downloaded snippet on the release's wheel, installed into an empty folder."""
    offered_wheel(tree, DEVELOPMENT)
    offered = offered_wheel(tree, release)
    packages, empty = work / "packages", work / "empty"
    install = ["-m", "pip", "install", "--no-deps", "--no-index", "--target", str(packages)]
    run([sys.executable, *install, str(offered)], work)
    snippet = next((tree / release).rglob(DOWNLOAD), None)
    if snippet is None:
        raise VersionsError(f"version {release} offers no download named {DOWNLOAD}")
    empty.mkdir()
    shutil.copy(snippet, empty)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    run([*torchrun, "2", DOWNLOAD], empty, PYTHONPATH=str(packages))
    where = "import fsdp_ref; print(fsdp_ref.__file__)"
    imported = run([sys.executable, "-c", where], empty, PYTHONPATH=str(packages)).strip()
    _expect(Path(imported).parent, packages / "fsdp_ref", "the snippet imported fsdp_ref from")
    return f"wheel: {offered.name} installs and runs the downloaded {DOWNLOAD}"


def make_tree(root: Path, work: Path) -> tuple[Path, str]:
    """Deploy two versions of a checkout into a clone of it, and lay them out as a server has them.

    Args:
        root: The checkout; uncommitted changes count.
        work: An empty folder to work in.

    Returns:
        The folder with both versions, and the name of the release among them.
    """
    release = newest_release((root / "CHANGELOG.md").read_text())
    clone, tree = work / "clone", work / "tree"
    with step("cloning this checkout"):
        clone_with_changes(root, clone)
    with step(f"deploying {DEVELOPMENT}"):
        deploy_version(clone, DEVELOPMENT, [], **OWN_IDENTITY)
    page = clone / "site" / f"{CHANGED_PAGE}.md"
    page.write_text(f"{page.read_text()}\n{MARK}\n")
    with step(f"deploying {release} as {LATEST}"):
        deploy_version(clone, release, [LATEST], **OWN_IDENTITY)
        mike(clone, "set-default", LATEST, **OWN_IDENTITY)
    extract(clone, tree)
    return tree, release


def check(root: Path = ROOT) -> None:
    """Deploy two versions of this checkout into a temporary clone and look at the result."""
    require_mkdocs()
    with tempfile.TemporaryDirectory(prefix="fsdp-ref-versions-") as temporary:
        work = Path(temporary).resolve()
        tree, release = make_tree(root, work)
        lines = [*check_tree(tree, release), check_wheel(tree, release, work)]
    print("\n".join(lines))
    print(f"{len(lines)} checks of the versioned site passed", flush=True)


def keep_tree(folder: Path, root: Path = ROOT) -> None:
    """Lay two versions of this checkout out in a folder, in place of what is there."""
    require_mkdocs()
    with tempfile.TemporaryDirectory(prefix="fsdp-ref-versions-") as temporary:
        tree, release = make_tree(root, Path(temporary).resolve())
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tree, folder, symlinks=True)
    print(f"versions {DEVELOPMENT} and {release} are in {folder}", flush=True)


# --- The real thing -------------------------------------------------------------------------------


def require_deployable(root: Path, version: str) -> None:
    """Refuse a version whose pages nobody could find again.

    Raises:
        VersionsError: If the version is no release of the changelog and not `dev`, if its number is
            not the one in pyproject.toml, or if tracked files are changed.
    """
    known = releases((root / "CHANGELOG.md").read_text())
    if version != DEVELOPMENT:
        if version not in known:
            named = ", ".join([DEVELOPMENT, *known])
            raise VersionsError(f"{version} is not in CHANGELOG.md. Versions it knows: {named}.")
        stated = wheel.project_version(root)
        if version != stated:
            raise VersionsError(
                f"this checkout is version {stated} (pyproject.toml). Check out the commit of "
                f"{version} to deploy that."
            )
    changed = run(["git", "status", "--porcelain", "--untracked-files=no"], root).rstrip()
    if changed:
        raise VersionsError(
            f"these files are changed and not committed, so no commit would hold what the pages "
            f"of {version} show:\n{changed}\nCommit them first."
        )


def deploy(version: str, aliases: Sequence[str], root: Path = ROOT) -> None:
    """Write one version to the local branch gh-pages; make `latest` the default if it is named."""
    require_mkdocs()
    require_deployable(root, version)
    with step(f"building and committing {version} to the local branch {BRANCH}"):
        deploy_version(root, version, aliases)
        if LATEST in aliases:
            mike(root, "set-default", LATEST)
    print(f"Nothing was pushed. To look at it: .nox/env/bin/mike serve -b {BRANCH}")
    print(f"To publish it: git push origin {BRANCH}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.versions", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="deploy two versions into a temporary clone and check them")
    kept = commands.add_parser("tree", help="keep the two versions of the check in a folder")
    kept.add_argument("folder", metavar="FOLDER", type=Path)
    real = commands.add_parser("deploy", help="write a version to the local branch gh-pages")
    real.add_argument("version", metavar="VERSION")
    real.add_argument("aliases", metavar="ALIAS", nargs="*")
    given = parser.parse_args()
    try:
        if given.command == "check":
            check()
        elif given.command == "tree":
            keep_tree(given.folder)
        else:
            deploy(given.version, given.aliases)
    except VersionsError as error:
        session = {"check": "docs-versions", "tree": "docs-browser", "deploy": "docs-deploy"}
        raise SystemExit(f"{session[given.command]}: {error}") from None


if __name__ == "__main__":
    main()
