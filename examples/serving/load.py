"""Latency and throughput of the service on loopback, and what it does with bad and hostile requests:

    python load.py exported rows.json

It starts uvicorn itself, sends good requests one after the other and by eight clients at once, then hostile
ones, and at last looks whether the service still answers, how many files it has open, and how much memory.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

ADDRESS = "http://127.0.0.1:8321"
REQUESTS, CLIENTS = 200, 8


def hostile(row: dict[str, Any]) -> dict[str, tuple[bytes, int]]:
    """Bodies, and the status that each must get."""
    first = next(iter(row))

    def rows(*changed: Any) -> bytes:
        return json.dumps({"rows": list(changed)}).encode()

    return {
        "empty body": (b"", 400),
        "no JSON": (b"{rows: 1", 400),
        "not UTF-8": (b"\xff\xfe\x00", 400),
        "NaN": (json.dumps({"rows": [row | {first: float("nan")}]}).encode(), 400),
        "100,000 levels of brackets": (b"[" * 100_000 + b"]" * 100_000, 400),
        "deep inside a row": (rows(row)[:-2] + b', "x": ' + b"[" * 50_000 + b"]" * 50_000 + b"}]}", 400),
        "a number of 300,000 digits": (b'{"rows": [{"a": ' + b"9" * 300_000 + b"}]}", 400),
        "20 MB": (b'{"rows": [' + b" " * 20_000_000 + b"]}", 413),
        "no rows": (rows(), 422),
        "10,000 rows": (b'{"rows": [' + b"1," * 9_999 + b"1]}", 422),
        "rows are a text": (json.dumps({"rows": "all"}).encode(), 422),
        "a row is a number": (rows(1), 422),
        "a row is null": (rows(None), 422),
        "a column is missing": (rows({k: v for k, v in row.items() if k != first}), 422),
        "a column too many": (rows(row | {"; DROP TABLE": 1}), 422),
        "a value is a list": (rows(row | {first: [1]}), 422),
        "a value is an object": (rows(row | {first: {"a": 1}}), 422),
        "1e400": (rows(row).replace(json.dumps(row[first]).encode(), b"1e400", 1), 422),
        "more keys": (json.dumps({"rows": [row], "model": "../../etc/passwd"}).encode(), 422),
    }


async def timed(rows: list[Any], clients: int) -> np.ndarray:
    """Seconds of every request, so many at once."""
    seconds: list[float] = []

    async def client(count: int) -> None:
        async with httpx.AsyncClient(base_url=ADDRESS, timeout=60) as session:
            for _ in range(count):
                began = time.perf_counter()
                answer = await session.post("/predict", json={"rows": rows})
                assert answer.status_code == 200, answer.text
                seconds.append(time.perf_counter() - began)

    await asyncio.gather(*(client(REQUESTS // clients) for _ in range(clients)))
    return np.array(seconds)


def measured(rows: list[Any], clients: int) -> None:
    asyncio.run(timed(rows, clients))
    began = time.perf_counter()
    seconds = asyncio.run(timed(rows, clients))
    whole = time.perf_counter() - began
    p50, p99 = 1e3 * np.quantile(seconds, [0.5, 0.99])
    per_second = len(seconds) / whole
    cells = [
        len(rows),
        clients,
        f"{p50:.1f} ms",
        f"{p99:.1f} ms",
        round(per_second),
        round(per_second * len(rows)),
    ]
    print(f"| {' | '.join(map(str, cells))} |")


def attacked(row: dict[str, Any]) -> None:
    with httpx.Client(base_url=ADDRESS, timeout=60) as session:
        for name, (content, status) in hostile(row).items():
            answer = session.post("/predict", content=content)
            assert answer.status_code == status, f"{name}: {answer.status_code} {answer.text[:300]}"
            assert set(answer.json()) == {"error"}, name
            said = answer.json()["error"].partition(" got ")[0]
            assert "Traceback" not in said, said
            assert ".py" not in said, "a file of the server"
            assert len(answer.text) < 2_000, name


def state(process: subprocess.Popen) -> tuple[int, int]:
    """Open files, and kilobytes of memory."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    memory = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return len(list(Path(f"/proc/{process.pid}/fd").iterdir())), memory


def main(folder: str, rows_file: str) -> None:
    rows = json.loads(Path(rows_file).read_text())
    command = [sys.executable, "-m", "uvicorn", "app:app", "--port", "8321", "--log-level", "warning"]
    environment = os.environ | {"MODEL": str(Path(folder).resolve())}
    process = subprocess.Popen(command, cwd=Path(__file__).parent, env=environment)
    try:
        while True:
            try:
                httpx.get(ADDRESS, timeout=5)
                break
            except httpx.TransportError:
                time.sleep(0.2)
        print("| rows a request | clients | median | 99% | requests/s | rows/s |\n|---|---|---|---|---|---|")
        for count in (1, 16, 256):
            for clients in (1, CLIENTS):
                measured((rows * count)[:count], clients)
        attacked(rows[0])
        before = state(process)
        for _ in range(20):
            attacked(rows[0])
        after = state(process)
        kinds = len(hostile(rows[0]))
        print(f"\n{kinds} kinds of hostile requests, 21 times each: all refused, with the right status.")
        (files, memory), (more_files, more) = before, after
        print(f"Open files {files}, then {more_files}; memory {memory // 1024} MB, then {more // 1024}.")
        assert after[0] <= before[0] + 2
        assert after[1] < 1.2 * before[1]
        assert asyncio.run(timed(rows[:1], 1)).size == REQUESTS, "it still answers"
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(timeout=30)


if __name__ == "__main__":
    main(*sys.argv[1:])
