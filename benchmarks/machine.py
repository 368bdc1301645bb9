"""The machine and the versions that a benchmark ran with."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from measureflow.study.provenance import provenance

PEERS = ("blackjax", "posteriors", "torch", "numpyro", "pykeops")


def machine() -> dict[str, Any]:
    """What the page says of where its numbers come from."""
    record = provenance(0, {})
    kept = {name: record[name] for name in ("measureflow", "commit", "jax", "python")}
    device = jax.devices()[0]
    accelerator = None if device.platform == "cpu" else device.device_kind
    return kept | {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "accelerator": accelerator,
        "system": f"{platform.system()} {platform.machine()}",
        "peers": {name: found for name in PEERS if (found := _version(name)) is not None},
    }


def processor() -> str:
    """The name that the processor gives itself."""
    listed = Path("/proc/cpuinfo")
    if listed.exists():
        for line in listed.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
