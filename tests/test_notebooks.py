"""The notebooks run, and print what is stored in them.

`python tests/test_notebooks.py NAME …` runs them and stores what they print and draw; without names, all of
them. A cell prints and draws; the value of its last line is not shown.
"""

import base64
import contextlib
import io
import json
import sys
from pathlib import Path

import pytest
from matplotlib import pyplot as plt

sys.path.insert(0, str(Path(__file__).parent))
from test_docs import ROOT, agree

NOTEBOOKS = ROOT / "docs" / "notebooks"
QUICK, LONG = ("paper", "table"), ("numpyro", "images")


def read(name: str) -> dict:
    return json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))


def run(notebook: dict, name: str) -> list[tuple[str, list[bytes]]]:
    """What each cell of code prints, and the pictures that it draws."""
    plt.switch_backend("Agg")
    namespace, results = {"__name__": name}, []
    for index, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] != "code":
            continue
        code = compile("".join(cell["source"]).replace("plt.show()", ""), f"{name}, cell {index}", "exec")
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(code, namespace)
        results.append((output.getvalue(), drawn()))
    return results


def drawn() -> list[bytes]:
    pictures = []
    for number in plt.get_fignums():
        file = io.BytesIO()
        plt.figure(number).savefig(file, format="png", dpi=100)
        pictures.append(file.getvalue())
    plt.close("all")
    return pictures


def printed(cell: dict) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")


# They call Flax, Optax and NumPyro, which are not written for strict promotion.
@pytest.mark.standard_promotion
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)], ids=[*QUICK, *LONG]
)
def test_notebooks_run_and_print_what_they_show(name):
    notebook = read(name)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for cell, (text, pictures) in zip(cells, run(notebook, name), strict=True):
        assert agree(printed(cell), text), f"{name} shows\n{printed(cell)}\nbut prints\n{text}"
        assert len(pictures) == sum("image/png" in output.get("data", {}) for output in cell["outputs"])


def test_every_notebook_is_tested_and_says_what_its_pictures_show():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {*QUICK, *LONG}
    for name in (*QUICK, *LONG):
        for cell in read(name)["cells"]:
            if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])):
                assert cell["metadata"]["alt"], f"{name}: a cell that draws has no `alt` in its metadata"


def store(name: str) -> None:
    """Run a notebook and write what it prints and draws into it."""
    notebook = read(name)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, (text, pictures)) in enumerate(zip(cells, run(notebook, name), strict=True), 1):
        cell["execution_count"] = number
        cell["outputs"] = [
            {"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}
        ] * bool(text)
        for picture in pictures:
            data = {"image/png": base64.b64encode(picture).decode()}
            cell["outputs"].append({"output_type": "display_data", "data": data, "metadata": {}})
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    (NOTEBOOKS / f"{name}.ipynb").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    for each in sys.argv[1:] or (*QUICK, *LONG):
        store(each)
