"""Every command of this repository; each one does its own set-up.

    python3 noxfile.py -s docs              build the site and serve it on 127.0.0.1:8000
    python3 noxfile.py -s docs-test         prove that pages and code agree
    python3 noxfile.py -s tests docs-test   all tests, then that proof
    python3 noxfile.py -l                   list every command

Needed: Python 3.11 or newer with pip. Run as a script, this file brings nox along in
`.nox/launcher`; with nox installed, `nox -s docs-test` is the same thing. All commands share one
virtual environment, `.nox/env`, which is filled once and again only when its contents should
change. What follows `--` is handed to the command: `nox -s tests -- -k shard_range`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LAUNCHER = ROOT / ".nox" / "launcher"
ENV = ROOT / ".nox" / "env"
STAMP = ENV / "installed-by-noxfile.json"
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST_PYTHON = (3, 11)

NO_PIP = """\
This Python has no pip, which is needed to install the rest:
    {python}
Install it, then run the same command again:
    Debian, Ubuntu     sudo apt install python3-pip
    Fedora             sudo dnf install python3-pip
    any other system   {python} -m ensurepip --upgrade"""

LARGE_DOWNLOAD = """\
Filling the shared environment .nox/env: once, and again when constraints.txt changes.
torch is by far the largest download. README.md, "A smaller torch", says how to get the build
without CUDA."""


# --- Run as a script: find nox, or make a private environment that has it ----------------------


def pinned(package: str) -> str:
    """Return `package==version` as constraints.txt pins it."""
    for line in CONSTRAINTS.read_text().splitlines():
        if line.lower().startswith(f"{package}=="):
            return line.strip()
    raise SystemExit(f"constraints.txt does not pin {package}; add a line '{package}==VERSION'.")


def require_python() -> None:
    """Stop with one clear line when this Python is too old to run the project."""
    if sys.version_info < OLDEST_PYTHON:
        wanted = ".".join(str(part) for part in OLDEST_PYTHON)
        found = ".".join(str(part) for part in sys.version_info[:3])
        raise SystemExit(
            f"fsdp-ref needs Python {wanted} or newer, and {sys.executable} is {found}. "
            f"Try: python{wanted} noxfile.py ..."
        )


def make_launcher(python: Path) -> None:
    """Fill `.nox/launcher` with the pinned nox; its `ready` file is written last."""
    wanted, ready = pinned("nox"), LAUNCHER / "ready"
    if ready.is_file() and ready.read_text() == wanted and python.exists():
        return
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode != 0:
        raise SystemExit(NO_PIP.format(python=sys.executable))
    print(f"Making .nox/launcher with {wanted} (once) ...", flush=True)
    # Without pip of its own: ensurepip is a separate package on Debian, and the pip that is here
    # can install into any environment.
    venv.create(LAUNCHER, with_pip=False, clear=True)
    install = [*pip, "--python", str(python), "install", "--quiet", "-c", str(CONSTRAINTS), wanted]
    if subprocess.run(install, env={**os.environ, "PIP_USER": "0"}, check=False).returncode != 0:
        raise SystemExit(
            f"Could not install {wanted}; pip's own message is above. Without a network, install "
            "nox by other means and run `nox` in place of `python3 noxfile.py`."
        )
    ready.write_text(wanted)


def launch(arguments: list[str]) -> None:
    """Replace this process by nox: the one already here, else the launcher's."""
    require_python()
    os.chdir(ROOT)
    python = Path(sys.executable)
    if importlib.util.find_spec("nox") is None:
        python = LAUNCHER / "bin" / "python"
        make_launcher(python)
    os.execv(python, [str(python), "-m", "nox", "-f", str(ROOT / "noxfile.py"), *arguments])


if __name__ == "__main__":
    launch(sys.argv[1:])


# --- Loaded by nox: the commands -----------------------------------------------------------------

import nox  # noqa: E402  (only here is nox sure to exist)

nox.needs_version = ">=2025.2.9"  # the first release in which a session can require another
nox.options.default_venv_backend = "virtualenv"  # comes with nox; needs no python3-venv
nox.options.sessions = ["tests", "docs-test", "lint", "types"]

EXTRAS = "docs,test"
PYTHON_SOURCES = ["fsdp_ref", "snippets", "tests", "tools", "noxfile.py"]
ADDRESS = "127.0.0.1"


def loopback() -> str:
    """Return the name of the interface that stays on this machine: `lo`, or `lo0` on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def run_environment() -> dict[str, str]:
    """Return what every command runs with, unless the caller has set it otherwise."""
    defaults = {
        "OMP_NUM_THREADS": "1",  # several ranks share this machine's cores
        "GLOO_SOCKET_IFNAME": loopback(),  # a laptop's host name often resolves to nowhere
        "NO_MKDOCS_2_WARNING": "1",
        "PYTHONUNBUFFERED": "1",  # progress shows as it happens, also in a log
    }
    chosen = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return {**chosen, "PATH": f"{ENV / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def contents_wanted() -> str:
    """Describe all that decides what `.nox/env` should hold, as text to compare with its stamp."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    metadata = json.dumps(
        [project["build-system"], project["project"], project["tool"]["setuptools"]]
    )
    return json.dumps(
        {
            "constraints": hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest(),
            "metadata": hashlib.sha256(metadata.encode()).hexdigest(),
            "extras": EXTRAS,
            "python": list(sys.version_info[:2]),
            "root": str(ROOT),  # the environment holds absolute paths: it cannot be moved
        },
        indent=1,
    )


def forget_moved_environment() -> None:
    """Delete an environment that was made when this checkout lay in another folder."""
    try:
        made_for = json.loads(STAMP.read_text())["root"]
    except (OSError, ValueError, KeyError):
        return
    if made_for != str(ROOT):
        shutil.rmtree(ENV)


forget_moved_environment()


def run(session: nox.Session, *arguments: str, to_fix: str, **variables: str) -> None:
    """Run the shared environment's Python; when it fails, end with the line that helps."""
    command = [str(ENV / "bin" / "python"), *arguments]
    try:
        session.run(*command, external=True, env={**run_environment(), **variables})
    except nox.command.CommandFailed:
        session.error(to_fix.rstrip("."))  # nox ends the sentence


def shared(name: str | None = None):
    """Declare a session that runs in the shared environment."""
    return nox.session(name=name, venv_backend="none", requires=["env"])


@nox.session(reuse_venv=True, default=False)
def env(session: nox.Session) -> None:
    """Fill the one virtual environment that every other command uses."""
    require_python()
    wanted = contents_wanted()
    if STAMP.is_file() and STAMP.read_text() == wanted:
        session.log("nothing to install")
        return
    STAMP.unlink(missing_ok=True)
    print(LARGE_DOWNLOAD, flush=True)
    # setuptools first and no build isolation: an isolated build would fetch an unpinned one.
    pinned_by = ("-c", "constraints.txt")
    options = {"silent": False, "env": {"PIP_USER": "0"}}
    session.install(*pinned_by, "setuptools", **options)
    session.install(*pinned_by, "--no-build-isolation", "-e", f".[{EXTRAS}]", **options)
    STAMP.write_text(wanted)


@shared()
def tests(session: nox.Session) -> None:
    """Run the tests; `-- -k WORDS` or `-- tests/test_layout.py` picks some, `-- --full` adds more.

    More is every combination of strategy, precision, offload, prefetch, form of the parameters,
    model and number of ranks, with a line of progress for each group of them.
    """
    run(
        session,
        *("-m", "pytest", *session.posargs),
        to_fix="a test failed. Its name and message are above; `nox -s tests -- --lf` repeats it.",
    )


@shared(name="docs-test")
def docs_test(session: nox.Session) -> None:
    """Prove that pages and code agree; `-- FILES` checks only some snippets."""
    run(
        session,
        *("-m", "tools.docs_test", *session.posargs),
        to_fix="pages and code disagree, as listed above. Mend the page, the docstring or the "
        "code; if a snippet's new output is right, `nox -s docs-update` writes it down.",
    )


@shared(name="docs-update")
def docs_update(session: nox.Session) -> None:
    """Rewrite the outputs that snippets promise; review the diff."""
    run(
        session,
        *("-m", "tools.snippets", "--update", *session.posargs),
        to_fix="a snippet did not run, so its promise was left as it was. Its error is above.",
    )


def port_of(arguments: list[str]) -> int:
    """Return the number after `--port`, else 8000."""
    if "--port" not in arguments:
        return 8000
    given = arguments[arguments.index("--port") + 1 :]
    if not given or not given[0].isdigit():
        raise SystemExit("`--port` needs a number: nox -s docs -- --port 8001")
    return int(given[0])


def port_is_free(port: int) -> bool:
    """Say whether a server can listen on this port of the loopback address."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError:
            return False
    return True


@shared()
def docs(session: nox.Session) -> None:
    """Build the site and serve it; `-- --build-only`, `-- --port N`, or `-- --live` to edit.

    `--live` serves at once and builds again after each edit of a page, a docstring or a snippet. It
    takes recorded runs as they are, and is no proof of anything.
    """
    port, build_only = port_of(session.posargs), "--build-only" in session.posargs
    live = "--live" in session.posargs
    variables = {"FSDP_REF_LIVE": "1"} if live else {}
    if not build_only and not port_is_free(port):
        session.error(
            f"port {port} of {ADDRESS} is taken. Stop what listens there, or choose another: "
            f"nox -s docs -- --port {port + 1}"
        )
    run(
        session,
        *("-m", "tools.prebuild"),
        to_fix="a generated page could not be made. The file it comes from is named above.",
        **variables,
    )
    if not live:
        build_site(session)
    if build_only:
        session.log("the site is in build/site")
        return
    print(f"\nServing on http://{ADDRESS}:{port}/ (Ctrl+C stops)\n", flush=True)
    serve = ("-m", "mkdocs", "serve", "--dev-addr", f"{ADDRESS}:{port}")
    if live:
        serve = (*serve, "--no-strict")
    run(session, *serve, to_fix="the server stopped; its message is above.", **variables)


def build_site(session: nox.Session) -> None:
    """Build the site into build/site."""
    run(
        session,
        *("-m", "mkdocs", "build", "--strict"),
        to_fix="the site has the faults listed above, each with its page. A fault in a page of "
        "the API reference sits in the docstring that the page shows.",
    )


@shared()
def lint(session: nox.Session) -> None:
    """Check style and formatting; `nox -s fix` mends most of what this finds."""
    to_fix = "`nox -s fix` mends formatting and most findings; the rest is listed above."
    run(session, "-m", "ruff", "check", *PYTHON_SOURCES, to_fix=to_fix)
    run(session, "-m", "ruff", "format", "--check", *PYTHON_SOURCES, to_fix=to_fix)


@shared()
def types(session: nox.Session) -> None:
    """Check the types of fsdp_ref strictly."""
    to_fix = "the types do not fit, as listed above with file and line."
    run(session, "-m", "mypy", *session.posargs, to_fix=to_fix)


@shared()
def fix(session: nox.Session) -> None:
    """Format the code and mend what can be mended without thinking."""
    to_fix = "what is listed above needs a person."
    run(session, "-m", "ruff", "format", *PYTHON_SOURCES, to_fix=to_fix)
    run(session, "-m", "ruff", "check", "--fix", *PYTHON_SOURCES, to_fix=to_fix)


@shared(name="docs-versions")
def docs_versions(session: nox.Session) -> None:
    """Deploy two versions into a temporary clone and check that they stay apart."""
    to_fix = "the versioned site is not right; the line above says what was found."
    run(session, "-m", "tools.versions", "check", *session.posargs, to_fix=to_fix)


NO_CHROMIUM = """\
there is no `chromium` on this machine, so nobody looked at the site. \
Debian, Ubuntu: sudo apt-get install --no-install-recommends chromium"""


def install_browser_tools(session: nox.Session) -> None:
    """Add what drives a browser to the shared environment, where it is not there yet."""
    wanted = [pinned("playwright"), pinned("axe-playwright-python")]
    stamp = ENV / "browser-tools.json"
    if stamp.is_file() and json.loads(stamp.read_text()) == wanted:
        return
    install = ("-m", "pip", "install", "-c", "constraints.txt", *wanted)
    run(session, *install, to_fix="pip could not install the browser tools; its message is above.")
    stamp.write_text(json.dumps(wanted))


@shared(name="docs-browser")
def docs_browser(session: nox.Session) -> None:
    """Use the versioned site with a real Chromium; `-- -k WORDS` picks some of the tests."""
    if shutil.which("chromium") is None:
        if os.environ.get("CI"):
            session.error(NO_CHROMIUM)
        session.skip(NO_CHROMIUM)
    install_browser_tools(session)
    tree = ROOT / "build" / "versions"
    to_fix = "the site could not be built; the line above says why."
    run(session, "-m", "tools.versions", "tree", str(tree), to_fix=to_fix)
    run(
        session,
        *("-m", "pytest", "tests/browser", *session.posargs),
        to_fix="a reader would see the faults above. `nox -s docs-browser -- --lf` repeats them.",
        FSDP_REF_BROWSER_SITE=str(tree),
    )


@shared(name="docs-deploy")
def docs_deploy(session: nox.Session) -> None:
    """Write `-- VERSION [ALIAS]` of the site to the local branch gh-pages; pushes nothing."""
    to_fix = "nothing was deployed; the line above says why."
    run(session, "-m", "tools.versions", "deploy", *session.posargs, to_fix=to_fix)
