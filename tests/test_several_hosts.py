"""The script for a batch scheduler, as it stands on the page, with two agents in place of hosts."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from tools.paths import ROOT
from tools.running import free_port

PAGE = ROOT / "site" / "guides" / "several-hosts.md"
TRAIN = """
import os
import torch.distributed as dist

dist.init_process_group("gloo")
told = " ".join([f"rank {dist.get_rank()} of {dist.get_world_size()},",
                 f"local rank {os.environ['LOCAL_RANK']} of {os.environ['LOCAL_WORLD_SIZE']},",
                 f"job {os.environ['TORCHELASTIC_RUN_ID']}"])
everyone = [None] * dist.get_world_size()
dist.all_gather_object(everyone, told)
if dist.get_rank() == 0:
    print(*everyone, sep="\\n")
dist.destroy_process_group()
"""
SRUN = """
#!/bin/bash
# One task on each host, all with the same line.
for _ in $(seq "$SLURM_NNODES"); do "$@" & tasks+=($!); done
for task in "${tasks[@]}"; do wait "$task" || failed=1; done
exit "${failed:-0}"
"""
SCONTROL = """
#!/bin/bash
[ "$1 $2" = "show hostnames" ] && [ "$3" = "localhost,other" ] && printf 'localhost\\nother\\n'
"""


def script() -> str:
    """Return the batch script of the page."""
    found = re.search(r"```shell\n(#!/bin/bash\n#SBATCH.*?)```", PAGE.read_text(), re.DOTALL)
    assert found, "the page has no batch script"
    return found[1]


def test_the_batch_script_starts_an_agent_on_every_host(tmp_path: Path) -> None:
    here = {"ib0": os.environ.get("GLOO_SOCKET_IFNAME", "lo"), ":29400": f":{free_port()}"}
    text = script()
    for theirs, ours in here.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    (tmp_path / "job.sh").write_text(text)
    (tmp_path / "train.py").write_text(TRAIN)
    for name, stand_in in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tmp_path / name).write_text(stand_in.lstrip())
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_JOB_NODELIST": "localhost,other",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "2",
        "SLURM_JOB_ID": "4711",
    }
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    ran = subprocess.run(
        ["bash", "job.sh"],
        cwd=tmp_path,
        env={**os.environ, **slurm, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    places = "rank 0 of 4, local rank 0 of 2, job 4711\nrank 1 of 4, local rank 1 of 2, job 4711\n"
    places += "rank 2 of 4, local rank 0 of 2, job 4711\nrank 3 of 4, local rank 1 of 2, job 4711\n"
    assert ran.returncode == 0, textwrap.indent(ran.stderr, "  ")
    assert ran.stdout == places
