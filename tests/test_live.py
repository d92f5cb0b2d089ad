"""Editing live: generated pages are renewed before a build, and recorded runs taken as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.live import LIVE, on_pre_build
from tools.prebuild.recorded import kept


def a_repository(folder: Path, prebuild: str) -> dict[str, str]:
    (folder / "tools").mkdir()
    (folder / "tools" / "prebuild.py").write_text(prebuild)
    return {"config_file_path": str(folder / "mkdocs.yml")}


def test_generated_pages_are_renewed_only_while_editing_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = a_repository(tmp_path, "open('renewed', 'w').close()")
    monkeypatch.delenv(LIVE, raising=False)
    on_pre_build(config)
    assert not (tmp_path / "renewed").exists()
    monkeypatch.setenv(LIVE, "1")
    on_pre_build(config)
    assert (tmp_path / "renewed").exists()


def test_a_fault_in_a_snippet_is_told_and_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(LIVE, "1")
    on_pre_build(a_repository(tmp_path, "print('FAIL a.py:3: no title'); raise SystemExit(1)"))
    assert "FAIL a.py:3: no title" in capsys.readouterr().out


def test_an_older_recording_serves_while_editing_live_and_never_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    older, wanted = tmp_path / "walk-1.txt", tmp_path / "walk-2.txt"
    older.write_text("")
    monkeypatch.delenv(LIVE, raising=False)
    assert kept(wanted, "walk-*.txt", fresh=False) is None
    monkeypatch.setenv(LIVE, "1")
    assert kept(wanted, "walk-*.txt", fresh=False) == older
    assert kept(wanted, "walk-*.txt", fresh=True) is None
    wanted.write_text("")
    assert kept(wanted, "walk-*.txt", fresh=False) == wanted
