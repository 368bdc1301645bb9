"""Scripts of pages, run as a reader's browser runs them."""

import json
import re
import shutil
import subprocess
import tempfile
from html import unescape
from importlib.resources import files
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NODE = shutil.which("node")


def evaluated(body):
    """What the body of a function that uses `flows` returns: by node, or in a browser where there is none."""
    source = files("measureflow.commands.explorer").joinpath("flows.js").read_text(encoding="utf-8")
    script = f"{source}\nconst answer = (() => {{ {body} }})();\n"
    with tempfile.TemporaryDirectory() as folder:
        if NODE is not None:
            path = Path(folder, "script.js")
            path.write_text(f"{script}process.stdout.write(JSON.stringify(answer));", encoding="utf-8")
            done = subprocess.run([NODE, path], capture_output=True, text=True, check=True, timeout=120)
            return json.loads(done.stdout)
        path = Path(folder, "script.html")
        shown = "document.body.textContent = JSON.stringify(answer);"
        path.write_text(f"<body></body><script>{script}{shown}</script>", encoding="utf-8")
        text = dom(path)[0]
    return json.loads(unescape(re.search(r"<body>(.*?)</body>", text, re.S)[1]))


def dom(path, *options):
    """The page once its scripts have run, and what the browser wrote to its console."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [
                CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
                f"--user-data-dir={folder}", *options, "--dump-dom", Path(path).as_uri(),
            ],
            capture_output=True, text=True, check=True, timeout=120,
        )  # fmt: skip
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)
