"""The built site in the system's Chromium, read from the file system: every page at two widths,
light and dark, and the search. `make test-site` builds it into `site/` first."""

from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

SITE = Path(__file__).parents[2] / "site"
# Where the theme has wrapped all tables, its script has run.
READY = """
return [...document.querySelectorAll(".md-typeset table:not([class])")]
    .every(table => table.closest(".md-typeset__scrollwrap"));
"""
# What reaches out of its column: on a desk any table, elsewhere what has no scroll bar to reach it.
TOO_WIDE = """
const found = [], root = document.documentElement;
const scrolls = element => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
if (root.scrollWidth > root.clientWidth) found.push("the page");
const edge = document.querySelector(".md-content").getBoundingClientRect().right + 1;
for (const element of document.querySelectorAll(".md-content__inner *")) {
    const box = element.getBoundingClientRect();
    if (!box.width || box.right <= edge) continue;
    let frame = element.parentElement;
    // The theme lets tables scroll, which they can't: the frame around them does.
    while (frame && (frame.tagName === "TABLE" || !scrolls(frame))) frame = frame.parentElement;
    const bar = frame && frame.offsetHeight - frame.clientHeight > 2;
    if (!bar || (arguments[0] && element.tagName === "TABLE"))
        found.push(element.tagName + ": " + element.textContent.trim().slice(0, 60));
}
return found.slice(0, 5);
"""

pytestmark = [pytest.mark.site, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    if not (SITE / "index.html").exists():
        pytest.fail("the site is not built: run `make docs`, or `make test-site`, which does")


def open_page(browser: webdriver.Chrome, page: Path) -> None:
    browser.get(page.as_uri())
    WebDriverWait(browser, 10).until(lambda _: browser.execute_script(READY))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_pages(browser: webdriver.Chrome, width: int, scheme: str) -> None:
    """Nothing is cut off, no page reports an error, and each has the colours asked for."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    open_page(browser, SITE / "index.html")
    browser.execute_script("localStorage.clear()")  # the colours of the last test
    browser.get_log("browser")
    # The server's page for unknown addresses has addresses that begin at the server's root.
    pages = sorted(set(SITE.rglob("*.html")) - {SITE / "404.html"})
    assert len(pages) > 50
    problems = []
    for page in pages:
        open_page(browser, page)
        name = page.relative_to(SITE)
        wide = browser.execute_script(TOO_WIDE, width > 1000)
        problems += [f"{name}: too wide: {what}" for what in wide]
        problems += [f"{name}: {entry['message']}" for entry in browser.get_log("browser")]
        colours = browser.execute_script("return document.body.dataset.mdColorScheme")
        if colours != {"light": "default", "dark": "slate"}[scheme]:
            problems.append(f"{name}: is {colours} where {scheme} is asked for")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("hyperparameters", "how-to/settings.html"),
        ("gamma", "how-to/settings.html"),
        ("learning rate", "how-to/settings.html"),
        ("one-hot", "how-to/inputs.html"),
        ("PettingZoo", "how-to/multi-agent.html"),
        ("relative path", "how-to/checkpoints.html"),
    ],
)
def test_search(browser: webdriver.Chrome, words: str, page: str) -> None:
    """The first page found is the one about it."""
    size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    open_page(browser, SITE / "index.html")
    browser.find_element(By.CSS_SELECTOR, ".md-search__input").send_keys(words)
    results = WebDriverWait(browser, 20).until(
        lambda _: browser.find_elements(By.CSS_SELECTOR, "a.md-search-result__link")
    )
    found = (results[0].get_attribute("href") or "").split("?")[0].split("#")[0]
    assert found == (SITE / page).as_uri()
