"""Names and titles that try to become part of a page, and what must not have happened after it was shown."""

import socket
import struct

import numpy as np

import pcnet as pc
from pcnet.results.live_page import watch

FRAGMENTS = (
    *("<script>window.harmed=1<", "</script><script>window.harmed=1</script>", "<img src=x onerror=window.harmed=1>"),
    *(
        "<svg onload=window.harmed=1>",
        "<!--",
        "-->",
        "]]>",
        '" onmouseover="window.harmed=1',
        "' autofocus onfocus='",
        "`",
    ),
    *(
        "${window.harmed=1}",
        "\\u003cimg src=x onerror=window.harmed=1\\u003e",
        "@@data@@",
        "&lt;b&gt;",
        "javascript:harmed=1",
    ),
    *(
        "__proto__",
        "constructor",
        "\u202e",
        "\u2028",
        "😀",
        "\ud7ff",
        "{{7*7}}",
        "<iframe srcdoc='<script>parent.harmed=1'>",
    ),
)


def text(rng, for_name):
    """A title, or a name of a node, of which some characters are not allowed."""
    joined = "".join(rng.choice(FRAGMENTS, size=rng.integers(1, 4)))
    if not for_name:
        return joined
    allowed = "".join(each for each in joined.replace("/", "∕") if each.isprintable())
    return f"{allowed[:60]} {rng.integers(1000)}"


def model(rng):
    """A small model all of whose names are hostile."""
    names = []
    while len(names) < 4:
        name = text(rng, for_name=True)
        if name not in names:
            names.append(name)
    x = pc.GeneralisedStateNode(names[0], dim=1, orders=2, flow=lambda x, theta: -x)
    y = pc.SensoryNode(names[1], dim=1, orders=1, dt=0.1)
    graph = pc.Graph()
    graph.predicts(x, y)
    graph.weighs(pc.PrecisionNode(names[2], prior_precision=1, sd=0.1, correlation_time=0.1), y)
    graph.weighs(pc.PrecisionNode(names[3], prior_precision=1, sd=0.1, correlation_time=0.1), x)
    return graph


def harm(browser, graph):
    """What is wrong with the page that a browser shows; empty if all names are mere text."""
    shown = browser.execute_script(
        """const found = []
        for (let k = 0; k < arguments[0]; k++) {
            choose(k)
            found.push(document.querySelector('#panel h2').textContent)
        }
        const foreign = document.querySelectorAll('img, iframe, svg[onload], #panel script, #tip script').length
        return [window.harmed, foreign, found]""",
        len(graph.nodes),
    )
    wrong = [] if shown[0] is None else ["a script has run"]
    wrong += ["foreign elements"] if shown[1] else []
    return wrong + (["names"] if sorted(shown[2]) != sorted(graph.nodes) else [])


def client(watched, chance):
    """A client of the live page that does not behave; True if what it gets is no answer of a server."""
    port = watched._server.server_address[1]
    good = f"GET /flow.json HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()
    bad = (
        b"",
        b"GE",
        b"\0\xff\r\n\r\n",
        b"GET /" + b"a" * 70_000,
        b"POST / HTTP/1.1\r\n\r\n",
        good.replace(b"127", b"128"),
    )
    with socket.create_connection(("127.0.0.1", port), timeout=20) as made:
        way = chance.randrange(3)
        if way == 0:  # hang up at once
            made.sendall(good)
            made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        made.sendall(chance.choice(bad) if way == 1 else good)
        if way == 1:
            made.shutdown(socket.SHUT_WR)
        try:
            found = made.recv(100)
        except ConnectionResetError:  # sent away
            return False
        return bool(found) and not found.startswith((b"HTTP/1.0 ", b"<!DOCTYPE HTML>"))


def pages(browser, tries, folder):
    """Show hostile pages from files and from running sessions; what went wrong, by page."""
    rng, found = np.random.default_rng(0), []
    for k in range(tries):
        graph, title = model(rng), text(rng, for_name=False)
        if k % 2:
            session = graph.start(record=())
            with watch(session, title=title) as watched:
                session.run(np.ones((3, 1)))
                browser.get(watched.address)
                found += harm(browser, graph)
                browser.get("about:blank")  # or the page asks on after the server has ended
        else:
            flow = graph.run(np.ones((3, 1)), record=pc.Record.flow()).error_flow()
            browser.get(flow.save(folder / "flow.html", title=title).as_uri())
            found += harm(browser, graph)
    return found
