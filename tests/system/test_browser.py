"""The interactive page in a real browser, from a file and from a running session."""

import os
import shutil
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.errors import ResultError
from pcnet.graphs import adaptive_filter, odem
from pcnet.results.live_page import watch
from support import hostile
from support.recorded import EVIL, hostile_graph, paper_run, repeated, stack_run
from support.waiting import PATIENCE, wait_until

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("chromium-browser"), shutil.which("chromedriver")
MISSING = CHROMIUM is None or DRIVER is None
INSTALL = "Chromium is not installed (apt-get install chromium chromium-driver)"
pytestmark = pytest.mark.skipif(MISSING and "PCNET_REQUIRE_BROWSER" not in os.environ, reason=INSTALL)


def start_browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for switch in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1440,900"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(PATIENCE)
    driver.set_page_load_timeout(PATIENCE)
    return driver


@pytest.fixture(scope="module")
def browser():
    assert not MISSING, INSTALL
    driver = start_browser()
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, tmp_path):
    """Opens a flow's page from disk, on a screen of some size; nothing may be said on the console in the end."""

    def show(flow, width=1440, height=900, dark=False):
        path = flow.save(tmp_path / "flow.html")
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": theme})
        browser.get(path.as_uri())
        return Page(browser)

    browser.get("about:blank")  # the page of the test before says nothing from here on
    browser.get_log("browser")
    yield show
    said = browser.get_log("browser")
    assert said == [], said


class Page:
    def __init__(self, browser):
        self.browser = browser

    def find(self, css):
        return self.browser.find_element("css selector", css)

    def all(self, css):
        return self.browser.find_elements("css selector", css)

    def run(self, script, *given):
        return self.browser.execute_script(script, *given)

    def settled(self):
        """What is drawn at the next frame of the screen has been drawn."""
        self.browser.execute_async_script("const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 0))")

    def key(self, *keys):
        webdriver.ActionChains(self.browser).send_keys(*keys).perform()
        self.settled()

    def to(self, frame):
        """Move the slider as a hand does."""
        script = "const s = arguments[0]; s.value = arguments[1]; s.dispatchEvent(new Event('input', {bubbles: true}))"
        self.run(script, self.find("#slider"), frame)
        self.settled()

    @property
    def frame(self):
        return int(self.find("#now").get_attribute("data-frame"))

    def place(self, i):
        """Where the i-th node, or the middle of an arrow, is on the screen."""
        return self.run(
            "const it = document.getElementById('graph')._cyreg.cy.$id(arguments[0]);"
            "const at = it.isNode() ? it.renderedPosition() : it.renderedMidpoint();"
            "const box = document.getElementById('graph').getBoundingClientRect();"
            "return [Math.round(at.x + box.left), Math.round(at.y + box.top)]",
            i if isinstance(i, str) else f"n{i}",
        )

    def point(self, i, click=True):
        mouse = webdriver.ActionChains(self.browser, duration=0)
        mouse.w3c_actions.pointer_action.move_to_location(*self.place(i))
        if click:
            mouse.click()
        mouse.perform()
        self.settled()

    def values(self, title):
        """The numbers beside a chart, at the time that is shown."""
        charts = [chart for chart in self.all(".chart") if chart.find_element("css selector", "h3").text == title]
        assert len(charts) == 1, (title, [c.text for c in self.all(".chart h3")])
        found = charts[0].find_elements("css selector", ".value")
        return [float(value.get_attribute("data-value")) for value in found]

    def style(self, element, name):
        return self.run(f"return document.getElementById('graph')._cyreg.cy.$id('{element}').style('{name}')")

    @property
    def visible(self):
        return self.run(
            "return document.getElementById('graph')._cyreg.cy.nodes(':visible')"
            ".map((n) => flow.nodes[n.id().slice(1)].name)"
        )


def number(result, name):
    return [node.name for node in result.structure.nodes].index(name)


# --- time ------------------------------------------------------------------------------------------------------------
def test_the_slider_moves_what_is_shown(page):
    result = paper_run()
    flow, shown = result.error_flow(), page(result.error_flow())
    assert shown.frame == flow.surprise("y").argmax()  # it opens at the greatest surprise
    down = [link.parent + link.child for link in result.structure.links].index("xy")
    widths = {}
    for frame in (10, 75, 149):
        shown.to(frame)
        assert shown.frame == frame
        assert f"t = {result.times[frame]:.2f}" in shown.find("#now").text
        widths[frame] = float(shown.style(f"u{down}", "width").removesuffix("px"))
        assert float(shown.find("#ranking .value").text) == pytest.approx(
            max(flow.surprise(name)[frame] for name in flow.surprised), rel=1e-3
        )
    passed = flow.passed("y", "x")
    assert sorted(widths, key=widths.get) == sorted(widths, key=lambda frame: passed[frame])
    assert widths[75] == 8  # the outlier


def test_keys_move_play_and_choose(page):
    keys = webdriver.Keys
    shown = page(paper_run().error_flow())
    shown.key(keys.HOME)
    shown.key(keys.ARROW_RIGHT, keys.ARROW_RIGHT, keys.ARROW_RIGHT, keys.ARROW_LEFT)
    assert shown.frame == 2
    shown.key(keys.END)
    assert shown.frame == 149
    shown.key(keys.HOME)
    assert shown.frame == 0
    shown.key("s")
    assert shown.frame == paper_run().error_flow().surprise("y").argmax()
    shown.key("n")
    assert shown.find("#panel h2").text == "x"
    shown.key("p", keys.ESCAPE)
    assert shown.find("#panel h2").text == "Surprise by node"
    shown.key("?")
    assert shown.find("#help").is_displayed()
    shown.key(keys.ESCAPE)
    assert not shown.find("#help").is_displayed()


def test_playback_reaches_the_end_and_follows_the_speed(page):
    shown = page(paper_run().error_flow())
    shown.to(0)
    shown.key("+", "+")
    assert shown.find("#speed").get_attribute("value") == "3"
    shown.find("#play").click()
    wait_until(lambda: shown.frame > 0)
    wait_until(lambda: shown.frame == 149)
    wait_until(lambda: shown.find("#play").get_attribute("aria-label") == "Play")


def test_dragging_over_the_map_zooms_and_can_be_undone(page):
    shown = page(paper_run().error_flow())
    shown.to(0)
    area = shown.find("#map")
    width = area.size["width"]
    mouse = webdriver.ActionChains(shown.browser, duration=0)
    mouse.move_to_element_with_offset(area, -width // 4, 0).click_and_hold()
    mouse.move_to_element_with_offset(area, width // 4, 0).release().perform()
    shown.settled()
    ends = [int(shown.find("#slider").get_attribute(end)) for end in ("min", "max")]
    assert ends == pytest.approx([149 / 4, 149 * 3 / 4], abs=2)
    assert shown.frame == ends[0]
    shown.find("#whole").click()
    assert int(shown.find("#slider").get_attribute("max")) == 149
    assert not shown.find("#whole").is_displayed()


# --- nodes -----------------------------------------------------------------------------------------------------------
def test_a_click_on_a_node_opens_its_traces_with_the_numbers_of_the_result(page):
    result = paper_run()
    flow, shown = result.error_flow(), page(result.error_flow())
    shown.point(number(result, "x"))
    assert shown.find("#panel h2").text == "x"
    for frame in (3, 75, 149):
        shown.to(frame)
        assert shown.values("surprise (1: as expected)") == pytest.approx([flow.surprise("x")[frame]], rel=1e-6)
        believed = np.stack([result.mean("x")[frame, 1], result.sd("x")[frame, 1]], 1).reshape(-1)
        assert shown.values("belief, derivative 1") == pytest.approx(believed, rel=1e-6)
        passed = [flow.changes("x", "y")[frame], flow.passed("y", "x")[frame]]
        assert shown.values("to y: predicts, rms") == pytest.approx(passed, rel=1e-6)
        assert shown.values("share of the free energy (nats)") == pytest.approx([flow.share("x")[frame]], rel=1e-6)
    shown.point(number(result, "y"))
    pairs = np.stack([result.prediction("y")[149, 0], result.observation("y")[149, 0]], 1).reshape(-1)
    assert shown.values("observed and predicted") == pytest.approx(pairs, rel=1e-6)
    drawn = shown.run("return [...document.querySelectorAll('.chart canvas')].map((c) => c.toDataURL().length)")
    assert min(drawn) > 500  # none is blank


def test_hovering_shows_the_numbers(page):
    result = paper_run()
    shown = page(result.error_flow())
    shown.to(75)
    shown.point(number(result, "y"), click=False)
    wait_until(lambda: shown.find("#tip").is_displayed())
    name, kind, surprise, *_ = shown.find("#tip").text.splitlines()
    assert (name, kind) == ("y", "sensory, every observation")
    assert float(surprise.split()[-1]) == pytest.approx(result.error_flow().surprise("y")[75], rel=1e-3)
    order = [link.parent + link.child for link in result.structure.links].index("xy")
    shown.point(f"u{order}", click=False)
    wait_until(lambda: shown.find("#tip").text.startswith("y → x\nerror"))
    size = float(shown.find("#tip").text.split("error ")[1].split()[0])
    assert size == pytest.approx(result.error_flow().passed("y", "x")[75], rel=1e-3)


def test_filters_by_kind_and_level(page):
    result = stack_run()
    shown = page(result.error_flow())
    names = [node.name for node in result.structure.nodes]
    assert shown.visible == names
    shown.find("#kinds [data-kind=precision]").click()
    assert shown.visible == [name for name in names if not name.startswith("precision")]
    shown.find("#level option[value='1']").click()
    assert sorted(shown.visible) == ["a", "b", "v1", "x1"]
    shown.find("#kinds [data-kind=precision]").click()
    shown.find("#level option[value='']").click()
    assert shown.visible == names


def test_levels_go_up_from_the_sensory_nodes_and_nothing_overlaps(page):
    result = stack_run(6, 12)
    shown = page(result.error_flow())
    assert len(result.structure.nodes) > 50
    boxes = shown.run(
        "return document.getElementById('graph')._cyreg.cy.nodes().map((n) => { const b = n.renderedBoundingBox("
        "{includeLabels: false, includeOverlays: false}); return [b.x1, b.y1, b.x2, b.y2] })"
    )
    size = shown.find("#graph").size
    for i, (left, top, right, bottom) in enumerate(boxes):
        assert 0 <= left < right <= size["width"]
        assert 0 <= top < bottom <= size["height"]
        for other in boxes[:i]:
            assert right <= other[0] + 1 or other[2] <= left + 1 or bottom <= other[1] + 1 or other[3] <= top + 1
    tops = {node.name: boxes[i][1] for i, node in enumerate(result.structure.nodes)}
    assert tops["y"] > tops["x1"] > tops["x2"] > tops["x12"]
    scale = shown.run("return document.getElementById('graph')._cyreg.cy.zoom()")
    assert float(shown.style("n0", "font-size").removesuffix("px")) * scale >= 9


def test_names_are_shown_as_text(page):
    result = hostile_graph().run(np.ones((3, 1)), record=pc.Record.flow())
    shown = page(result.error_flow())
    for name in EVIL:
        shown.run("choose(arguments[0])", number(result, name))
        assert shown.find("#panel h2").text == name
    assert shown.all("#panel img, #panel b, #panel script, #tip b") == []
    shown.point(number(result, EVIL[0]), click=False)
    wait_until(lambda: shown.find("#tip").text.startswith(EVIL[0]))


def test_hostile_names_and_titles_stay_text(browser, tmp_path):
    assert hostile.pages(browser, 4, tmp_path) == []
    browser.get_log("browser")


# --- words, maps, comparisons, files ---------------------------------------------------------------------------------
def test_the_caption_says_what_happened(page):
    result = paper_run()
    shown = page(result.error_flow())
    shown.to(75)
    deviation = result.error_flow().deviation("y")[75]
    i = int(np.abs(deviation).argmax())
    way = "higher" if deviation[i] > 0 else "lower"
    said = shown.find("#caption").text
    assert said.startswith(f"t = 0.75: y[{i}] was {abs(deviation[i]):.1f} sd {way} than predicted; x took most of it")
    assert said in shown.find("#graph").get_attribute("aria-label")
    assert shown.find("#strip .chart .value").is_displayed()  # observed against predicted, above the map


def test_the_map_shows_nodes_or_messages(page):
    result = paper_run()
    shown = page(result.error_flow())
    rows = [row.text for row in shown.all("#rows span")]
    assert rows[:2] == ["x", "y"]
    assert set(rows[2:]) == {"theta", "lambda_x", "lambda_y"}
    shown.key("m")
    assert {row.text for row in shown.all("#rows span")} >= {"y → x", "x → theta", "y → lambda_y"}
    shown.key("m")
    assert "x → y" in [row.text for row in shown.all("#rows span")]
    assert [mark.text for mark in shown.all("#axis span")][:2] == ["0.0", "0.2"]


def test_a_node_without_a_share_of_free_energy_says_why(page):
    spring = pc.systems.linear([[0.0, 1.0], [-1.0, 0.0]])
    options = {"process_noise_sd": 0.1, "observation_noise_sd": 0.1, "hypotheses": None}
    result = adaptive_filter(spring, 2, 0.1, **options).run(np.ones((30, 2)), record=pc.Record.flow())
    shown = page(result.error_flow())
    shown.run("choose(arguments[0])", number(result, "x"))
    assert "predictive likelihoods of the nodes below contain it" in shown.find("#panel .why").text
    assert "attention (precision over its median)" in [each.text for each in shown.all(".chart h3")]


def test_two_runs_are_compared(page, tmp_path, browser):
    first = paper_run()
    observations = pc.simulate.glv_process(150, noise="white", seed=1).observations  # without the outlier
    graph, schedule = odem(every=20)
    second = graph.run(observations, schedule, record=pc.Record.flow())
    browser.get(first.error_flow().save(tmp_path / "both.html", beside=second.error_flow()).as_uri())
    shown = Page(browser)
    shown.to(75)
    shown.run("choose(arguments[0])", number(first, "y"))
    sizes = [each.error_flow().surprise("y")[75] for each in (first, second)]
    for expected in (sizes[0], sizes[1], sizes[0] - sizes[1]):
        assert shown.values("surprise (1: as expected)") == pytest.approx([expected], rel=1e-5)
        shown.key("r")
    assert len(shown.all("#rows span")) == 3 * 5
    short = graph.run(np.ones((3, 3)), schedule, record=pc.Record.flow())
    with pytest.raises(ResultError, match="must have the same graph and the same number"):
        first.error_flow().save(tmp_path / "both.html", beside=short.error_flow())


def test_pictures_and_tables_are_saved(page):
    result = paper_run()
    shown = page(result.error_flow())
    shown.run("window.saved = []; download = (name, content) => saved.push([name, content])")
    shown.run("save('csv'); save('svg'); save('png')")
    wait_until(lambda: shown.run("return saved.length") == 3)
    (table, svg) = shown.run("return saved.slice(0, 2).map((each) => each[1])")
    rows = table.splitlines()
    column = rows[0].split(",").index('"y surprise"')
    found = [float(row.split(",")[column]) for row in rows[1:]]
    np.testing.assert_allclose(found, result.error_flow().surprise("y"), rtol=1e-6)
    root = ElementTree.fromstring(svg)
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"x", "y"} <= set(words)
    assert shown.run("return saved[2][1].size") > 5000


# --- screens ---------------------------------------------------------------------------------------------------------
def test_a_phone_shows_everything_without_scrolling_sideways(page):
    shown = page(paper_run().error_flow(), 390, 844)
    assert shown.run("return document.documentElement.scrollWidth") <= 390
    shown.run("choose(0)")
    assert shown.run("return document.documentElement.scrollWidth") <= 390
    for css in ("#slider", "#play", "#map", "#graph"):
        box = shown.find(css).rect
        assert box["width"] > 30
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 390
    assert shown.find("#slider").rect["width"] > 300


def test_the_dark_theme_follows_the_system_and_can_be_toggled(page):
    def paper_colour():
        return shown.run("return getComputedStyle(document.body).backgroundColor")

    shown = page(paper_run().error_flow(), dark=True)
    dark = paper_colour()
    theta = number(paper_run(), "theta")
    node = shown.style(f"n{theta}", "background-color")
    shown.find("#theme").click()
    assert paper_colour() == "rgb(255, 255, 255)" != dark
    assert shown.style(f"n{theta}", "background-color") != node
    assert page(paper_run().error_flow()).style(f"n{theta}", "background-color") == shown.style(
        f"n{theta}", "background-color"
    )


def test_a_downsampled_run_shows_the_extremes_of_each_interval(page):
    result = repeated(paper_run(), 700)
    flow, shown = result.error_flow(), page(result.error_flow())
    bin_size = shown.run("return flow.bin_size")
    assert bin_size > 1
    shown.point(number(result, "y"))
    for frame in (0, 1234):
        shown.to(frame)
        part = slice(frame * bin_size, (frame + 1) * bin_size)
        assert shown.values("surprise (1: as expected)") == pytest.approx([flow.surprise("y")[part].max()], rel=1e-6)
        assert f"range of {bin_size}" in shown.find("#now").text
        assert f"t = {result.times[part][0]:.2f} to {result.times[part][-1]:.2f}" in shown.find("#now").text
    shown.key("s")
    assert shown.values("surprise (1: as expected)") == pytest.approx([flow.surprise("y").max()], rel=1e-6)


def test_scrubbing_moves_cursors_and_draws_no_trace_again(page):
    """So that a frame takes the same time, however long the run is."""
    shown = page(repeated(paper_run(), 67).error_flow())
    shown.run("choose(0)")
    shown.settled()
    drawn, moved = shown.run(
        "let drawn = 0; const draw = Chart.prototype.draw, map = drawMap;"
        "Chart.prototype.draw = function (...given) { drawn++; draw.apply(this, given); };"
        "drawMap = () => { drawn++; map(); };"
        "const places = new Set();"
        "for (let i = 0; i < 60; i++) {"
        "  state.frame = 160 * i; render(); places.add(document.querySelector('.chart .cursor').style.left); }"
        "const moved = places.size; zoom(0, 5000); return [drawn - charts.length - 2, moved]"
    )
    assert drawn == 0
    assert moved == 60


# --- live ------------------------------------------------------------------------------------------------------------
def test_a_running_stream_is_followed(page, browser):
    graph, schedule = odem(every=20)
    session = graph.start(schedule, record=())
    data = pc.simulate.glv_process(60, noise="white", seed=1).observations
    with watch(session) as watched:
        browser.get(watched.address)
        shown = Page(browser)
        assert "Waiting for the first observation" in shown.find("body").text
        for y in data[:30]:
            session.step(y)
        wait_until(lambda: shown.all("#now[data-frame]"))
        for y in data[30:]:
            session.step(y)
        wait_until(lambda: "60 of 60" in shown.find("#now").text)
        shown.run("choose(arguments[0])", list(graph.nodes).index("theta"))
        shown.settled()
        believed = torch.stack([session.mean("theta"), session.sd("theta")], 1).reshape(-1)
        assert shown.values("parameter") == pytest.approx(believed.tolist(), rel=1e-6)
        assert shown.find("#live").text.startswith("● live")
    wait_until(lambda: "has ended" in shown.find("#live").text)
    browser.get_log("browser")  # it says that nobody answers any more
