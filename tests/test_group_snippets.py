"""The snippets about groups hold on more ranks than their pages show."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tools import running
from tools.running import Run
from tools.snippet_files import read

REPOSITORY = Path(__file__).resolve().parents[1]


def printed_on(ranks: int, name: str) -> list[str]:
    """Run a snippet of the page on another number of ranks; return what it printed."""
    snippet = read(REPOSITORY / "snippets" / "process_groups" / name, "fsdp_ref")
    command = snippet.command.replace("--nproc-per-node 4", f"--nproc-per-node {ranks}")
    assert f"--nproc-per-node {ranks}" in command
    run = Run(dataclasses.replace(snippet, command=command), "gloo")
    with running.package_folder(REPOSITORY) as package:
        launcher = running.Launcher(running.base_environment("gloo", {}), package)
        outcome = running.run_under_agent(run, launcher, 120.0)
        launcher.close()
    assert outcome.code == 0, outcome.errors
    return outcome.printed


def test_eight_ranks_train_four_experts_like_a_single_process():
    lines = printed_on(8, "mixture_of_experts")
    rows = {cells[0]: cells[1:] for line in lines if len(cells := line.split(" | ")) == 4}
    rows = {name.strip(): [value.strip() for value in cells] for name, cells in rows.items()}
    losses = [cells for name, cells in rows.items() if name.startswith("loss in step")]
    assert len(losses) == 5
    for single, by_default, by_all in [rows["gradient of experts"], *losses]:
        assert abs(float(single) - float(by_all)) < 1.5e-4
        assert single != by_default or by_default == losses[0][1]  # the first loss is before a step
    gradient = [float(value) for value in rows["gradient of experts"]]
    assert abs(gradient[1] / gradient[0] - 8 / 2) < 0.01  # all ranks, by those of one expert's
    assert "Divided by all: on all ranks the weights of the single process? True" in lines
    # Each expert agrees on the two ranks that share it, and the dense weights agree on all.
    at = lines.index("nothing of 7 compared on ranks 0 to 7 differs unexpectedly")
    experts = [line.split(maxsplit=1) for line in lines[at + 3 :]]
    assert [name for name, _ in experts] == ["1.expert.weight", "1.expert.bias"]
    for _, cells in experts:
        assert cells.split("  ") == ["0-1 | 2-3 | 4-5 | 6-7"] * 2
