"""Build the report as one HTML page: verdict, curves, findings, checks, heat map, config, environment, overhead."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template

from gradwatch.history.store import History
from gradwatch.records import Diagnosis
from gradwatch.render.common import format as units
from gradwatch.render.common.heatmap import draw
from gradwatch.render.common.layers import layers, norms_over_run
from gradwatch.render.common.run_stats import environment, health
from gradwatch.render.json_document import strict
from gradwatch.render.report.checks import check_table
from gradwatch.render.report.data import packed
from gradwatch.render.report.findings import diagnosis_cards
from gradwatch.render.report.map_cards import ABOUT, MapCards
from gradwatch.render.report.module_table import ModuleTable
from gradwatch.render.report.overview import overview
from gradwatch.render.report.text import code, definitions, prose

ASSETS = Path(__file__).parent / "assets"
# in order of use: they share one script element
SCRIPTS = ("uplot.iife.min.js", "codes.js", "colours.js", "lines.js", "profile.js", "heatmap.js", "report.js")
LICENSE = "uplot.LICENSE"
"""License of uPlot. Every copy of the library must include it, so every report does."""
STYLES = ("uplot.min.css", "report.css")
NOTHING = "No steps recorded: the run ended before its first optimizer step."
MOST_EVENTS = 200


def page(
    history: History,
    diagnoses: Sequence[Diagnosis],
    *,
    run: Path | None = None,
    config_text: str = "",
    changed_text: str = "",
) -> str:
    """Return the report of a run as one HTML page that loads no other file.

    Args:
        history: The run; it may be empty.
        diagnoses: Diagnoses of its findings.
        run: Run directory, or None.
        config_text: Text of the config, or an empty string.
        changed_text: The settings in it that differ from the defaults, or an empty string if that is unknown.
    """
    document, codes = packed(history)
    maps = MapCards.read(run) if run else None
    modules = ModuleTable.read(run) if run else None
    # the policy has hashes of these texts, so the template must insert them unchanged
    script, style = f"\n/*{asset_text((LICENSE,))}*/{asset_text(SCRIPTS)}", asset_text(STYLES)
    return Template((ASSETS / "report.html").read_text(encoding="utf-8")).substitute(
        policy=policy(script, style),
        title=escape(f"{history.info.name}: {health(history)}"),
        style=style,
        script=script,
        name=escape(history.info.name),
        overview=overview(history, diagnoses, run),
        diagnoses=diagnosis_cards(history, diagnoses, run=run if config_text else None)
        or f"<p>{escape(_quiet(history))}</p>",
        maps_link='<a href="#maps">Samples</a>' if maps else "",
        maps=_maps(maps) if maps else "",
        modules_link='<a href="#modules">Modules</a>' if modules else "",
        modules=_modules(modules) if modules else "",
        checks=check_table(history, config_text=config_text),
        picture=_picture(history),
        config=_config(config_text, changed_text),
        environment=definitions(environment(history.info).items()),
        events=_events(history),
        data=_json(document),
        pack=codes,
    )


def _maps(maps: MapCards) -> str:
    return (
        '<section id="maps" aria-labelledby="maps-title"><h2 id="maps-title">Inputs that decide</h2>'
        f'<p class="hint">{escape(maps.title)}{f". {ABOUT}" if maps.cards else ""}</p>{maps.to_html()}</section>'
    )


def _modules(modules: ModuleTable) -> str:
    return (
        '<section id="modules" aria-labelledby="modules-title"><h2 id="modules-title">Memory and time of a step</h2>'
        f"{modules.to_html()}</section>"
    )


def policy(script: str, style: str) -> str:
    """Return the content security policy: allow this script, this style and embedded pictures, nothing else."""
    script_hash, style_hash = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") for text in (script, style)
    )
    return (
        f"default-src 'none'; script-src 'sha256-{script_hash}'; style-src 'sha256-{style_hash}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


@functools.cache  # the files do not change, and a process may write many reports
def asset_text(names: tuple[str, ...]) -> str:
    """Return the text of assets, such as style sheets."""
    return "\n" + "\n".join((ASSETS / name).read_text(encoding="utf-8").strip() for name in names) + "\n"


def _json(document: Mapping[str, object]) -> str:
    # a layer may be named `</script>`, and old browsers treat U+2028 and U+2029 in a script as line ends
    text = json.dumps(strict(document), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _quiet(history: History) -> str:
    if history.step < 0:
        return NOTHING
    return "No problems found." if history.info.layers else "No layers were monitored: there are only curves."


def _config(config_text: str, changed_text: str) -> str:
    """Return the settings that were changed, then the whole config, folded."""
    if not config_text:
        return "<p>This run has no gradwatch config.</p>"
    whole = f"<details><summary>The whole config with its defaults</summary>{code(config_text)}</details>"
    if not changed_text:
        return whole
    return (
        f'<p class="hint">Settings that differ from the defaults:</p>{code(changed_text, copy="these settings")}{whole}'
    )


def _events(history: History) -> str:
    """Return all events as a foldable list, or an empty string without events."""
    if not history.events:
        return ""
    items = "".join(
        f"<li>step {event.step:,}: <b>{escape(event.kind)}</b> "
        f"{f'<code>{escape(event.layer)}</code> ' if event.layer else ''}{prose(event.text)}</li>"
        for event in history.events[:MOST_EVENTS]
    )
    return f"<details><summary>{units.plural(len(history.events), 'event')}</summary><ul>{items}</ul></details>"


def _picture(history: History) -> str:
    """Return the heat map as a picture, for readers without scripts, such as the preview of a mail."""
    known = layers(history.info.layers)
    if history.step < 0 or not known:  # `draw` needs a step and a layer
        return ""
    png, (width, height) = draw(*norms_over_run(history, known), known, findings=history.findings)
    source = base64.b64encode(png).decode("ascii")
    about = "Gradient norm of every layer over the run, input side on top; triangles mark findings."
    return f'<img width="{width}" height="{height}" alt="{about}" src="data:image/png;base64,{source}">'
