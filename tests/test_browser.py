"""The report in a real Chromium, as its readers meet it: by pointer and keyboard, on a phone, in the dark, on paper.

Needs Debian's chromium and chromium-driver (or others on the path); without them these tests say so and are skipped.
"""

import base64
import json
import re
import shutil
import threading
from urllib.parse import urlsplit

import pytest
import reported
import surface_results
from handmade_ledgers import Writer

from orchestrator.report.html import serving, write_report
from orchestrator.results import status
from orchestrator.results.ledger import Ledger

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.wait import WebDriverWait  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER),
    reason="chromium and chromedriver are not there: apt-get install chromium chromium-driver",
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
)
PATIENCE_S = 30


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    # what is copied is kept where the test can read it: a headless browser has no clipboard of its own
    driver.execute_cdp_cmd(
        "Page.addScriptToEvaluateOnNewDocument",
        {
            "source": "window.boom = () => { window.injected = true; };"
            "navigator.clipboard && (navigator.clipboard.writeText = async (text) => { window.copied = text; });"
        },
    )
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reported")
    reported.write(folder)
    other = tmp_path_factory.mktemp("other")
    reported.write(other, shift=2.0)
    write_report([str(folder)])
    third = tmp_path_factory.mktemp("third")
    reported.write(third, shift=-1.0, finished=False)
    write_report([str(folder), str(other)], folder / "both.html")
    write_report([str(folder), str(other), str(third)], folder / "three.html")
    write_report([str(third)])
    (folder / "running.html").write_bytes((third / "report.html").read_bytes())
    return folder


def opened(chromium, page, width=1280, *, dark=False, media=""):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    chromium.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wishes = {"prefers-color-scheme": "dark" if dark else "light", "prefers-reduced-motion": "reduce"}
    features = [{"name": name, "value": value} for name, value in wishes.items()]
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
    for log in ("browser", "performance"):
        chromium.get_log(log)  # what was before
    chromium.get(page if "://" in str(page) else page.as_uri())
    until(chromium, "return document.querySelectorAll('.chart svg').length > 3")
    return chromium


def until(chromium, script):
    return WebDriverWait(chromium, PATIENCE_S, poll_frequency=0.05).until(lambda b: b.execute_script(script))


def requests(chromium):
    events = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    return [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]


def find(chromium, selector):
    return chromium.find_element(By.CSS_SELECTOR, selector)


@pytest.fixture
def page(chromium, report):
    return opened(chromium, report / "report.html")


def test_it_opens_without_messages_or_requests(chromium, report):
    for name in ("report.html", "both.html"):
        page = opened(chromium, report / name)
        assert page.get_log("browser") == []
        assert {urlsplit(url).scheme for url in requests(page)} <= {"file", "data"}


def test_names_stay_text(page):
    assert page.execute_script("return window.injected") is None
    assert page.execute_script("return document.querySelectorAll('img, b').length") == 0
    assert page.execute_script("return document.scripts.length") == 2
    text = find(page, "body").text
    for name in (reported.HOSTILE, reported.DESCRIPTION, "<b onclick='boom()'>A&B</b>"):
        assert name in text


def test_the_partition_names_its_classes(page):
    section = find(page, "#partition")
    assert [one.text for one in section.find_elements(By.CSS_SELECTOR, ".legend span")] == [
        reported.HOSTILE,
        "ill",
        "healthy",
    ]
    assert "client 3" in section.text, "these clients have numbers only"


def test_injected_scripts_do_not_run(page):
    """The content security policy blocks them even if a name became markup."""
    page.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.injected = true'; document.body.append(s);"
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.injected = true\">');"
    )
    assert page.execute_script("return window.injected") is None
    page.get_log("browser")  # discard the report of the blocked script


def test_the_summary_comes_first(page):
    assert find(page, "main section h2").text == "Summary"
    assert "At ε = 8" in find(page, "#summary").text
    caveats = find(page, "#summary .caveats").text
    assert "Caveats" in caveats
    assert "`" not in caveats, "settings are shown as code"


def column(page, table, number):
    rows = page.find_elements(By.CSS_SELECTOR, f"{table} tbody tr:not(.heading)")
    return [row.find_elements(By.CSS_SELECTOR, "th, td")[number].text for row in rows]


def test_tables_are_sorted_both_ways(page):
    table = "figure[id^='table-configurations']"
    find(page, f"{table} thead th:nth-child(2) button").click()
    rising = [float(text) for text in column(page, table, 1)]
    assert rising == sorted(rising)
    assert find(page, f"{table} thead th:nth-child(2)").get_attribute("aria-sort") == "ascending"
    find(page, f"{table} thead th:nth-child(2) button").click()
    assert [float(text) for text in column(page, table, 1)] == rising[::-1]


def test_missing_scores_are_last_in_both_directions(page):
    table = "figure[id^='table-configurations']"
    for _ in range(2):
        find(page, f"{table} thead th:nth-child(5) button").click()
        assert column(page, table, 4)[-1] == "–"


def test_tables_are_filtered(page):
    table = "figure[id^='table-configurations']"
    find(page, f"{table} input").send_keys("diverged")
    assert column(page, table, 7) == ["diverged"]
    assert find(page, f"{table} .count").text == "1 of 6 rows"


def test_copies_are_latex_and_csv_of_the_visible_rows(page):
    table = "#table-final-0"
    buttons = {button.text: button for button in page.find_elements(By.CSS_SELECTOR, f"{table} .tools button")}
    buttons["Copy LaTeX"].click()
    latex = until(page, "return window.copied")
    assert latex.startswith("% needs \\usepackage{booktabs}\n\\begin{tabular}{lrr}\n\\toprule\n")
    assert "\\textless{}b onclick='boom()'\\textgreater{}A\\&B" in latex
    assert "63.20 $\\pm$ 0.10" in latex
    buttons["Copy CSV"].click()
    csv = until(page, "return window.copied.startsWith('Method') && window.copied")
    assert csv.splitlines()[0] == "Method,ε = 1,ε = 8"
    assert csv.splitlines()[1] == "DP-FedGD,51.20 ± 0.10,58.20 ± 0.10"


def test_hovering_shows_a_tooltip(page):
    mark = find(page, "#curves .chart svg circle:not(.cursor)")
    page.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
    ActionChains(page).move_to_element(mark).perform()
    tip = until(page, "const t = document.getElementById('tip'); return !t.hidden && t.textContent")
    assert "DP-FedGD" in tip
    assert "seeds: " in tip


def test_charts_have_a_keyboard_cursor(page):
    chart = find(page, "#curves .chart svg")
    page.execute_script("arguments[0].focus()", chart)
    chart.send_keys(Keys.ARROW_RIGHT)
    first = until(page, "const t = document.getElementById('tip'); return !t.hidden && t.textContent")
    assert "round 10" in first
    chart.send_keys(Keys.ARROW_RIGHT)
    assert "round 20" in find(page, "#tip").text
    assert "round 20" in find(page, "#announcement").get_attribute("textContent"), "screen readers announce it"
    chart.send_keys(Keys.ESCAPE)
    assert find(page, "#tip").get_attribute("hidden") is not None


def test_everything_is_reached_by_tab(page):
    """The first stop skips the navigation; every control and chart can be focused visibly."""
    reached = []
    for _ in range(400):
        ActionChains(page).send_keys(Keys.TAB).perform()
        found = page.execute_script(
            "const e = document.activeElement;"
            "return e === document.body ? null : [e.tagName, e.className.baseVal ?? e.className, "
            "getComputedStyle(e).outlineStyle]"
        )
        if found is None or (reached and found == reached[0] and len(reached) > 20):
            break
        reached.append(found)
    assert reached[0][:2] == ["A", "skip"]
    assert {"A", "SELECT", "INPUT", "BUTTON", "svg", "SUMMARY"} <= {name for name, _, _ in reached}
    assert all(outline != "none" for name, _, outline in reached if name in ("BUTTON", "SELECT", "svg"))


def test_single_seeds_are_drawn_on_demand(page):
    assert page.find_elements(By.CSS_SELECTOR, "#curves .trace") == []
    find(page, "#tick-curve-traces").click()
    until(page, "return document.querySelectorAll('#curves .trace').length === 2 * 2 * 3")
    assert "thin lines are single seeds" in find(page, "#curves").text


def test_the_band_is_described(page):
    assert "the band is one standard deviation over seeds" in find(page, "#curves").text
    find(page, "#choice-curve-band option[value=error]").click()
    assert "the band is one standard error of the mean" in find(page, "#curves").text
    find(page, "#choice-curve-band option[value=none]").click()
    until(page, "return document.querySelectorAll('#curves .chart svg').length === 2")
    assert page.find_elements(By.CSS_SELECTOR, "#curves .band") == []


def test_the_winner_is_highlighted_among_the_search_curves(page):
    """Regardless of the colour of its method."""
    colours = "return [...document.querySelectorAll(arguments[0])].map(line => getComputedStyle(line).stroke)"
    won, others = (set(page.execute_script(colours, f".trace{kind}")) for kind in (".won", ":not(.won)"))
    assert won
    assert others
    assert won.isdisjoint(others)


def test_the_legend_hides_a_method(page):
    until(page, "return document.querySelectorAll('#curves .chart .series').length === 4")
    button = find(page, "#curves .legend button")
    button.click()
    until(page, "return document.querySelectorAll('#curves .chart .series').length === 2")
    assert button.get_attribute("aria-pressed") == "false"


def test_the_heat_map_marks_the_winner_and_lost_trials(page):
    texts = [e.text for e in page.find_elements(By.CSS_SELECTOR, "#search .panels.two figure:first-child svg text")]
    assert [text for text in texts if text.startswith("★")] == ["★ 55"]
    assert "×" in texts
    assert page.find_elements(By.CSS_SELECTOR, "#search .edge"), "tau = 0.1 is the highest that was tried"


@pytest.mark.parametrize("price", ["epsilon", "actual", "with_search"])
def test_accuracy_against_every_kind_of_epsilon(page, price):
    find(page, f"#choice-budget-price option[value={price}]").click()
    until(page, "return document.querySelectorAll('#budgets .whisker').length === 4")


def test_two_studies_are_compared(chromium, report):
    page = opened(chromium, report / "both.html")
    text = find(page, "#comparison").text
    assert "4 cells are in both" in text
    trials = [status.read(str(folder))["trials_ended"] for folder in (report, report)]
    assert re.search(r"Cost: .* {} trials.*; .* {} trials".format(*trials), text)
    assert column(page, "#table-comparison", 4) == ["0.00 ± 0.00", "+2.00 ± 0.00", "0.00 ± 0.00", "+2.00 ± 0.00"]
    find(page, "#choice-study option:nth-child(2)").click()
    assert find(page, "#choice-study").get_attribute("value") == "1"


def test_three_studies_are_compared(chromium, report):
    page = opened(chromium, report / "three.html")
    assert "4 cells are in all 3 studies." in find(page, "#comparison").text
    assert column(page, "#table-comparison", 5) == ["0.00 ± 0.00", "+2.00 ± 0.00", "0.00 ± 0.00", "+2.00 ± 0.00"]
    assert column(page, "#table-comparison", 7) == ["0.00 ± 0.00", "-1.00 ± 0.00", "–", "–"]
    assert len(page.find_elements(By.CSS_SELECTOR, "#comparison .whisker")) == 10


def test_a_running_study_shows_its_search(chromium, report):
    """The best score so far by cell; one number for what is missing."""
    page = opened(chromium, report / "running.html")
    assert "Search so far" in find(page, "#curves").text
    labels = [e.get_attribute("aria-label") for e in page.find_elements(By.CSS_SELECTOR, "#curves svg[role=img]")]
    assert sum(label.startswith("Best validation accuracy") for label in labels) == 2, "one per budget"
    assert "24 trials, 6 missing" in find(page, "#top").text
    assert "The study is unfinished: 6 trials are missing." in find(page, "#summary").text


def test_one_hyperparameter_has_no_importance(page):
    assert "Hyperparameter importance" in find(page, "#search").text
    find(page, "#choice-search-method option:first-child").click()
    assert "Hyperparameter importance" not in find(page, "#search").text


def test_captions_are_short_and_details_fold(page):
    notes = page.execute_script("return [...document.querySelectorAll('.note > p')].map((e) => e.textContent)")
    assert notes
    assert max(map(len, notes)) < 200
    assert find(page, "#tables .note details").get_attribute("open") is None


# ---- every screen and paper


@pytest.mark.parametrize("width", [360, 400, 768, 1600])
def test_the_page_fits_narrow_screens(chromium, report, width):
    page = opened(chromium, report / "report.html", width)
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    links = "return [...document.querySelectorAll('nav a')].map((e) => e.getBoundingClientRect())"
    assert all(box["left"] >= 0 and box["right"] <= width for box in page.execute_script(links))
    line = "return Math.max(...[...document.querySelectorAll('main p')].map((e) => e.getBoundingClientRect().width))"
    assert page.execute_script(line) < 750, "about 80 characters"
    small = page.execute_script(
        "return [...document.querySelectorAll('svg text')].filter((e) => {"
        "const svg = e.ownerSVGElement, zoom = svg.getBoundingClientRect().width / (svg.viewBox.baseVal.width || 34);"
        "return e.textContent && zoom * parseFloat(getComputedStyle(e).fontSize) < 11; }).length"
    )
    assert small == 0, "text of charts is not scaled down with them"


CONTRASTS = """
const parse = (c) => { const n = c.match(/[\\d.]+/g).map(Number); return [n[0], n[1], n[2], n[3] ?? 1]; };
const even = (v) => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
const lum = ([r, g, b]) => [r, g, b].map((v) => even(v / 255))
  .reduce((s, v, k) => s + v * [.2126, .7152, .0722][k], 0);
const ratio = (a, b) => { const [x, y] = [lum(a), lum(b)].sort((p, q) => q - p); return (x + .05) / (y + .05); };
function ground(e) {
  for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor); if (c[3] > 0) return c; }
  return [255, 255, 255];
}
const poor = [];
for (const e of document.querySelectorAll("body *")) {
  if (!e.checkVisibility() || e.closest("#announcement, #tip, .skip, noscript, script, [aria-pressed=false]")) continue;
  if (![...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim())) continue;
  const style = getComputedStyle(e), drawn = e instanceof SVGElement;
  const value = drawn && e.classList.contains("value");
  const behind = value ? parse(getComputedStyle(e.previousElementSibling).fill) : ground(e);
  const found = ratio(parse(drawn ? style.fill : style.color), behind);
  if (found < 4.5) poor.push([e.textContent.slice(0, 40), e.className.baseVal ?? e.className, found]);
}
return poor;
"""


@pytest.mark.parametrize("dark", [False, True])
def test_text_has_enough_contrast(chromium, report, dark):
    """WCAG requires 4.5:1 for text."""
    page = opened(chromium, report / "report.html", dark=dark)
    ground = page.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
    assert page.execute_script(CONTRASTS) == []


def test_the_theme_can_be_switched(page):
    button = find(page, "button.theme")
    for theme, ground in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 29)"), ("automatic", None)):
        button.click()
        assert button.text == f"Theme: {theme}"
        if ground:
            assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == ground


def test_controls_are_not_printed(chromium, report):
    page = opened(chromium, report / "report.html", dark=True, media="print")
    for furniture in ("nav", ".controls", ".tools", "button.theme"):
        assert not find(page, furniture).is_displayed(), furniture
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    wide = "return [...document.querySelectorAll('table')].some(t => t.getBoundingClientRect().right > innerWidth)"
    paper = opened(chromium, report / "report.html", 794, media="print")  # A4
    assert not paper.execute_script(wide), "a table is cut off"
    printed = page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})
    assert base64.b64decode(printed["data"]).startswith(b"%PDF")


# ---- live


@pytest.fixture
def served(tmp_path):
    reported.write(tmp_path, finished=False)
    server = serving.server(str(tmp_path), 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.address, tmp_path
    server.shutdown()
    thread.join()
    server.server_close()


CHOOSE_BAND = """
const choice = document.querySelector("#choice-curve-band");
choice.value = "error";
choice.dispatchEvent(new Event("change", {bubbles: true}));
choice.blur();
"""


TEXT = "return document.querySelector(arguments[0]).innerText"


def test_the_page_follows_a_sweep(chromium, served):
    url, folder = served
    page = opened(chromium, url)
    # each in one call: the page may be drawn again between two
    top, summary, curves = (page.execute_script(TEXT, selector) for selector in ("#top", "#summary", "#curves"))
    assert "not finished" in top
    assert "updates automatically" in top
    assert "Best so far on the validation rows" in summary
    assert "Search so far" in curves
    page.execute_script(CHOOSE_BAND)
    with Ledger.write(folder) as ledger:
        until(page, "return document.querySelector('#top .badge').textContent === 'running'")
        reported.confirm(Writer(ledger, reported.hostile_study(), setting=reported.SETTING), 8)
    until(page, "return document.querySelector('#top .badge').textContent === 'finished'")
    until(page, "return document.querySelector('#summary').textContent.includes('At ε = 8 <b')")
    until(page, "return document.querySelector('#choice-curve-band').value === 'error'")  # what was chosen stays
    assert page.get_log("browser") == []
    assert {urlsplit(address).netloc for address in requests(page) if not address.startswith("data:")} == {
        urlsplit(url).netloc
    }


def test_a_surface_shows_the_expected_score_at_any_budget(chromium, tmp_path):
    surface_results.write(tmp_path)
    write_report([str(tmp_path)])
    page = opened(chromium, tmp_path / "report.html")
    section = find(page, "#frontier")
    assert len(section.find_elements(By.CSS_SELECTOR, "path.band")) == 1
    find(page, "#frontier .chart svg").send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    assert "not searched" in find(page, "#tip").text
    assert "DP-FedGD: predicted and measured" in section.text
    assert page.get_log("browser") == []
