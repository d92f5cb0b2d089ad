"""The hook that makes pages smaller changes nothing that a reader sees."""

from __future__ import annotations

from pathlib import Path

from tools.lean_pages import on_post_page
from tools.lean_styles import Needless, on_post_build, used_rules


def test_code_keeps_every_character_and_indentation_elsewhere_goes():
    code = 'def f():\n      <span class="k">return</span> <span class="n">x</span>\n\n    <b>y</b>'
    page = f"<div>\n      <p>Text</p>\n  <pre><code>{code}</code></pre>\n   </div>"
    assert on_post_page(page) == (
        "<div>\n<p>Text</p>\n<pre><code>def f():\n      "
        "<i class=k>return</i> x\n\n    <b>y</b></code></pre>\n</div>"
    )


def test_pieces_of_one_colour_become_one():
    piece = '<span class="s2">{}</span>'
    code = "".join(piece.format(text) for text in ('"', "a", '"')) + piece.format("b").upper()
    assert on_post_page(code) == '<i class=s2>"a"</i>' + piece.format("b").upper()


def test_a_short_class_keeps_its_source_and_a_long_one_leaves_it_to_its_methods():
    def details(lines: int, first: str) -> str:
        code = "\n".join([f'<span class="k">{first}</span>', *["    x = 1"] * lines])
        return f'<details class="mkdocstrings-source"><pre><code>{code}</code></pre></details>'

    assert "class A" in on_post_page(details(5, "class A:"))
    assert on_post_page(details(80, "class A:")) == ""
    assert "def f" in on_post_page(details(80, "def f():"))


def test_only_rules_that_can_apply_to_nothing_are_taken_out():
    sheet = (
        "@charset 'utf-8';a{x:y}.gone{x:y}.here .gone{x:y}.gone,.here{x:y}.here:is(.a,.gone){x:y}"
        ":not(.gone){x:y}@media print{.gone{x:y}}@media print{.here{x:y}}@font-face{x:y}"
        "[dir=rtl] .here{x:y}[dir=ltr] .here{x:y}[data-md-color-primary=red]{x:y}"
        ".tabbed-set>:nth-child(3),.tabbed-set>:nth-child(4){x:y}tr:nth-child(4){x:y}"
    )
    assert "".join(used_rules(sheet, Needless({"gone"}, {"red"}, 3))) == (
        "@charset 'utf-8';a{x:y}.here{x:y}.here:is(.a,.gone){x:y}"
        ":not(.gone){x:y}@media print{.here{x:y}}@font-face{x:y}"
        "[dir=ltr] .here{x:y}.tabbed-set>:nth-child(3){x:y}tr:nth-child(4){x:y}"
    )


def test_what_pages_have_and_what_scripts_add_counts_as_used(tmp_path: Path):
    sheets = tmp_path / "assets" / "stylesheets"
    sheets.mkdir(parents=True)
    kept = (
        ".page{x:y}.script{x:y}.side--left{x:y}[data-md-color-scheme=slate]{x:y}"
        ":root{--a:var(--b);--b:1;--icon:url('data:;')}.page{color:var(--a);m:var(--icon)}"
    )
    gone = (
        ".nobody{x:y}.nobody--left{x:y}[data-md-color-scheme=pink]{x:y}.nobody{color:var(--d)}"
        ".tabbed-set:nth-child(4){x:y}"
    )
    unread = ":root{--c:var(--d);--d:url('data:;')}"
    (sheets / "main.1.css").write_text(kept + gone + unread)
    (tmp_path / "own.css").write_text("/* why */\na {\n    x: y;\n}\n")
    (tmp_path / "index.html").write_text(
        '<p class="other page" data-md-color-scheme="slate" data-tabs="2:3">'
    )
    (tmp_path / "theme.js").write_text('element.classList.add("script", `side--${side}`)')
    on_post_build({"site_dir": str(tmp_path)})
    assert (sheets / "main.1.css").read_text() == f"{kept}:root{{}}"
    assert (tmp_path / "own.css").read_text() == "\na {\nx: y;\n}\n"


def test_a_link_to_a_name_keeps_its_look_and_loses_the_title_that_repeats_it():
    link = '<a class="autorefs autorefs-internal" title="Class fsdp_ref.A" href="#a">A</a>'
    assert on_post_page(link) == '<a class="autorefs autorefs-internal" href="#a">A</a>'
