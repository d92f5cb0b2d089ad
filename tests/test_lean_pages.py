"""The hook that makes pages smaller changes nothing that a reader sees."""

from __future__ import annotations

from pathlib import Path

from tools.lean_pages import on_post_build, on_post_page, used_rules


def test_code_keeps_every_character_and_indentation_elsewhere_goes():
    code = 'def f():\n      <span class="k">return</span> <span class="n">x</span>\n\n    <b>y</b>'
    page = f"<div>\n      <p>Text</p>\n  <pre><code>{code}</code></pre>\n   </div>"
    assert on_post_page(page) == (
        "<div>\n<p>Text</p>\n<pre><code>def f():\n      "
        '<span class="k">return</span> x\n\n    <b>y</b></code></pre>\n</div>'
    )


def test_a_short_class_keeps_its_source_and_a_long_one_leaves_it_to_its_methods():
    def details(lines: int, first: str) -> str:
        code = "\n".join([f'<span class="k">{first}</span>', *["    x = 1"] * lines])
        return f'<details class="mkdocstrings-source"><pre><code>{code}</code></pre></details>'

    assert "class A" in on_post_page(details(5, "class A:"))
    assert on_post_page(details(80, "class A:")) == ""
    assert "def f" in on_post_page(details(80, "def f():"))


def test_only_rules_that_can_apply_to_nothing_are_taken_out():
    sheet = (
        "@charset 'utf-8';a{x:y}.gone{x:y}.here .gone{x:y}.gone,.here{x:y}"
        ":not(.gone){x:y}@media print{.gone{x:y}}@media print{.here{x:y}}@font-face{x:y}"
    )
    assert "".join(used_rules(sheet, {"gone"})) == (
        "@charset 'utf-8';a{x:y}.gone,.here{x:y}"
        ":not(.gone){x:y}@media print{.here{x:y}}@font-face{x:y}"
    )


def test_classes_of_pages_and_of_scripts_count_as_used(tmp_path: Path):
    sheets = tmp_path / "assets" / "stylesheets"
    sheets.mkdir(parents=True)
    (sheets / "main.1.css").write_text(".page{x:y}.script{x:y}.nobody{x:y}")
    (tmp_path / "index.html").write_text('<p class="other page">')
    (tmp_path / "theme.js").write_text('element.classList.add("script")')
    on_post_build({"site_dir": str(tmp_path)})
    assert (sheets / "main.1.css").read_text() == ".page{x:y}.script{x:y}"


def test_a_link_to_a_name_keeps_its_look_and_loses_the_title_that_repeats_it():
    link = '<a class="autorefs autorefs-internal" title="Class fsdp_ref.A" href="#a">A</a>'
    assert on_post_page(link) == '<a class="autorefs autorefs-internal" href="#a">A</a>'
