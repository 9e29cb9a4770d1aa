"""The page at /: what it sends, what it counts, and that it notices one different bit."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.server.running_server import Running, streams_held
from tests.support.waits import HANGS_AFTER

QUIET = ("disable-background-networking", "disable-component-update", "disable-sync", "no-first-run", "disable-quic")

# Flips one bit of one logprob in the third answer.
ONE_BIT = """
const real = window.fetch;
let asked = 0;
window.fetch = async (path, options) => {
  const response = await real(path, options);
  if (!options.body?.includes("include_batch") || ++asked !== 3) return response;
  const events = (await response.text()).split("\\n\\n");
  const chunk = JSON.parse(events[4].slice("data: ".length));
  const logprob = new Float64Array([chunk.choices[0].logprobs.token_logprobs[0]]);
  new BigUint64Array(logprob.buffer)[0] ^= 1n;
  chunk.choices[0].logprobs.token_logprobs[0] = logprob[0];
  events[4] = "data: " + JSON.stringify(chunk);
  return new Response(events.join("\\n\\n"));
};
"""

DIGESTS = """
const [texts, done] = arguments;
import("/page/sha256.js").then(({ sha256 }) => done(texts.map(sha256)));
"""


class Page:
    """The page in a browser."""

    def __init__(self, browser: WebDriver) -> None:
        self.browser = browser

    def __getitem__(self, name: str) -> WebElement:
        return self.browser.find_element(By.ID, name)

    def text(self, name: str) -> str:
        return self[name].text

    def fill(self, **fields: Any) -> None:
        for name, value in fields.items():
            field = self[name.replace("_", "-")]
            field.clear()
            field.send_keys(str(value))

    def until[T](self, holds: Callable[[], T]) -> T:
        return WebDriverWait(self.browser, HANGS_AFTER, 0.02).until(lambda _: holds())

    def errors(self) -> list[dict[str, Any]]:
        """Errors in the browser's log since the last call."""
        return [entry for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("the page is looked at with Chromium: chromium or chromedriver is not on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile = tmp_path_factory.mktemp("profile")
    for argument in ("headless", "no-sandbox", "disable-gpu", *QUIET, f"user-data-dir={profile}"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, Service(driver)) as one:
        one.set_script_timeout(HANGS_AFTER)
        yield one


@pytest.fixture
def page(browser: WebDriver, server: Running) -> Page:
    one = Page(browser)
    one.errors()
    browser.get(server.url)
    one.until(one["send"].is_enabled)
    return one


def test_the_page_names_the_model_and_loads_nothing_from_elsewhere(page: Page, server: Running) -> None:
    assert page.text("model") == server.model
    assert page.text("fingerprint").startswith("detjax-")
    assert not page["key-form"].is_displayed()
    loaded = page.browser.execute_script("return performance.getEntriesByType('resource').map(({ name }) => name)")
    assert loaded and all(url.startswith(server.url) for url in loaded)
    assert page.errors() == []


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_an_answer_is_streamed_and_has_a_digest(page: Page, kind: str) -> None:
    page.browser.find_element(By.CSS_SELECTOR, f"label[for=as-{kind}]").click()
    page.fill(prompt="Once upon a time", max_tokens=6)
    page["send"].click()
    page.until(lambda: "SHA-256" in page.text("output-facts"))
    assert page.text("output")
    assert page.text("output-facts").startswith("6 tokens, stopped at max tokens, ")
    assert page.text("send") == "Send"
    assert page.errors() == []


def test_the_proof_counts_one_unique_answer_among_others(page: Page) -> None:
    page.fill(prompt="Once upon a time", max_tokens=16, temperature=1, total=5)
    page["send"].click()
    alone = page.until(lambda: page["output-facts"].find_elements(By.CLASS_NAME, "code"))[0].text
    page["prove-button"].click()
    page.until(lambda: page.text("verdict").startswith("5 answers, all identical"))
    assert (page.text("answers-label"), page.text("answers"), page.text("unique")) == ("Answers of 5", "5", "1")
    sizes = [int(size) for size in page.text("batches").split("–")]
    assert 1 <= sizes[0] <= sizes[-1] <= 16
    assert sizes[-1] > 1
    assert not page.text("background").startswith("Background load: 0 ")
    assert page.text("unique-answers").startswith(f"5 answers with SHA-256 {alone}")
    assert page.errors() == []


def test_one_bit_of_one_logprob_is_another_answer(page: Page) -> None:
    page.browser.execute_script(ONE_BIT)
    page.fill(prompt="Once upon a time", max_tokens=6, total=4)
    page["prove-button"].click()
    page.until(lambda: page.text("verdict").startswith("4 answers, 2 of them different, all with the same text."))
    assert page.text("unique") == "2"
    assert "3 answers with" in page.text("unique-answers")
    assert "It differs from the first answer at token 5, " in page.text("unique-answers")


def test_what_the_server_refuses_is_told_in_its_words(page: Page) -> None:
    page.fill(max_tokens=100_000)
    page["send"].click()
    assert "asks for 100000 more; accepted: " in page.until(lambda: page.text("ask-error"))
    page["prove-button"].click()
    assert "asks for 100000 more; accepted: " in page.until(lambda: page.text("prove-error"))
    page.until(lambda: page.text("verdict") == "Stopped. No answers to compare.")


def test_stopping_an_answer_ends_it_here_and_on_the_server(page: Page, server: Running) -> None:
    page.fill(prompt="Once upon a time", max_tokens=300, temperature=1)
    with streams_held(server.engine):
        page["send"].click()
        page.until(lambda: page.text("output-facts").startswith("1 token, "))
        page["send"].click()
        page.until(lambda: page.text("output-facts") == "Stopped after 1 token.")
        page.until(lambda: server.engine.stats().pages_in_use == 0)


def test_stopping_the_proof_ends_it_and_its_others(page: Page, server: Running) -> None:
    page.fill(max_tokens=4, total=100_000)
    page["prove-button"].click()
    page.until(lambda: page.text("unique") == "1")
    page["prove-button"].click()
    page.until(lambda: page.text("verdict").startswith("Stopped. "))
    page.until(lambda: server.engine.stats().pages_in_use == 0)
    assert page.text("prove-error") == ""


def test_digests_are_those_of_sha_256(page: Page) -> None:
    texts = ["x" * length for length in range(130)] + [json.dumps([-1.219983458518982, "ü", "\N{PILE OF POO}"])]
    digests = page.browser.execute_async_script(DIGESTS, texts)
    assert digests == [hashlib.sha256(text.encode()).hexdigest() for text in texts]
