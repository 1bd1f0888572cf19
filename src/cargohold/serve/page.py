"""The page for people: one file, which needs nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files
from typing import Final

from fastapi import APIRouter
from starlette.responses import HTMLResponse

router = APIRouter()

_INLINE: Final = {
    "script": re.compile(r"<script>(.*?)</script>", re.DOTALL),
    "style": re.compile(r"<style>(.*?)</style>", re.DOTALL),
}


@router.get("/")
async def page() -> HTMLResponse:
    """The page. It has no figures in it: it asks for them, with the key that its reader gives it."""
    return HTMLResponse(_text(), headers={"content-security-policy": _policy(), "referrer-policy": "no-referrer"})


@cache
def _text() -> str:
    return (files("cargohold.serve") / "page.html").read_text(encoding="utf-8")


@cache
def _policy() -> str:
    """What browsers may do for the page: run its own script, and ask this server. No text that it shows can change that."""
    hashes = {kind: base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode() for kind, found in _parts()}
    own = "; ".join(f"{kind}-src 'sha256-{digest}'" for kind, digest in hashes.items())
    nothing = "; ".join(f"{kind} 'none'" for kind in ("default-src", "base-uri", "form-action", "frame-ancestors"))
    return f"{nothing}; {own}; connect-src 'self'; img-src data:"


def _parts() -> list[tuple[str, re.Match[str]]]:
    return [(kind, found) for kind, pattern in _INLINE.items() for found in pattern.finditer(_text())]
