"""What a result file says of its origin."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

import measureflow


def provenance(seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Version, commit, device, seed and settings of a result."""
    return {
        "measureflow": measureflow.__version__,
        "commit": _commit(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": _device(),
        "seed": seed,
        "settings": settings,
    }


def _device() -> str:
    """The accelerator's name, or the number of cores where there is none."""
    device = jax.devices()[0]
    return f"{os.cpu_count()} CPU cores" if device.platform == "cpu" else device.device_kind


def _commit() -> str | None:
    """The commit of a source checkout, marked where files differ from it; None for an installed package."""
    folder = Path(__file__).parents[1]
    if not (folder.parent.parent / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
