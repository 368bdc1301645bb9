"""Result files: JSON, written whole or not at all."""

import json
import math
import os
from pathlib import Path
from typing import Any


def write_json(path: Path, content: Any, indent: int = 2) -> None:
    """What was written before an interruption is kept."""
    text = json.dumps(valid(content), indent=indent, ensure_ascii=False, allow_nan=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Runs that share a folder do not share this name.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


def valid(value: Any) -> Any:
    """JSON knows no NaN and no infinities: they are null."""
    if isinstance(value, dict):
        return {name: valid(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [valid(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
