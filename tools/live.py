"""Renews `site/generated` before each build of `nox -s docs -- --live`.

MkDocs calls `on_pre_build` (`hooks:` in mkdocs.yml) when a page, a docstring or a snippet was
edited. Outside of live editing it does nothing: the commands of noxfile.py run the prebuild.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

LIVE = "FSDP_REF_LIVE"
"""Environment variable that is set while somebody edits and looks at once."""


def on_pre_build(config: Any, **_: Any) -> None:
    """Run the prebuild; when it fails, say why and build with what is there.

    Args:
        config: MkDocs' configuration.
    """
    if not os.environ.get(LIVE):
        return
    root = Path(config["config_file_path"]).parent
    command = [sys.executable, "-m", "tools.prebuild"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"{done.stdout}{done.stderr}The last generated pages stay until this is mended.")
