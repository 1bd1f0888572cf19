"""The page: it needs nothing from elsewhere, and whoever cannot see it, or has a phone, can use it, too."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from cargohold import DiskTierConfig, OffloadConfig
from cargohold.serve.server import Server
from cargohold.serve.settings import ServeConfig
from tests.serve.running import call, running, wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
NO_DRIVER = importlib.util.find_spec("playwright") is None
PAPER = {"dark": "rgb(20, 24, 29)", "light": "rgb(255, 255, 255)"}
UNNAMED = """() => [...document.querySelectorAll("button, input, textarea, [role=meter], [role=img], svg, ul")]
  .filter(one => one.checkVisibility() && !(one.getAttribute("aria-label") || one.getAttribute("aria-labelledby")
    || one.labels?.length || one.textContent.trim() || one.className === "notes")).map(one => one.outerHTML)"""
FAINT = """() => {
  const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(part => { part /= 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const paper = one => { for (; one; one = one.parentElement) { const colour = getComputedStyle(one).backgroundColor;
    if (!colour.endsWith(", 0)")) return colour; } return "rgb(255, 255, 255)"; };
  return [...document.querySelectorAll("p, h1, h2, h3, li, span, button, summary")].filter(one => one.checkVisibility() &&
    !one.disabled && [...one.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())).map(one => {
    const [low, high] = [light(getComputedStyle(one).color), light(paper(one))].sort((a, b) => a - b);
    return [one.textContent, (high + 0.05) / (low + 0.05)]; }).filter(([, contrast]) => contrast < 4.5);
}"""


def test_the_page_is_whole_and_may_do_nothing_but_ask_this_server(server: Server) -> None:
    reply = call(server, "/")
    text = reply.body.decode()
    assert (reply.status, reply.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert re.findall(r"""(?:src|href|action)=["'](?!#|data:,)""", text) == [] and "url(" not in text
    assert re.findall(r"""fetch\(["'`]/""", text) == [], "behind a proxy, the page may stand at another path"
    assert re.findall(r"\bstyle=|\bon\w+=|innerHTML", text) == [], "the policy lets none of these work"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "unsafe" not in policy


@pytest.fixture(scope="module")
def tiered(chat_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    disk = DiskTierConfig(directory=tmp_path_factory.mktemp("disk"), max_bytes="64MiB", reserve_bytes=0)
    offload = OffloadConfig(host_bytes="1MiB", tiers=[disk])
    with running(chat_model, offload=offload, num_device_blocks=60) as server:
        for prompt in ("First. ", "Second. ") * 2:
            body = {"model": "chat", "prompt": prompt + "The ship sails on. " * 40, "max_tokens": 2, "temperature": 0}
            assert call(server, "/v1/completions", body).status == 200
        wait_until(lambda: call(server, "/cache").json["tiers"][2]["held_bytes"])
        yield server


@contextmanager
def browsing(server: Server, **options: Any) -> Iterator[Page]:
    """The page in a browser, in which nothing went wrong."""
    if BROWSER is None or NO_DRIVER:
        pytest.skip("no Chromium, or no playwright to drive it with: make test-browser")
    from playwright.sync_api import sync_playwright  # noqa: PLC0415  # need not be there

    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(**options)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda line: wrong.append(line.text) if "Content Security" in line.text else None)
        page.goto(server.url)
        yield page
        browser.close()
    assert wrong == []


@pytest.mark.browser
@pytest.mark.parametrize(("scheme", "width"), [("light", 1200), ("dark", 1200), ("light", 390), ("dark", 320)])
def test_it_can_be_read_wide_and_narrow_in_light_and_dark(tiered: Server, scheme: Any, width: int) -> None:
    with browsing(tiered, color_scheme=scheme, viewport={"width": width, "height": 800}) as page:
        page.wait_for_selector("#requests li")
        page.locator("summary").first.click()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == PAPER[scheme]
        assert page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
        assert page.evaluate(FAINT) == []
        assert page.evaluate(UNNAMED) == []


@pytest.mark.browser
def test_it_shows_what_is_kept_and_where_prompts_came_from(tiered: Server) -> None:
    shown = call(tiered, "/cache").json
    with browsing(tiered) as page:
        page.wait_for_selector("#requests li")
        meters = page.get_by_role("meter")
        assert [meters.nth(at).get_attribute("aria-label") for at in range(3)] == ["device", "host", "disk"]
        for at, tier in enumerate(shown["tiers"]):
            part = round(100 * tier["held_bytes"] / tier["capacity_bytes"])
            assert abs(int(meters.nth(at).get_attribute("aria-valuenow") or "") - part) <= 1
        assert "prompt tokens were restored from tiers below the device" in page.inner_text("#answer")
        assert page.locator("#requests > li").count() == len(shown["requests"])
        first = page.locator("#requests > li").first
        first.locator("summary").focus()
        page.keyboard.press("Enter")
        assert shown["requests"][0]["notes"][0] in first.inner_text()
        assert page.locator("#hits rect").count() > 0 and page.locator("#pace circle").count() > 0


@pytest.mark.browser
def test_it_tells_what_is_pinned_and_which_prefixes_are_kept(tiered: Server) -> None:
    pin = {"prompt": "First. " + "The ship sails on. " * 40, "lease": "<b>mine</b>", "ttl_s": 600}
    assert call(tiered, "/cache/pins", pin).status == 200
    with browsing(tiered) as page:
        page.wait_for_selector("#contents li")
        told = page.inner_text("#contents")
        assert "Pinned: <b>mine</b>: " in told and "10 min left" in told
        assert "Longest prefixes: " in told and "used 2 times" in told
        verified = "41,200 chunks, 41,200 equal or close"
        page.evaluate("text => showContents({ verified: text })", verified)
        assert page.inner_text("#contents") == f"Verified since the start: {verified}"
        assert page.evaluate(FAINT) == [] and page.evaluate(UNNAMED) == []


@pytest.mark.browser
def test_one_can_talk_to_the_model_with_the_keyboard_alone(server: Server) -> None:
    with browsing(server) as page:
        page.wait_for_selector("#vessels li")
        page.focus("#question")
        page.keyboard.type("Hello")
        page.keyboard.press("Enter")
        page.wait_for_selector("#said .soft")
        said = page.inner_text("#said")
        assert "Model: " in said and re.search(r"\d+ prompt tokens: .*\d+ computed", said), said
        assert page.evaluate("document.activeElement.id") == "question"
        page.wait_for_selector("#requests li")


@pytest.mark.browser
def test_it_asks_for_a_key_where_one_is_needed(chat_model: str) -> None:
    with running(chat_model, ServeConfig(port=0, api_keys=("one",))) as server, browsing(server) as page:
        page.wait_for_selector("#key")
        assert page.inner_text("#answer") == "Locked: give a key to see what the cache does."
        assert not page.locator("#requests-section, #vessels, #kept-title, #past").filter(visible=True).count()
        assert page.inner_text("#state") == "locked" and "bad" not in (page.get_attribute("#state", "class") or "")
        page.fill("#key", "one")
        page.press("#key", "Enter")
        page.wait_for_selector("#vessels li")
        assert page.locator("#unlock").is_hidden()
        page.fill("#question", "Hello")
        page.press("#question", "Enter")
        page.wait_for_selector("#said .soft")


@pytest.mark.browser
def test_texts_of_the_server_are_texts_and_no_html(server: Server) -> None:
    with browsing(server) as page:
        page.wait_for_selector("#vessels li")
        page.fill("#question", "<img src=x onerror=alert(1)>")
        page.press("#question", "Enter")
        page.wait_for_selector("#said .soft")
        assert page.locator("#said img").count() == 0 and "<img" in page.inner_text("#said")


def fed(page: Page, shown: dict[str, Any]) -> None:
    """Let the page show something else than the server says."""
    page.wait_for_selector("#vessels li")
    page.route("**/cache*", lambda route: route.fulfill(json=shown))
    page.evaluate("look()")


@pytest.mark.browser
def test_what_the_device_still_had_stands_apart_from_what_was_restored(tiered: Server) -> None:
    shown = call(tiered, "/cache").json
    bucket = {**shown["history"][-1], "tokens": {"device": 600, "host": 100, "computed": 300}}
    bucket |= {"restored_tokens": 2000, "restore_s": 0.2, "prefill_tokens": 3000, "prefill_s": 6.0}
    with browsing(tiered) as page:
        fed(page, {**shown, "history": [bucket]})
        page.wait_for_function("document.getElementById('share').textContent === '10 %'")
        told = "10 % of 1,000 prompt tokens were restored from tiers below the device; 60 % were still on it."
        assert (
            page.inner_text("#answer")
            == f"{told} Restoring 2,000 tokens took 0.2\u00a0s, computing them takes 4\u00a0s."
        )
        few = {"tokens": {"device": 700, "computed": 300}, "restored_tokens": 64, "restore_s": 9.0}
        fed(page, {**shown, "history": [{**bucket, **few}]})
        page.wait_for_function("document.getElementById('share').textContent === '0 %'")
        assert "Restoring" not in page.inner_text("#answer"), "four loads of one block say nothing of how fast that is"


@pytest.mark.browser
def test_a_tier_without_a_limit_is_not_half_full(tiered: Server) -> None:
    shown = call(tiered, "/cache").json
    tiers = [{**tier, "capacity_bytes": None if tier["name"] == "disk" else 2**20} for tier in shown["tiers"]]
    with browsing(tiered) as page:
        fed(page, {**shown, "tiers": tiers})
        page.wait_for_selector("text=no limit here")
        assert page.get_by_role("meter").count() == 2
        assert page.evaluate("document.querySelector('#vessels li:nth-child(3) .fill').style.height") == "0%"
        assert page.evaluate(FAINT) == [] and page.evaluate(UNNAMED) == []


@pytest.mark.browser
@pytest.mark.parametrize(
    ("state", "kind"), [("starting", ""), ("draining", ""), ("stopped", "bad"), ("not reachable: x", "bad")]
)
def test_only_what_is_wrong_is_red(tiered: Server, state: str, kind: str) -> None:
    shown = call(tiered, "/cache").json
    with browsing(tiered) as page:
        fed(page, {**shown, "state": state})
        page.wait_for_function(f"document.getElementById('state').textContent === '{state}'")
        assert (page.get_attribute("#state", "class") or "").split() == ["pill", *kind.split()]


@pytest.mark.browser
def test_of_a_request_in_the_queue_nothing_is_known_yet(tiered: Server) -> None:
    shown = call(tiered, "/cache").json
    queued = {**shown["requests"][0], "id": "queued", "state": "running", "sources": {}, "prompt_tokens": None}
    with browsing(tiered) as page:
        fed(page, {**shown, "requests": [{**queued, "output_tokens": None, "ttft_s": None, "notes": []}]})
        page.wait_for_function("document.querySelectorAll('#requests > li').length === 1")
        assert "no token yet" in page.inner_text("#requests") and "→" not in page.inner_text("#requests")


@pytest.mark.browser
def test_a_message_that_was_refused_is_kept(server: Server) -> None:
    with browsing(server) as page:
        page.wait_for_selector("#vessels li")
        error = {"error": {"message": "the queue is full"}}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json=error))
        page.fill("#question", "A long message")
        page.press("#question", "Enter")
        page.wait_for_selector("text=the queue is full")
        assert page.input_value("#question") == "A long message"
        page.unroute("**/v1/chat/completions")
        page.press("#question", "Enter")
        page.wait_for_selector("#said .soft")
        assert page.input_value("#question") == ""
