"""Take the picture of the server's page that is in the manual: docs/images/serve.png.

Needs what `make test-browser` needs, and the small model. Run from the repository's root; takes about a minute.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright

from cargohold import AsyncLLM, DiskTierConfig, OffloadConfig
from cargohold.cli.conversations import load_conversations
from cargohold.serve.server import Server, serving
from cargohold.serve.settings import ServeConfig

if TYPE_CHECKING:
    from playwright.sync_api import Page

PICTURE = Path("docs/images/serve.png")
ANSWER_MS = 120_000


def main() -> int:
    """Serve the demo's conversations, each visited twice, and take the picture; returns the exit status."""
    browser_path = shutil.which("chromium")
    if browser_path is None:
        sys.stderr.write("there is no chromium: apt-get install chromium\n")
        return 1
    PICTURE.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory, serving(ServeConfig(port=0)) as server:
        disk = DiskTierConfig(directory=directory, max_bytes="1GiB", reserve_bytes=0)
        offload = OffloadConfig(host_bytes="100MiB", tiers=[disk])
        server.open(AsyncLLM("smollm2", num_device_blocks=180, max_model_len=2600, offload=offload))
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1100, "height": 800})
            visit_conversations(page, server)
            page.goto(server.url)
            page.wait_for_selector("#requests li")
            page.fill("#question", "Which animals live in harbours?")
            page.press("#question", "Enter")
            page.wait_for_selector("#said .soft", timeout=ANSWER_MS)
            page.locator("summary").nth(1).click()
            page.screenshot(path=PICTURE, full_page=True)
            browser.close()
    return 0


def visit_conversations(page: Page, server: Server) -> None:
    """Ask the first question of each conversation, twice."""
    for _ in range(2):
        for conversation in load_conversations(2):
            messages = [{"role": "user", "content": conversation.questions[0]}]
            body = {"model": "smollm2", "messages": messages, "max_tokens": 8, "temperature": 0}
            reply = page.request.post(f"{server.url}/v1/chat/completions", data=body, timeout=ANSWER_MS)
            assert reply.ok, reply.text()


if __name__ == "__main__":
    sys.exit(main())
