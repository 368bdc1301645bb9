"""Pages of one file: they work offline, are light or dark, and ask nobody for anything."""

from html import escape
from importlib.resources import files

# A browser that is asked for anything else than this page refuses.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def document(title: str, styles: str, body: str) -> str:
    """A page around its body."""
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{styles}</style></head><body>{body}</body></html>\n"
    )


def resource(page: str, name: str) -> str:
    """A style or a script that lies beside the code of a page."""
    return files(f"measureflow.commands.{page}").joinpath(name).read_text(encoding="utf-8")
