"""Installs the peers, each of them optional, into the environment that this runs in; bde, which pins an old
BlackJAX, into one of its own beside it.

    python -m benchmarks.install
    python -m benchmarks.install rivals     (those of the study on tables, which have one environment)
"""

import site
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
BDE_FOLDER = ROOT / "build" / "bench-bde"
BDE_PYTHON = BDE_FOLDER / "bin" / "python"


def main(which: str = "bench") -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = extras["optional-dependencies"]
    peers, bde = lists[which], lists["bench-bde"]
    # Together, so that one torch suits all; where one of them cannot be had, those that can.
    if not _install(sys.executable, peers):
        for peer in peers:
            if not _install(sys.executable, [peer]):
                print(f"{peer} cannot be installed: it is left out.")
    if which == "rivals":
        return
    if not _bde_environment() or not _install(str(BDE_PYTHON), bde):
        print(f"{', '.join(bde)} cannot be installed: it is left out.")


def _bde_environment() -> bool:
    """An environment that sees the packages of this one, JAX among them, behind its own."""
    if subprocess.run([sys.executable, "-m", "venv", str(BDE_FOLDER)], check=False).returncode:
        return False
    (folder,) = BDE_FOLDER.glob("lib/python*/site-packages")
    (folder / "benchmarks.pth").write_text("\n".join(site.getsitepackages()) + "\n", encoding="utf-8")
    return True


def _install(python: str, requirements: list[str]) -> bool:
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
    return subprocess.run(command, check=False).returncode == 0


if __name__ == "__main__":
    main(*sys.argv[1:2])
