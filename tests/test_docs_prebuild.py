"""What the prebuild writes: from the sources alone, and only when something changed."""

from __future__ import annotations

import re
import time
from pathlib import Path

import griffe
import pytest

from fsdp_ref.process_groups import rank_lists
from tests.test_docs_runner import write_snippet
from tools import docstrings
from tools.griffe_docstrings import ReadableDocstrings, fence_examples, link_proofs
from tools.prebuild import fragments, group_figures, inventory, recorded, tables, tips
from tools.prebuild.attributes import generate as generate_attributes
from tools.prebuild.fragments import PrebuildError
from tools.prebuild.writer import Generated
from tools.running import Outcome
from tools.snippet_files import APIS, SUFFIXES, read_all

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def package():
    return docstrings.load(REPOSITORY)


# Writing


def test_a_file_is_written_only_when_its_content_changed(tmp_path):
    output = Generated()
    output.add("a/x.md", "one")
    output.add("y.md", "two")
    assert output.write(tmp_path) == ["a/x.md", "y.md"]
    before = (tmp_path / "a" / "x.md").stat().st_mtime_ns
    time.sleep(0.01)
    assert output.write(tmp_path) == []
    assert (tmp_path / "a" / "x.md").stat().st_mtime_ns == before


def test_what_is_no_longer_made_is_deleted_with_its_folder(tmp_path):
    output = Generated()
    output.add("y.md", "two")
    (tmp_path / "old" / "deep").mkdir(parents=True)
    (tmp_path / "old" / "deep" / "x.md").write_text("one")
    assert output.write(tmp_path) == ["old/deep/x.md", "y.md"]
    assert [path.name for path in tmp_path.iterdir()] == ["y.md"]


# Snippets


@pytest.fixture
def one_snippet(tmp_path):
    """Return a repository with one snippet for three APIs, shown by a page one folder down."""
    path = write_snippet(tmp_path)
    for suffix in ("_torch_fsdp1", "_torch_fsdp2"):
        other = path.with_name(f"sum_ranks{suffix}.py")
        other.write_text(path.read_text().replace("sum_ranks.py", other.name))
    (tmp_path / "site" / "guides").mkdir(parents=True)
    page = '# Page\n\n--8<-- "site/generated/snippets/fake/sum_ranks.md"\n'
    (tmp_path / "site" / "guides" / "page.md").write_text(page)
    return tmp_path


def generated(root):
    output = Generated()
    fragments.generate(read_all(root), root, output)
    return {path: content.decode() for path, content in output.files.items()}


def test_a_tab_says_what_is_special_about_its_file(one_snippet):
    folder = one_snippet / "snippets" / "fake" / "sum_ranks"
    for suffix, note in (("", "Only here."), ("_torch_fsdp2", "Nothing\nlike it.")):
        path = folder / f"sum_ranks{suffix}.py"
        path.write_text(path.read_text().replace("Run on", f"{note}\n\nRun on", 1))
    text = generated(one_snippet)["snippets/fake/sum_ranks.md"]
    above, reference, fsdp1, fsdp2 = text.split("\n=== ")
    assert above.count("Everyone ends with the same sum.") == 1
    assert "same sum" not in reference + fsdp1 + fsdp2  # said once, above all tabs
    assert "\n    Only here.\n\n    ```python" in reference
    assert "Only here." not in above + fsdp1 + fsdp2
    assert "\n    Nothing like it.\n" in fsdp2


def test_tabs_have_one_order_and_include_the_code_by_path(one_snippet):
    text = generated(one_snippet)["snippets/fake/sum_ranks.md"]
    assert re.findall(r'^=== "(.*)"$', text, re.MULTILINE) == list(APIS)
    for suffix in SUFFIXES.values():
        include = f'    --8<-- "snippets/fake/sum_ranks/sum_ranks{suffix}.py:body"'
        assert include in text.splitlines()
    assert "dist.all_reduce" not in text, "code is included, never repeated"
    assert "    the sum is 1\n      a third is 0.333\n" in text.replace("\n    ", "\n    ")


def test_a_command_for_several_hosts_is_shown_in_two_lines_that_a_shell_joins(one_snippet):
    options = "--rdzv-backend c10d --rdzv-endpoint localhost:29400"
    for path in (one_snippet / "snippets/fake/sum_ranks").glob("*.py"):
        command = f"torchrun --nnodes 2 --nproc-per-node 1 {options}"
        two = path.read_text().replace("torchrun --standalone --nproc-per-node 2", command)
        path.write_text(two)
    text = generated(one_snippet)["snippets/fake/sum_ranks.md"]
    assert text.count('```shell title="Run it on each host"') == 3
    lines = text.splitlines()
    first = lines.index("    torchrun --nnodes 2 --nproc-per-node 1 \\")
    assert lines[first + 1] == f"        {options} sum_ranks.py"


def test_a_download_is_the_file_itself_and_linked_from_the_pages_folder(one_snippet):
    files = generated(one_snippet)
    text = files["snippets/fake/sum_ranks.md"]
    assert "(../generated/downloads/fake/sum_ranks.py)" in text
    source = one_snippet / "snippets/fake/sum_ranks/sum_ranks.py"
    assert files["downloads/fake/sum_ranks.py"] == source.read_text()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ([], "All three versions print the same."),
        (["_torch_fsdp2"], "torch FSDP2 prints something else."),
        (["_torch_fsdp1", "_torch_fsdp2"], "print different things: compare the tabs."),
    ],
)
def test_the_page_says_whether_the_promises_agree(one_snippet, changed, sentence):
    for suffix in changed:
        path = one_snippet / f"snippets/fake/sum_ranks/sum_ranks{suffix}.py"
        path.write_text(path.read_text().replace("    the sum is 1\n", f"    {suffix}\n"))
    assert sentence in generated(one_snippet)["snippets/fake/sum_ranks.md"]


def test_a_snippet_on_two_pages_is_refused(one_snippet):
    page = one_snippet / "site" / "guides" / "page.md"
    (page.with_name("second.md")).write_text(page.read_text())
    with pytest.raises(PrebuildError, match=r"site/guides/second\.md:3: fake/sum_ranks is shown"):
        generated(one_snippet)


def test_the_index_links_every_snippet_with_its_command_and_processes(one_snippet):
    index = generated(one_snippet)["snippet_index.md"]
    row = next(line for line in index.splitlines() if "all-reduce" in line)
    assert "(../guides/page.md#sum-ranks)" in row
    assert "`torchrun --standalone --nproc-per-node 2 sum_ranks.py` | 2 |" in row
    assert "<br>".join(APIS) in row


# Tips


def package_with(tmp_path: Path, docstring: str) -> griffe.Module:
    (tmp_path / "fsdp_ref").mkdir()
    (tmp_path / "fsdp_ref" / "__init__.py").write_text(f'"""{docstring}"""\n')
    return docstrings.load(tmp_path)


def test_a_tip_shows_its_claim_its_place_and_what_its_proof_prints(one_snippet):
    text = "Title.\n\nTip: Sum up\n    It is\n    cheap.\n\n    Proof: fake/sum_ranks\n"
    package = package_with(one_snippet, text)
    output = Generated()
    tips.generate(docstrings.tips(package), read_all(one_snippet), one_snippet, output)
    page = output.files["tips.md"].decode()
    assert "### Sum up { #tip-fsdp_ref-1 }\n\nIt is\ncheap.\n" in page
    assert "[`fsdp_ref`][fsdp_ref]" in page
    assert "[fake/sum_ranks](page.md#sum-ranks)" in page
    assert "```text\nthe sum is 1\n  a third is 0.333\n```" in page


def test_a_tip_is_linked_from_its_docstring_by_the_same_anchor(tmp_path):
    text = "T.\n\nTip: A\n    a.\n\n    Proof: x/y\n\nTip: B\n    b.\n\n    Proof: x/z\n"
    package = package_with(tmp_path, text)
    anchors = [tip.anchor for tip in docstrings.tips(package)]
    ReadableDocstrings().on_object(obj=package)
    linked = re.findall(r"Proof: \[(\S+)\]\[(\S+)\]", package.docstring.value)
    assert linked == [("x/y", anchors[0]), ("x/z", anchors[1])]


def test_a_section_after_a_tip_stays_a_section():
    tip = "Tip: One\n    Words.\n\n    Proof: x/y\n\nArgs:\n    module: The module."
    linked = "Proof: [x/y][tip-f-1]\n\nArgs:\n"
    assert linked in link_proofs(tip, "f")


def test_every_tip_of_the_package_has_an_anchor_of_its_own(package):
    anchors = [tip.anchor for tip in docstrings.tips(package)]
    assert len(anchors) >= 8
    assert len(set(anchors)) == len(anchors)


def test_examples_become_blocks_and_keep_their_place_in_a_section():
    in_section = ["Example:", "    Add.", "", "    >>> 1 + 1", "    2", ""]
    in_prose = ["Text", "", "    >>> 2", "    2"]
    assert fence_examples(in_section + in_prose) == [
        *["Example:", "    Add.", "", "    ```pycon", "    >>> 1 + 1", "    2", "    ```", ""],
        *["Text", "", "```pycon", ">>> 2", "2", "```"],
    ]


# Tables


def test_the_state_tables_are_those_of_the_code(package):
    from fsdp_ref.states import LEGAL_MOVES, NEXT_PHASES

    text = tables.states(package)
    rows = [line for line in text.splitlines() if re.match(r"\| `[A-Z_]+` \|", line)]
    assert len(rows) == len(LEGAL_MOVES) + len(NEXT_PHASES)
    for state, following in {**LEGAL_MOVES, **NEXT_PHASES}.items():
        row = next(line for line in rows if line.startswith(f"| `{state.name}` |"))
        meaning, names = row.strip("| ").split(" | ")[1:]
        assert set(re.findall(r"`(\w+)`", names)) == {other.name for other in following}
        assert meaning


def test_the_error_catalogue_lists_every_class_once_by_its_code():
    from fsdp_ref import errors

    text = tables.errors()
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = [kind.code for kind in kinds if getattr(kind, "code", "FSDP000") != "FSDP000"]
    assert re.findall(r"FSDP\d{3}", text) == sorted(codes)
    assert len(set(codes)) == len(codes)


def test_the_word_tables_are_computed():
    text = tables.process_groups()
    assert "| `'mod2'` | `[0, 2]`, `[1, 3]` |" in text
    assert "| `'node'` | `[0, 1, 2, 3]`, `[4, 5, 6, 7]` |" in text


def test_a_bar_in_a_cell_does_not_end_it():
    assert tables.table(["a"], [["x | y"]]).splitlines()[-1] == "| x \\| y |"


# Recorded runs


@pytest.fixture
def walk(tmp_path, monkeypatch):
    """Return a repository whose recorded snippet prints a table, and the list of its runs."""
    path = write_snippet(tmp_path, "walk_one_step", page="attributes")
    path.write_text(path.read_text().replace("sum_ranks", "walk_one_step"))
    (tmp_path / "fsdp_ref").mkdir()
    (tmp_path / "fsdp_ref" / "__init__.py").write_text("")
    runs = []

    def run(planned, package, limit):
        runs.append(planned)
        return Outcome(planned, 0, ["moment | _cpu_grad", "step | None"], {}, 1.0)

    monkeypatch.setattr(recorded, "run_literally", run)
    return tmp_path, runs


def attribute_table(root, *, fresh=False):
    output = Generated()
    generate_attributes(read_all(root), root, output, fresh=fresh)
    return output.files["attributes.md"].decode()


def test_a_recorded_run_is_repeated_only_when_a_source_changed(walk):
    root, runs = walk
    expected = "| Moment | <code>_cpu<wbr>_grad</code> |\n| --- | --- |\n| step | None |\n"
    assert attribute_table(root) == attribute_table(root) == expected
    assert len(runs) == 1
    (root / "fsdp_ref" / "__init__.py").write_text("CHANGED = True\n")
    attribute_table(root)
    assert len(runs) == 2
    attribute_table(root, fresh=True)
    assert len(runs) == 3


def test_a_recorded_run_that_fails_stops_the_build(walk, monkeypatch):
    root, _ = walk
    failed = lambda planned, package, limit: Outcome(planned, 1, [], {"rank 0": "Boom"}, 1.0)  # noqa: E731
    monkeypatch.setattr(recorded, "run_literally", failed)
    with pytest.raises(
        PrebuildError, match=r"walk_one_step\.py:1: the recorded run failed(.|\n)*Boom"
    ):
        attribute_table(root)


# Inventory


def test_the_committed_inventory_is_what_the_names_give():
    assert inventory.difference(REPOSITORY) == ""


def test_a_name_that_torch_lacks_is_refused():
    assert inventory.role("torch.nn.Module") == "class"
    assert inventory.role("torch.distributed.fsdp.fully_shard") == "function"
    with pytest.raises((AttributeError, ImportError)):
        inventory.role("torch.nn.NoSuchName")  # misspelt on purpose


# The README's program is shown by no page, but it is the first that a visitor copies


def test_the_program_in_the_readme_runs(tmp_path):
    from tools import running

    readme = (REPOSITORY / "README.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL)
    (command,) = re.findall(r"^torchrun .*train\.py$", readme, re.MULTILINE)
    promise = "Expected output:\n\n    nothing\n"
    path = write_snippet(tmp_path, "train")
    path.write_text(f'"""T.\n\n    {command}\n\n{promise}"""\n{program}')
    with running.package_folder(REPOSITORY) as package:
        run = running.Run(read_all(tmp_path)[0], "gloo", literal=True)
        for _ in range(4):  # torch may abort while Python shuts down; see aborted_at_exit
            outcome = running.run_literally(run, package, 120)
            if not outcome.aborted_at_exit:
                break
    assert (outcome.code, outcome.printed) == (0, []), outcome.errors


# Figures about groups


def test_the_figure_of_words_shows_what_the_package_computes():
    drawn = group_figures.ranks_figure()
    assert "\n\n" not in drawn, "a blank line would end the figure on a page"
    letters = re.findall(r'<text x="(\d+)" y="(\d+)"[^>]*>([A-H])</text>', drawn)
    rows = {}
    for _, y, letter in sorted(letters, key=lambda found: int(found[0])):
        rows[int(y)] = rows.get(int(y), "") + letter
    assert [rows[y] for y in sorted(rows)] == [
        *("AAAAAAAA", "AAAABBBB", "AABBCCDD"),
        *("ABCDEFGH", "ABCDABCD", "ABABABAB"),
    ]
    for word, spelt in group_figures.WORDS:  # all words of a label mean what is drawn beside it
        lists = rank_lists(word, 8, 4)
        for other in re.findall(r"'(\w+)'", spelt):
            assert rank_lists(other, 8, 4) == lists


def test_curves_are_drawn_from_what_was_printed():
    names = ["unsharded", "b", "c", "d", "e"]
    printed = [" | ".join(["step", *names])]
    printed += [
        f"   {step} | " + " | ".join(f"{9 - step}.{n}" for n in "12345") for step in (1, 2, 3)
    ]
    read_names, rows = group_figures.read_curves(printed, Path("x.py"))
    assert read_names == names
    assert rows[2] == [6.1, 6.2, 6.3, 6.4, 6.5]
    drawn = group_figures.curves_figure(read_names, rows)
    assert "e 6.5000</title>" in drawn
    assert "\n\n" not in drawn
    lines = re.findall(r'<path d="M([\d.]+) ([\d.]+)L([\d.]+) ([\d.]+)"', drawn)
    assert len(lines) == len(names)
    assert all(float(start) < float(end) for _, start, _, end in lines), "a falling loss goes down"
    tops = [float(end) for _, _, _, end in lines]
    assert tops == sorted(tops, reverse=True), "a larger loss is further up"


@pytest.mark.parametrize("printed", [[], ["step | a", "1 | x"], ["step | a", "1 | 2.0", "2 | 1.0"]])
def test_what_is_no_table_of_losses_stops_the_build(printed):
    with pytest.raises(PrebuildError, match=r"x\.py:1: printed no"):
        group_figures.read_curves(printed, Path("x.py"))
