"""The flow explorer as one page: texts and controls in body.html, formulas in flows.js, what moves in
explorer.js."""

import json

from measureflow import __version__
from measureflow.commands.pages import document, resource
from measureflow.prediction.colours import COLOURS


def page() -> str:
    """The whole page as a text."""
    styles = resource("report", "report.css") + resource("explorer", "explorer.css")
    body = resource("explorer", "body.html").replace("{version}", __version__)
    scripts = (
        f"<script type='application/json' id='colours'>{json.dumps(COLOURS)}</script>"
        f"<script>{resource('explorer', 'flows.js')}</script>"
        f"<script>{resource('explorer', 'explorer.js')}</script>"
    )
    return document(
        "Flow explorer: particles, and the measure that they should become", styles, body + scripts
    )
