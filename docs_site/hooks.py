"""What MkDocs does for this site beyond its plugins: pages of the source, and pages of the notebooks.

- Every module has a page, `source/ROOM/NAME.md`, to which the API links. In the pages themselves a link to a
  file under `../src/measureflow/` works on a forge as it is, and here leads to that page.
- `notebooks/NAME.ipynb` becomes a page with the outputs that are stored in it; the notebook itself can be
  downloaded.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "measureflow"
SOURCE_LINK = re.compile(r"\]\(\.\./src/measureflow/([\w/]+)\.py\)")
# The anchor of line 12 is L-12.
LINES = HtmlFormatter(cssclass="highlight source", linenos="inline", lineanchors="L", wrapcode=True)
SOURCE_PAGE = """\
---
search:
  exclude: true
---

# {name}

{code}
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).with_suffix("").as_posix()
        code = highlight(path.read_text(encoding="utf-8"), PythonLexer(), LINES)
        text = SOURCE_PAGE.format(name=f"{name}.py", code=code)
        files.append(File.generated(config, f"source/{name}.md", content=text))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = json.loads(file.content_string)
        stem = file.src_uri.removesuffix(".ipynb")
        text, pictures = notebook_page(notebook, Path(file.src_uri).name)
        files.append(File.generated(config, f"{stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to files of the package lead to their pages."""
    up = "../" * page.file.src_uri.count("/")
    return SOURCE_LINK.sub(rf"]({up}source/\1.md)", markdown)


def notebook_page(notebook: dict, name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and its pictures by name."""
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(text)
            continue
        parts.append(f"```python\n{text}\n```")
        for output in cell["outputs"]:
            if output["output_type"] == "stream":
                parts.append("```text\n" + "".join(output["text"]) + "```")
            elif "image/png" in output["data"]:
                picture = f"{Path(name).stem}-{len(pictures) + 1}.png"
                pictures[picture] = base64.b64decode("".join(output["data"]["image/png"]))
                parts.append(f"![{cell['metadata']['alt']}]({picture})")
    parts.insert(1, f"*A notebook, with the outputs that the tests compare: [download {name}]({name}).*")
    return "\n\n".join(parts) + "\n", pictures
