"""The web page in a headless Chromium. Needs the browser: `./ops/test --full` only, where its absence is a failure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.browser import Browser
from tests.api.door import Door
from tests.pool import Pool, wait_for

pytestmark = pytest.mark.full

IDLE = "document.body.dataset.state === 'idle'"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser


def begin(browser: Browser, door: Door, tokens: int, prompt: str = "hello from a browser") -> None:
    """Opens the page, asks, and returns once text comes."""
    browser.open(door.url)
    browser.wait("document.getElementById('model').value === 'toy'")
    browser.fill("prompt", prompt)
    browser.fill("max-tokens", str(tokens))
    browser.fill("temperature", "0")
    browser.click("start")
    browser.wait("document.getElementById('answer').textContent.length > 20")


def expected(door: Door, tokens: int, prompt: str = "hello from a browser") -> str:
    done = door.openai().responses.create(model="toy", input=prompt, max_output_tokens=tokens, temperature=0)
    return done.output_text


def test_a_reload_in_mid_stream_loses_and_doubles_nothing(browser: Browser, door: Door):
    text = expected(door, 400)
    begin(browser, door, 400)
    for _ in range(4):
        before = browser.text("answer")
        assert text.startswith(before)
        browser.reload()
        browser.wait(f"document.getElementById('answer').textContent.length > {len(before) + 10} || {IDLE}")
    browser.wait(IDLE)
    assert browser.text("answer") == text
    assert "incomplete" in browser.text("status")
    browser.reload()
    assert browser.text("answer") == text
    assert browser.run(IDLE)


def test_a_lost_connection_in_mid_stream_loses_and_doubles_nothing(browser: Browser, door: Door):
    text = expected(door, 600)
    begin(browser, door, 600)
    for _ in range(3):
        before = len(browser.text("answer"))
        door.cut()
        browser.wait(f"document.getElementById('answer').textContent.length > {before + 10} || {IDLE}")
    browser.wait(IDLE)
    assert browser.text("answer") == text


def test_a_takeover_in_mid_stream_is_not_seen(browser: Browser, door: Door):
    text = expected(door, 300)
    begin(browser, door, 300)
    name = browser.run("JSON.parse(localStorage.getItem('prism.answer')).id").removeprefix("resp_")
    door.pool.kill(door.pool.worker_of(name))
    browser.wait(IDLE)
    assert browser.text("answer") == text
    browser.wait("Number(document.getElementById('takeovers').textContent) > 0")
    door.pool.wait_ready()


def test_stop_stops(browser: Browser, door: Door):
    begin(browser, door, 3500)
    name = browser.run("JSON.parse(localStorage.getItem('prism.answer')).id").removeprefix("resp_")
    browser.click("stop")
    browser.wait(IDLE)
    assert "cancelled" in browser.text("status")
    story = door.pool.follow(name)
    assert story.state == "cancelled"
    assert len(story.ids) < 3500
    assert not browser.run("document.getElementById('start').disabled")


def test_the_pool_is_shown_live(browser: Browser, door: Door):
    begin(browser, door, 2500)
    browser.wait("document.querySelectorAll('#workers tr').length === 2")
    browser.wait("Number(document.getElementById('tokens-per-s').textContent) > 5")
    browser.wait("document.getElementById('running').textContent === '1'")
    browser.wait("Number(document.getElementById('streams').textContent) >= 1")
    browser.click("stop")
    browser.wait("document.getElementById('running').textContent === '0'")


def test_the_page_works_with_an_api_key(browser: Browser, toy_pool: Pool):
    with Door(toy_pool, api_keys=("key-of-ann",)) as door:
        browser.open(door.url)
        browser.wait("document.getElementById('pool-note').textContent.includes('API key')")
        browser.fill("key", "key-of-ann")
        browser.run("document.getElementById('key-form').requestSubmit()")
        browser.wait("document.getElementById('pool-note').textContent === ''")
        browser.wait("document.getElementById('model').value === 'toy'")
        browser.fill("max-tokens", "10")
        browser.click("start")
        browser.wait(f"{IDLE} && document.getElementById('answer').textContent.length > 0")
        assert browser.run("Object.keys(localStorage).join()") == "prism.answer"
        wait_for(lambda: door.gateway.metrics.open_streams == 0, "the streams to close")
