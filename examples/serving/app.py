"""An exported model behind HTTP:

    measureflow fit houses.csv --target SalePrice --out houses.mf
    measureflow export houses.mf --out exported
    MODEL=exported uvicorn app:app

Requests are refused before they are read where they are too large, and before they are computed where they
are wrong; what is wrong with a row is said by name, and nothing of the server's own is.
"""

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

MOST_BYTES = 1_000_000
MOST_ROWS = 1_000
# For all requests alike: the number of levels is a shape, and a new shape is compiled.
LEVELS = (0.05, 0.5, 0.95)

folder = Path(os.environ["MODEL"])
spec = importlib.util.spec_from_file_location("predictor", folder / "predictor.py")
assert spec is not None
assert spec.loader is not None
predictor = importlib.util.module_from_spec(spec)
spec.loader.exec_module(predictor)
model = predictor.Predictor(folder)

# Without the pages that list everything: one describes the model, below.
app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)


class RefusedError(Exception):
    """A request that is the client's to mend."""

    def __init__(self, status: int, said: str):
        super().__init__(said)
        self.status, self.said = status, said


@app.exception_handler(RefusedError)
async def refused(_: Request, error: RefusedError) -> JSONResponse:
    return JSONResponse({"error": error.said}, error.status)


@app.exception_handler(Exception)
async def failed(_: Request, error: Exception) -> JSONResponse:
    """Nothing of the inside: what went wrong is in the server's log."""
    return JSONResponse({"error": "the prediction failed"}, 500)


@app.get("/")
async def about() -> dict[str, Any]:
    """What rows have to look like."""
    columns = [{"name": one["name"], "kind": one["kind"]} for one in model.about["columns"]]
    return {"task": model.about["task"], "columns": columns, "quantiles": LEVELS}


@app.post("/predict")
async def predict(request: Request) -> JSONResponse:
    """{"rows": [{column: value, …}, …]} ↦ predictions, one for each row."""
    rows = rows_of(await body(request))
    try:
        found = await run_in_threadpool(model.predict, rows, LEVELS)
    except ValueError as error:
        raise RefusedError(422, str(error)) from None
    return JSONResponse({name: plain(part) for name, part in found.items()})


async def body(request: Request) -> bytes:
    """Of at most a megabyte, whatever its header says."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MOST_BYTES:
            raise RefusedError(
                413, f"the body is larger than {MOST_BYTES:,} bytes; send fewer rows at a time"
            )
        parts.append(part)
    return b"".join(parts)


def rows_of(content: bytes) -> list[Any]:
    """The rows of a body, or what is wrong with it."""
    try:
        # RecursionError: JSON may be nested deeper than Python's stack.
        found = json.loads(content, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise RefusedError(400, "the body is no JSON that can be read") from None
    if not isinstance(found, dict) or set(found) != {"rows"} or not isinstance(found["rows"], list):
        raise RefusedError(422, 'the body must be {"rows": [...]}')
    rows = found["rows"]
    if not 1 <= len(rows) <= MOST_ROWS:
        raise RefusedError(422, f"rows must be 1 to {MOST_ROWS:,}, got {len(rows):,}")
    return rows


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def plain(part: Any) -> Any:
    """As JSON has it, which has no infinity: null stands there."""
    if not isinstance(part, np.ndarray):
        return part
    return [
        plain(row) if isinstance(row, np.ndarray) else row if math.isfinite(row) else None for row in part
    ]
