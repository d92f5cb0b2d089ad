"""Versions of the site: what is deployed, what it offers, and that each check of it can fail."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tools import site_tree, versions, wheel
from tools.changelog import newest_release, releases

ROOT = Path(__file__).resolve().parents[1]

# --- The changelog --------------------------------------------------------------------------------


def test_releases_are_read_in_the_order_of_the_changelog():
    text = (
        "# Changelog\n\n## Unreleased\n\n- x\n\n## 0.10.0 (2026-05-04)\n\n## [0.9.1]\n\n### 1.0\n"
    )
    assert releases(text) == ["0.10.0", "0.9.1"]
    assert newest_release(text) == "0.10.0"


def test_a_changelog_without_a_release_is_refused_with_the_heading_it_needs():
    with pytest.raises(ValueError, match=r"heading such as '## 0\.1\.0'"):
        newest_release("# Changelog\n\n## Unreleased\n")


def test_the_package_has_the_version_of_the_newest_release():
    assert wheel.project_version(ROOT) == newest_release((ROOT / "CHANGELOG.md").read_text())


# --- The wheel ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site_version", "expected"),
    [("0.1.0", "0.1.0"), ("dev", "0.1.0+dev"), ("My_Branch-2", "0.1.0+my.branch.2")],
)
def test_only_a_release_offers_code_under_the_bare_version(site_version: str, expected: str):
    assert wheel.wheel_version("0.1.0", site_version) == expected


def test_a_wheel_holds_the_package_as_it_is_now_and_its_bytes_do_not_change(tmp_path: Path):
    first = wheel.build(ROOT, "0.1.0+dev", tmp_path / "first")
    second = wheel.build(ROOT, "0.1.0+dev", tmp_path / "second")

    assert first.name == "fsdp_ref-0.1.0+dev-py3-none-any.whl"
    assert first.read_bytes() == second.read_bytes()
    packed = {name for name in zipfile.ZipFile(first).namelist() if name.startswith("fsdp_ref/")}
    sources = {f"fsdp_ref/{path.name}" for path in (ROOT / "fsdp_ref").glob("*.py")}
    assert packed == {*sources, "fsdp_ref/py.typed"}


def test_the_offered_wheel_is_built_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for path in wheel.packed_files(ROOT):
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    monkeypatch.setenv(wheel.SITE_VERSION, "dev")
    made = []

    def build(root: Path, version: str, folder: Path) -> Path:
        made.append(version)
        folder.mkdir(parents=True)
        (folder / f"fsdp_ref-{version}-py3-none-any.whl").write_text("packed")
        return folder / f"fsdp_ref-{version}-py3-none-any.whl"

    monkeypatch.setattr(wheel, "build", build)
    first = wheel.offer(tmp_path)
    assert wheel.offer(tmp_path) == first
    assert set(first) == {"wheel/fsdp_ref-0.1.0+dev-py3-none-any.whl", "wheel.md"}
    assert made == ["0.1.0+dev"]

    (tmp_path / "fsdp_ref" / "states.py").write_text("# changed\n")
    wheel.offer(tmp_path)
    monkeypatch.setenv(wheel.SITE_VERSION, "0.1.0")
    assert "wheel/fsdp_ref-0.1.0-py3-none-any.whl" in wheel.offer(tmp_path)
    assert made == ["0.1.0+dev", "0.1.0+dev", "0.1.0"]


# --- Addresses on the pages of a version ----------------------------------------------------------


def page(tree: Path, name: str, body: str) -> None:
    path = tree / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<html><body>{body}</body></html>")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A deployed branch with two good versions of three pages each."""
    tree = tmp_path / "tree"
    for version in ("dev", "0.1.0"):
        links = (
            '<a href="changelog/">c</a> <a href="#top">top</a> <a href="https://pytorch.org">t</a>'
        )
        page(tree / version, "index.html", links)
        page(tree / version, "404.html", '<a href="/latest/">Home</a>')
        mark = versions.MARK if version == "0.1.0" else ""
        canonical = '<link rel="canonical" href="https://fsdp-ref.example/latest/changelog/">'
        page(tree / version, "changelog/index.html", f'{canonical}<a href="..">Home</a>{mark}')
        page(tree / version, "guides/tips/index.html", '<a href="../../changelog/">c</a>')
    (tree / "latest").symlink_to("0.1.0")
    entries = [
        {"version": "dev", "title": "dev", "aliases": []},
        {"version": "0.1.0", "title": "0.1.0", "aliases": ["latest"]},
    ]
    (tree / "versions.json").write_text(json.dumps(entries))
    page(tree, "index.html", '<script>window.location.replace("latest/")</script>')
    return tree


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="../../../0.1.0/">x</a>', "leaves its version"),
        ('<a href="../../..">x</a>', "leaves its version"),
        ('<a href="../wrapping/">x</a>', "points at nothing"),
        ('<img src="gone.png">', "points at nothing"),
        ('<a href="/latest/">x</a>', "points at the top of the server"),
        ('<script src="https://cdn.example/x.js"></script>', "loads from elsewhere"),
        ('<link rel="stylesheet" href="//cdn.example/x.css">', "loads from elsewhere"),
    ],
)
def test_a_wrong_address_is_found(tree: Path, body: str, fault: str):
    assert list(site_tree.faults(tree / "dev")) == []
    page(tree / "dev", "guides/tips/index.html", body)
    (found,) = site_tree.faults(tree / "dev")
    assert found.startswith("dev/guides/tips/index.html")
    assert fault in found


# --- The checks of a deployed branch --------------------------------------------------------------


def test_a_good_branch_passes_every_check(tree: Path):
    assert len(list(versions.check_tree(tree, "0.1.0"))) == 4


def forget_alias(tree: Path) -> None:
    path = tree / "versions.json"
    path.write_text(path.read_text().replace('["latest"]', "[]"))


def lead_default_elsewhere(tree: Path) -> None:
    page(tree, "index.html", '<script>window.location.replace("dev/")</script>')


def point_latest_at_dev(tree: Path) -> None:
    (tree / "latest").unlink()
    (tree / "latest").symlink_to("dev")


def drop_a_page(tree: Path) -> None:
    shutil.rmtree(tree / "dev" / "guides")


def link_to_the_other_version(tree: Path) -> None:
    page(tree / "0.1.0", "guides/tips/index.html", '<a href="../../../dev/">x</a>')


def leak_the_change(tree: Path) -> None:
    page(tree / "dev", "changelog/index.html", versions.MARK)


def lose_the_change(tree: Path) -> None:
    page(tree / "0.1.0", "changelog/index.html", "as before")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (forget_alias, "versions.json lists"),
        (lead_default_elsewhere, "index.html leads to latest/"),
        (point_latest_at_dev, "latest is 'dev'"),
        (drop_a_page, "the pages of 0.1.0"),
        (link_to_the_other_version, "1 wrong addresses"),
        (leak_the_change, "the changed sentence"),
        (lose_the_change, "the changed sentence"),
    ],
)
def test_each_fault_of_a_branch_is_reported(
    tree: Path, spoil: Callable[[Path], None], message: str
):
    spoil(tree)
    with pytest.raises(versions.VersionsError) as caught:
        list(versions.check_tree(tree, "0.1.0"))
    assert message in str(caught.value)


def test_a_version_must_offer_its_own_wheel_on_its_home_page(tree: Path):
    with pytest.raises(versions.VersionsError, match=r"wheels in version dev: \[\]"):
        versions.offered_wheel(tree, "dev")

    name = "fsdp_ref-0.1.0+dev-py3-none-any.whl"
    (tree / "dev" / name).touch()
    with pytest.raises(versions.VersionsError, match="home page of dev links"):
        versions.offered_wheel(tree, "dev")

    page(tree / "dev", "index.html", f'<a href="{name}">wheel</a>')
    assert versions.offered_wheel(tree, "dev") == tree / "dev" / name


# --- What is deployed: a clone with the working files, or a clean checkout ------------------------


def git(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, **versions.OWN_IDENTITY}
    done = subprocess.run(
        ["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A small repository with one commit and two releases."""
    root = tmp_path / "checkout"
    root.mkdir()
    git(root, "init", "--quiet")
    (root / "CHANGELOG.md").write_text("# Changelog\n\n## 0.2.0\n\n## 0.1.0\n")
    (root / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.2.0"\n')
    (root / "kept.md").write_text("as committed\n")
    (root / "deleted.md").write_text("as committed\n")
    (root / ".gitignore").write_text("ignored.md\n")
    git(root, "add", ".")
    git(root, "commit", "--quiet", "-m", "first")
    return root


def test_the_clone_holds_the_working_files_and_knows_no_remote(checkout: Path, tmp_path: Path):
    (checkout / "kept.md").write_text("changed since\n")
    (checkout / "deleted.md").unlink()
    (checkout / "new.md").write_text("new\n")
    (checkout / "ignored.md").write_text("ignored\n")

    clone = tmp_path / "clone"
    versions.clone_with_changes(checkout, clone)

    assert (clone / "kept.md").read_text() == "changed since\n"
    assert (clone / "new.md").exists()
    assert not (clone / "deleted.md").exists()
    assert not (clone / "ignored.md").exists()
    assert git(clone, "remote") == ""


def test_only_a_version_that_can_be_found_again_is_deployed(checkout: Path):
    versions.require_deployable(checkout, "0.2.0")
    versions.require_deployable(checkout, "dev")

    with pytest.raises(
        versions.VersionsError, match=r"0\.3\.0 is not in CHANGELOG\.md.*dev, 0\.2\.0"
    ):
        versions.require_deployable(checkout, "0.3.0")
    with pytest.raises(versions.VersionsError, match=r"this checkout is version 0\.2\.0"):
        versions.require_deployable(checkout, "0.1.0")

    (checkout / "kept.md").write_text("changed since\n")
    with pytest.raises(versions.VersionsError, match=r"(?s)kept\.md.*Commit them first"):
        versions.require_deployable(checkout, "dev")


def test_a_fork_of_mkdocs_is_refused(monkeypatch: pytest.MonkeyPatch):
    versions.require_mkdocs()
    monkeypatch.setattr(versions.metadata, "version", lambda name: "1.6.7")
    with pytest.raises(versions.VersionsError, match="properdocs is installed"):
        versions.require_mkdocs()
