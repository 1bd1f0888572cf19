"""Draw the diagrams of the documentation: ``python tools/diagrams.py`` writes them to ``docs/figures``.

A diagram is text: boxes and arrows with coordinates, in the colours of ``STYLE``, which follow the reader's theme.
``--check`` writes nothing, and exits with 1 if a file is not what would be written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from html import escape
from pathlib import Path

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"

STYLE = """
:root {
  --card: #f7f9fa; --edge: #dde4e8; --ink: #1c2a32; --soft: #5a6c76; --box: #ffffff; --line: #6f8591;
  --teal: #0b6f94; --tealbox: #e1f1f7; --amber: #b96a14; --amberbox: #fdf0df; --green: #24806f; --greenbox: #e2f3ef;
}
@media (prefers-color-scheme: dark) { :root {
  --card: #1a2126; --edge: #2c373e; --ink: #e6edf1; --soft: #a0b1ba; --box: #222c32; --line: #8aa0ab;
  --teal: #63c7ea; --tealbox: #12323f; --amber: #f0ab5c; --amberbox: #3a2a17; --green: #6fcfbb; --greenbox: #17352f;
} }
text { font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--ink); font-size: 15px; }
.small { font-size: 13px; fill: var(--soft); }
.bold { font-weight: 650; }
.mono { font-family: ui-monospace, Menlo, monospace; font-size: 13px; }
.teal { fill: var(--teal); }
.amber { fill: var(--amber); }
rect { stroke-width: 1.4; }
.box { fill: var(--box); stroke: var(--line); }
.plain { fill: var(--box); stroke: var(--edge); }
.tealbox { fill: var(--tealbox); stroke: var(--teal); }
.amberbox { fill: var(--amberbox); stroke: var(--amber); }
.greenbox { fill: var(--greenbox); stroke: var(--green); }
path { fill: none; stroke: var(--line); stroke-width: 1.6; }
path.teal { stroke: var(--teal); fill: none; stroke-width: 2.2; }
path.amber { stroke: var(--amber); fill: none; stroke-width: 2.2; }
path.head { fill: var(--line); stroke: none; }
path.head-teal { fill: var(--teal); stroke: none; }
path.head-amber { fill: var(--amber); stroke: none; }
"""
"""Colours by what they stand for: teal comes back up, amber goes down."""


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """An SVG file: a card with the parts on it. The title is what a screen reader says."""
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        'orient="auto-start-reverse">'
        f'<path class="{name}" d="M0 1 L10 5 L0 9 z"/></marker>'
        for name in ("head", "head-teal", "head-amber")
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n<style>{STYLE}</style>\n<defs>{heads}</defs>\n'
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="12" fill="var(--card)" stroke="var(--edge)"/>\n'
        f"{body}\n</svg>\n"
    )


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, lines: str = "", kind: str = "box") -> str:
    """A box with lines of text in its middle; the first is bold where there are several."""
    words = lines.split("\n") if lines else []
    top = y + height / 2 + 5 - 10 * (len(words) - 1)
    styles = ["bold" if len(words) > 1 else "", *["small"] * (len(words) - 1)]
    inside = [text(x + width / 2, top + 20 * at, line, styles[at]) for at, line in enumerate(words)]
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"/>' + "".join(inside)


def arrow(route: str, kind: str = "", *, both: bool = False) -> str:
    """An arrow along an SVG path."""
    head = f"head-{kind}" if kind else "head"
    start = f' marker-start="url(#{head})"' if both else ""
    return f'<path class="{kind}" d="{route}" marker-end="url(#{head})"{start}/>'


def overview() -> str:
    """What Cargohold does, in one picture."""
    blocks = [
        f'<rect class="{kind}" x="{300 + 26 * (at % 6)}" y="{150 + 26 * (at // 6)}" width="21" height="21" rx="4"/>'
        for at, kind in enumerate(["tealbox", "tealbox", "amberbox", "amberbox", "greenbox", "plain"] * 2)
    ]
    return picture(
        960,
        400,
        "KV blocks that the device has no room for go down to host memory, disk and a shared store, and come back up when a "
        "prompt with the same prefix returns.",
        [
            text(480, 38, "Computed once, kept below the device, loaded back when the prompt returns", "bold"),
            box(36, 110, 150, 54, "Prompt\na prefix seen before", "plain"),
            box(36, 190, 150, 54, "Answer\nfirst token sooner", "plain"),
            arrow("M186 137 H268"),
            arrow("M270 217 H188"),
            box(270, 76, 208, 190, "", "box"),
            text(374, 102, "Engine", "bold"),
            text(374, 122, "vLLM, or the embedded one", "small"),
            *blocks,
            text(374, 222, "device pool: GPU memory", "small"),
            text(374, 250, "scheduler + workers", "small"),
            box(560, 76, 110, 190, "Cargohold\nconnector:\nwhat to keep,\nwhat to load,\nper block", "tealbox"),
            arrow("M480 136 H558", "amber"),
            text(519, 126, "store", "small amber"),
            arrow("M558 196 H480", "teal"),
            text(519, 216, "load", "small teal"),
            box(752, 66, 172, 54, "Host memory\n20 GB/s and more", "amberbox"),
            box(752, 146, 172, 54, "Disk\nsurvives a restart", "amberbox"),
            box(752, 226, 172, 54, "Shared store\nfor all engines", "amberbox"),
            arrow("M672 93 H750", both=True),
            arrow("M815 122 V144", both=True),
            arrow("M815 202 V224", both=True),
            '<path d="M36 306 H924" style="stroke: var(--edge)"/>',
            text(52, 340, "Every load is verified.", "bold", "start"),
            text(52, 362, "A failed, slow or damaged one is a miss:", "small", "start"),
            text(52, 380, "its tokens are computed.", "small", "start"),
            text(366, 340, "Every tier has a hard limit.", "bold", "start"),
            text(366, 362, "Blocks that are being copied are not reused;", "small", "start"),
            text(366, 380, "nothing waits for a write.", "small", "start"),
            text(680, 340, "Every request can be asked.", "bold", "start"),
            text(680, 362, "Where its tokens came from, and why", "small", "start"),
            text(680, 380, "not from somewhere better.", "small", "start"),
        ],
    )


def shared() -> str:
    """Two engines and one store."""
    parts = [text(380, 34, "What one engine has computed, the other one finds", "bold")]
    for left, name in ((40, "Engine one"), (480, "Engine two")):
        parts += [
            box(left, 60, 240, 48, f"{name}\ndevice pool", "box"),
            arrow(f"M{left + 120} 110 V136", both=True),
            box(left, 138, 240, 48, "Host memory\nits own", "amberbox"),
        ]
    parts += [
        arrow("M160 188 V236", "amber"),
        text(172, 216, "written in the background", "small amber", "start"),
        arrow("M600 236 V188", "teal"),
        text(588, 216, "fetched, checked", "small teal", "end"),
        box(40, 238, 680, 52, "Shared store\na directory on NFS, S3, Google, Azure, Redis or Valkey", "amberbox"),
        text(380, 318, "Equal tokens and equal prefixes have equal keys. There is no master.", "small"),
    ]
    return picture(760, 340, "Two engines with host memory of their own above one shared store.", parts)


def look_up() -> str:
    """From a prompt to its KV: the offloading connector's way through a step."""
    return picture(
        760,
        430,
        "A look-up answers a number of tokens or not yet; the step's message starts loads and stores.",
        [
            box(230, 24, 300, 48, "get_num_new_matched_tokens\nwhat can be loaded?", "tealbox"),
            arrow("M380 74 V104"),
            box(265, 106, 230, 40, "waits for lower tiers?", "box"),
            arrow("M265 126 H168"),
            text(216, 118, "no", "small"),
            arrow("M495 126 H582"),
            text(538, 118, "yes", "small"),
            box(36, 106, 130, 40, "", "box"),
            text(101, 131, "host memory"),
            box(584, 106, 140, 40, "not yet", "amberbox"),
            arrow("M101 148 V184"),
            box(16, 186, 216, 40, "may lower tiers have more?", "box"),
            arrow("M232 206 H654 V148"),
            text(330, 198, "yes", "small"),
            arrow("M101 228 V258"),
            text(116, 248, "no", "small"),
            box(16, 260, 230, 48, "update_state_after_alloc\nplan the load", "tealbox"),
            arrow("M246 284 H276"),
            arrow("M690 148 V284 H546"),
            box(278, 260, 266, 48, "build_connector_meta\nfetch from tiers; all jobs of this step", "tealbox"),
            arrow("M411 310 V338"),
            box(298, 340, 350, 48, "workers\nloads at once, stores after the forward pass", "greenbox"),
            arrow("M296 364 H232"),
            box(16, 340, 214, 48, "update_connector_output\nwhat has ended", "tealbox"),
        ],
    )


def waiting() -> str:
    """The phases of a request that waits for lower tiers."""
    return picture(
        760,
        230,
        "ASK goes to BRING when something is found, else to OVER; BRING goes to HELD when it has arrived, else to OVER.",
        [
            '<circle cx="40" cy="70" r="7" fill="var(--line)"/>',
            arrow("M48 70 H98"),
            box(100, 46, 130, 48, "ASK\nwhich chunks?", "tealbox"),
            arrow("M230 70 H318"),
            text(274, 62, "FOUND", "mono"),
            box(320, 46, 130, 48, "BRING\nslots, then chunks", "tealbox"),
            arrow("M450 70 H538"),
            text(494, 62, "ARRIVED", "mono"),
            box(540, 46, 150, 48, "HELD\nuntil admitted", "greenbox"),
            arrow("M165 96 V166 H318"),
            text(240, 158, "NOTHING, LATE", "mono"),
            arrow("M385 96 V142"),
            text(395, 124, "NOTHING, LATE", "mono", "start"),
            box(320, 144, 150, 48, "OVER\nwhat is there counts", "amberbox"),
            arrow("M690 70 H728"),
            arrow("M470 168 H738 V80"),
            '<circle cx="738" cy="70" r="8" fill="none" stroke="var(--line)" stroke-width="1.6"/>',
            '<circle cx="738" cy="70" r="4" fill="var(--line)"/>',
            text(640, 160, "admitted", "small"),
        ],
    )


def health() -> str:
    """The circuit breaker of a tier."""
    return picture(
        760,
        190,
        "closed becomes open after three failures in a row, open becomes half-open after a pause; a trial closes or opens it.",
        [
            '<circle cx="40" cy="76" r="7" fill="var(--line)"/>',
            arrow("M48 76 H88"),
            box(90, 50, 140, 52, "closed\nused", "greenbox"),
            arrow("M230 76 H348"),
            text(289, 56, "three failures", "small"),
            text(289, 70, "in a row", "small"),
            box(350, 50, 140, 52, "open\nsuspended", "amberbox"),
            arrow("M490 66 H598"),
            text(544, 56, "after 1 s", "small"),
            box(600, 50, 140, 52, "half-open\none trial", "tealbox"),
            arrow("M598 88 H492"),
            text(544, 104, "trial fails:", "small"),
            text(544, 119, "twice as long,", "small"),
            text(544, 134, "up to 60 s", "small"),
            arrow("M670 104 V160 H160 V104"),
            text(415, 152, "trial succeeds", "small"),
        ],
    )


DIAGRAMS = {"overview": overview, "shared": shared, "look-up": look_up, "waiting": waiting, "health": health}


def write(drawings: Mapping[str, Callable[[], str]], script: str) -> int:
    """Write drawings to ``docs/figures``, or with ``--check`` compare them with what is there; returns the exit status."""
    only_check, stale = "--check" in sys.argv[1:], []
    for name, draw in drawings.items():
        file, drawing = FIGURES / f"{name}.svg", draw()
        if not only_check:
            file.write_text(drawing, encoding="utf-8")
        elif not file.is_file() or file.read_text(encoding="utf-8") != drawing:
            stale.append(file.name)
    if stale:
        sys.stderr.write(f"docs/figures is not what {script} draws: {', '.join(stale)}; run `make figures`\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(write(DIAGRAMS, "tools/diagrams.py"))
