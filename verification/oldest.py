"""The oldest versions that pyproject.toml allows, as constraints for pip: `python verification/oldest.py`."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def oldest() -> list[str]:
    """name==bound for what measureflow needs, and for what its command line reads tables with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = []
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["tables"]]:
        bound = re.match(r"([A-Za-z0-9_.-]+?)>=([0-9.]+)", requirement)
        if bound is None:
            raise ValueError(f"{requirement} has no lower bound; give it the oldest version that was tested.")
        bounds.append(f"{bound[1]}=={bound[2]}")
    return bounds


if __name__ == "__main__":
    print("\n".join(oldest()))
