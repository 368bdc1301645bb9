"""What is released: a wheel and an sdist that hold all, and a wheel that works where nothing else is."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from tests.commands.flats import TINY, flats

import measureflow as mf

ROOT = Path(__file__).parent.parent
pytest.importorskip("hatchling")


def run(*command, cwd, **environment):
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept | environment, capture_output=True, text=True
    )


def built(source, folder, *options):
    done = run(sys.executable, "-m", "hatchling", "build", *options, "-d", folder, cwd=source)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    return built(ROOT, tmp_path_factory.mktemp("dist"))


def names(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("measureflow/")}


def test_the_wheel_holds_every_file(released):
    """Styles, scripts and check sums as well as code."""
    (wheel,) = released.glob("*.whl")
    files = [path for path in (ROOT / "src" / "measureflow").rglob("*") if path.is_file()]
    kept = [path.relative_to(ROOT / "src").as_posix() for path in files if path.suffix != ".pyc"]
    assert names(wheel) == set(kept)
    assert "measureflow/commands/explorer/flows.js" in names(wheel)


def test_the_sdist_is_enough_to_build_the_wheel(released, tmp_path):
    (archive,) = released.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    (wheel,) = built(source, tmp_path / "again", "-t", "wheel").glob("*.whl")
    assert names(wheel) == names(next(released.glob("*.whl")))
    assert (source / "tests" / "test_dist.py").is_file()


def test_the_wheel_s_own_files_are_enough(released, tmp_path):
    """Beside the dependencies that are here anyway, away from the checkout."""
    (wheel,) = released.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    script = (
        "import measureflow; from measureflow.commands.explorer.page import page; from "
        "measureflow.commands.pages import resource; assert page() and resource('report', 'report.js'); "
        "print(measureflow.__file__, measureflow.__version__)"
    )
    done = run(sys.executable, "-c", script, cwd=tmp_path, PYTHONPATH=str(tmp_path / "installed"))
    assert done.returncode == 0, done.stderr
    where, version = done.stdout.split()
    assert Path(where).is_relative_to(tmp_path / "installed")
    assert version == mf.__version__


@pytest.mark.slow
def test_a_fresh_environment_from_the_wheel_to_a_report(released, tmp_path):
    """pip install, fit, report, and no Python written. It needs a package index."""
    (wheel,) = released.glob("*.whl")
    venv.create(tmp_path / "fresh", with_pip=True)
    binaries = tmp_path / "fresh" / "bin"
    done = run(binaries / "python", "-m", "pip", "install", "--quiet", f"{wheel}[tables]", cwd=tmp_path)
    if done.returncode and "No matching distribution found for jax" in done.stderr:
        pytest.skip("there is no package index here")
    assert done.returncode == 0, done.stderr
    done = run(binaries / "python", "-m", "measureflow", "--version", cwd=tmp_path)
    assert done.stdout.strip() == mf.__version__, done.stderr
    flats(120, 0).to_csv(tmp_path / "flats.csv", index=False)
    for command in (
        ("fit", "flats.csv", "--target", "rent", "--drop", "cheap", "--out", "rent.mf", *TINY),
        ("report", "rent.mf", "flats.csv", "--folds", "0", "--out", "report.html"),
        ("explore", "--out", "explorer.html"),
        ("completion", "bash"),
    ):
        done = run(binaries / "measureflow", *command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_every_dependency_has_a_lower_bound():
    from verification.oldest import oldest

    bounds = dict(bound.split("==") for bound in oldest())
    assert {"jax", "equinox", "numpy", "pandas"} <= set(bounds)
