"""Pictures of the site as a reader sees it: light, dark, and on a phone.

python -m verification.screenshots [PAGE …] [--site build/docs] [--out docs/assets/shots]

Needs Chromium (`make chromium`) and a built site (`mkdocs build --site-dir build/docs`). Look at every
picture before you commit it.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

PAGES = ("", "theory", "api", "gallery", "notebooks/images")
# Width and height of the window, and the width at which the picture is kept.
VIEWS = {"light": (1280, 900, 640), "dark": (1280, 900, 640), "phone": (390, 844, 260)}
FRAME = (
    '<body style="margin:0"><iframe src="{url}" style="border:0;width:{width}px;height:{height}px"></iframe>'
)


def main() -> None:
    """Take a picture of each page in each view."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", default=PAGES)
    parser.add_argument("--site", type=Path, default=Path("build/docs"))
    parser.add_argument("--out", type=Path, default=Path("docs/assets/shots"))
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    for page in asked.pages:
        for view in VIEWS:
            path = asked.out / f"{(page or 'home').replace('/', '-')}-{view}.webp"
            shot(asked.site / page / "index.html", view, path)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def shot(page: Path, view: str, out: Path) -> None:
    """One picture. The page is in a frame, since a window may not be as narrow as a phone."""
    width, height, kept = VIEWS[view]
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("there is no Chromium here; `make chromium` installs it.")
    with tempfile.TemporaryDirectory() as folder:
        frame, picture = Path(folder) / "frame.html", Path(folder) / "shot.png"
        text = FRAME.format(url=page.resolve().as_uri(), width=width, height=height)
        frame.write_text(text, encoding="utf-8")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}/browser", "--virtual-time-budget=8000"]
        command += [f"--window-size={max(width, 600)},{height}", f"--screenshot={picture}"]
        command += ["--blink-settings=preferredColorScheme=0"] * (view == "dark")
        subprocess.run([*command, frame.as_uri()], check=True, capture_output=True, timeout=120)
        image = Image.open(picture).convert("RGB").crop((0, 0, width, height))
        image.resize((kept, kept * height // width), Image.Resampling.LANCZOS).save(out, quality=80)


if __name__ == "__main__":
    main()
