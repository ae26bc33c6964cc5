"""Try every combination of nodes and links, and write what came of it to docs/combinations.md.

Run:  python docs/combinations.py
Each combination is a small graph that takes in four observations. The page says which run; for the others it gives the
error, which names what to take instead. A test compares the page with what is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import pcnet as pc
from pcnet.errors import PcnetError
from pcnet.nodes import (
    BinomialNode,
    CategoricalNode,
    CauseNode,
    ChoiceNode,
    GaussianSumStateNode,
    GeneralisedStateNode,
    InputNode,
    KalmanCauseNode,
    KalmanStateNode,
    ParameterNode,
    PoissonNode,
    PrecisionNode,
    SensoryNode,
    StudentTNode,
    SwitchingStateNode,
)
from pcnet.numerics.kernels import Matern, White

PAGE = Path(__file__).with_name("combinations.md")
DT, ROWS = 0.1, 4
Make = Callable[[str], Any]


def decay(x: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    return -x if not theta.shape[-1] else -theta[..., :1] * x


def driven(x: torch.Tensor, v: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
    return decay(x, theta) + v[..., :1]


pc.register("combinations: decay", decay)
pc.register("combinations: driven", driven)


def states(flow: Any) -> dict[str, Make]:
    return {
        "GeneralisedStateNode": lambda name: GeneralisedStateNode(name, dim=1, orders=2, flow=flow),
        "KalmanStateNode": lambda name: KalmanStateNode(name, dim=1, flow=flow),
        "SwitchingStateNode": lambda name: SwitchingStateNode(name, dim=1, flow=flow),
        "GaussianSumStateNode": lambda name: GaussianSumStateNode(name, dim=1, flow=flow, peaks=3),
    }


def sensors(orders: int) -> dict[str, Make]:
    return {
        "SensoryNode": lambda name: SensoryNode(name, dim=1, orders=orders, dt=DT),
        "PoissonNode": lambda name: PoissonNode(name, dim=1),
        "BinomialNode": lambda name: BinomialNode(name, dim=1),
        "ChoiceNode": lambda name: ChoiceNode(name, dim=1),
        "StudentTNode": lambda name: StudentTNode(name, dim=1),
    }


ABOVE: dict[str, Make] = {
    "InputNode": lambda name: InputNode(name, dim=1, orders=1, dt=DT),
    "CauseNode": lambda name: CauseNode(name, dim=1, orders=2),
    "KalmanCauseNode": lambda name: KalmanCauseNode(name, dim=1, correlation_time=1.0),
    "CategoricalNode": lambda name: CategoricalNode(name, values=[[0.0], [1.0]], stay=0.9),
}
NOISES: dict[str, Callable[[str], PrecisionNode]] = {
    "white": lambda name: PrecisionNode(name, prior_precision=9.0, sd=0.5, kernel=White()),
    "smooth": lambda name: PrecisionNode(name, prior_precision=9.0, sd=0.5, correlation_time=0.2),
    "Matérn": lambda name: PrecisionNode(name, prior_precision=9.0, sd=0.5, kernel=Matern(0.2, 2.5)),
    "one level for all channels": lambda name: PrecisionNode(
        name, prior_precision=9.0, sd=0.5, correlation_time=0.2, channels="shared"
    ),
    "coupled channels": lambda name: PrecisionNode(
        name, prior_precision=9.0, sd=0.5, correlation_time=0.2, channels="full"
    ),
    "learned correlation time": lambda name: PrecisionNode(
        name, prior_precision=9.0, sd=0.5, correlation_time=0.2, correlation_time_sd=0.3
    ),
}


def run(model: pc.Model, seen: dict[str, Any]) -> None:
    model.run(seen, engine="eager", record=("mean",))


def resume(model: pc.Model, seen: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder) / "run.ckpt"
        model.start(engine="eager").run(seen).save(file)
        pc.resume(file, model).run(seen)


def sweep(model: pc.Model, seen: dict[str, Any]) -> None:
    study = pc.sweep(lambda **_: model, {"row": [0, 1]}, seen, processes=1, progress=False)
    for error in study.to_dataframe()["error"].dropna():
        raise PcnetError(error)


def read_file(model: pc.Model, seen: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        run(pc.Model.load(model.save(Path(folder) / "model.yaml")), seen)


USES: dict[str, Callable[[pc.Model, dict[str, Any]], object]] = {
    "run": run,
    "compiled": lambda model, seen: model.run(seen, engine="compiled", record=("mean",)),
    "batch": lambda model, seen: run(model, {name: np.stack([each, each]) for name, each in seen.items()}),
    "Model.load": read_file,
    "pc.resume": resume,
    "pc.sweep": sweep,
    "forecast": lambda model, seen: model.start(engine="eager").run(seen).forecast(2 * DT),
    "sample": lambda model, seen: model.start(engine="eager").run(seen).sample(2 * DT, 2, seed=0),
    "smooth=True": lambda model, seen: model.run(seen, engine="eager", smooth=True),
    "smoothed(lag)": lambda model, seen: model.start(engine="eager", smooth=2).run(seen).smoothed(1),
    "hypotheses": lambda model, seen: pc.Model(model.graph, model.schedule, pc.Hypotheses()).run(seen, engine="eager"),
    "fit": lambda model, seen: pc.Model(model.graph, pc.batch("parameter")).fit(
        seen, max_iterations=1, estimator=pc.estimators.Newton()
    ),
}
Use = Callable[[pc.Model, dict[str, Any]], object]


def outcome(build: Callable[[pc.Graph], Mapping[str, int]], kalman: bool, use: Use = run) -> str:
    """The error, or nothing if the graph can be used so; build gives the channels of each sensor."""
    graph, rng = pc.Graph(), np.random.default_rng(0)
    try:
        seen = {name: rng.integers(0, 2, (ROWS, channels)).astype(float) for name, channels in build(graph).items()}
        use(pc.Model(graph, pc.adaptive_filtering() if kalman else pc.odem(every=2)), seen)
    except PcnetError as error:
        return str(error)
    return ""


def smooth(name: str) -> PrecisionNode:
    return NOISES["smooth"](name)


def finish(graph: pc.Graph, x: Any, kind: str, *, orders: int = 0, noise: bool = True) -> dict[str, int]:
    """Add what a state needs beside what is tried: something to predict, precisions, and categories."""
    rows = orders or (2 if kind == "GeneralisedStateNode" else 1)
    y = SensoryNode("y", dim=1, orders=rows, dt=DT)
    graph.predicts(x, y)
    graph.weighs(smooth("noise_y") if kind == "GeneralisedStateNode" else NOISES["white"]("noise_y"), y)
    if noise:
        graph.weighs(smooth("noise_x") if kind == "GeneralisedStateNode" else NOISES["white"]("noise_x"), x)
    return {"y": 1}


def switch(graph: pc.Graph, x: Any, kind: str) -> None:
    if kind == "SwitchingStateNode":
        graph.drives(ABOVE["CategoricalNode"]("category"), x)


def predicts(kind: str, child: str) -> str:
    def build(graph: pc.Graph) -> dict[str, int]:
        generalised = kind == "GeneralisedStateNode"
        x = states(driven if kind == "SwitchingStateNode" else decay)[kind]("x")
        if child in sensors(1):
            y = sensors(2 if generalised else 1)[child]("z")
            graph.predicts(x, y)
            switch(graph, x, kind)
            graph.weighs(NOISES["smooth" if generalised else "white"]("noise_x"), x)
            if child in ("SensoryNode", "StudentTNode"):
                graph.weighs(NOISES["smooth" if generalised and child == "SensoryNode" else "white"]("noise_z"), y)
            return {"z": 1}
        below = states(decay)["GeneralisedStateNode" if generalised else "KalmanStateNode"]("below")
        if child == "ParameterNode":
            theta = ParameterNode("theta", mean=[0.5], sd=0.2)
            graph.parametrises(theta, below)
            graph.predicts(x, theta)
        elif child == "CauseNode":
            below = GeneralisedStateNode("below", dim=1, orders=2, flow=driven)
            cause = CauseNode("cause", dim=1, orders=2)
            graph.drives(cause, below)
            graph.predicts(x, cause)
            graph.weighs(smooth("noise_cause"), cause)
        else:
            graph.predicts(x, below)
        switch(graph, x, kind)
        graph.weighs(NOISES["smooth" if generalised else "white"]("noise_above"), x)
        return finish(graph, below, type(below).__name__)

    return outcome(build, kind != "GeneralisedStateNode")


def drives(parent: str, kind: str) -> str:
    def build(graph: pc.Graph) -> dict[str, int]:
        flow = driven
        if parent in states(decay):
            above = states(decay)[parent]("above")
            graph.weighs(NOISES["white"]("noise_above"), above)
        else:
            above = ABOVE[parent]("above")
        if kind == "KalmanCauseNode":
            middle, x = KalmanCauseNode("v", dim=1, flow=driven), KalmanStateNode("x", dim=1, flow=driven)
            graph.drives(middle, x)
            graph.weighs(NOISES["white"]("noise_v"), middle)
            graph.drives(above, middle)
        else:
            x = states(flow)[kind]("x")
            if parent != "CategoricalNode":
                switch(graph, x, kind)
            graph.drives(above, x)
        if parent in ("CauseNode", "KalmanCauseNode"):
            graph.weighs(smooth("noise_above") if parent == "CauseNode" else NOISES["white"]("noise_above"), above)
        return finish(graph, x, type(x).__name__) | ({"above": 1} if parent == "InputNode" else {})

    return outcome(build, kind != "GeneralisedStateNode")


def weighs(noise: str, child: str) -> str:
    def build(graph: pc.Graph) -> dict[str, int]:
        kind = child.removeprefix("observation below a ")
        x = states(driven if kind == "SwitchingStateNode" else decay)[kind]("x")
        switch(graph, x, kind)
        if child == kind:
            graph.weighs(NOISES[noise]("noise_x"), x)
            return finish(graph, x, kind, noise=False)
        y = SensoryNode("y", dim=1, orders=2 if kind == "GeneralisedStateNode" else 1, dt=DT)
        graph.predicts(x, y)
        graph.weighs(NOISES[noise]("noise_y"), y)
        graph.weighs(smooth("noise_x") if kind == "GeneralisedStateNode" else NOISES["white"]("noise_x"), x)
        return {"y": 1}

    return outcome(build, "Generalised" not in child)


def parametrises(of: str, kind: str) -> str:
    def build(graph: pc.Graph) -> dict[str, int]:
        theta = ParameterNode("theta", mean=[0.5], sd=0.2)
        if kind == "KalmanCauseNode":
            v, x = KalmanCauseNode("v", dim=1, flow=decay), KalmanStateNode("x", dim=1, flow=driven)
            graph.drives(v, x)
            graph.weighs(NOISES["white"]("noise_v"), v)
            seen = finish(graph, x, "KalmanStateNode")
            graph.parametrises(theta, v) if of == "its flow" else graph.parametrises(theta, v, of=graph["y"])
            return seen
        x = states(driven if kind == "SwitchingStateNode" else decay)[kind]("x")
        switch(graph, x, kind)
        if of == "its flow":
            graph.parametrises(theta, x)
            return finish(graph, x, kind)
        y = SensoryNode("y", dim=1, orders=2 if kind == "GeneralisedStateNode" else 1, dt=DT)
        graph.predicts(x, y, via=lambda x, theta: theta[..., :1] * x)
        graph.parametrises(theta, x, of=y)
        graph.weighs(smooth("noise_y") if kind == "GeneralisedStateNode" else NOISES["white"]("noise_y"), y)
        graph.weighs(smooth("noise_x") if kind == "GeneralisedStateNode" else NOISES["white"]("noise_x"), x)
        return {"y": 1}

    return outcome(build, kind != "GeneralisedStateNode")


WITH_CAUSE = "KalmanStateNode with a KalmanCauseNode"


def used(use: str, kind: str) -> str:
    def build(graph: pc.Graph) -> dict[str, int]:
        theta, takes_v = ParameterNode("theta", mean=[0.5], sd=0.2), kind in ("SwitchingStateNode", WITH_CAUSE)
        x = states(driven if takes_v else decay)["KalmanStateNode" if kind == WITH_CAUSE else kind]("x")
        switch(graph, x, kind)
        if kind == WITH_CAUSE:
            v = ABOVE["KalmanCauseNode"]("v")
            graph.drives(v, x)
            graph.weighs(NOISES["white"]("noise_v"), v)
        graph.parametrises(theta, x)
        return finish(graph, x, kind)

    return outcome(build, kind != "GeneralisedStateNode", USES[use])


KINDS = list(states(decay))
TABLES: dict[str, tuple[str, list[str], list[str], Callable[[str, str], str]]] = {
    "predicts": (
        "A state (row) predicts a node (column), `graph.predicts(row, column)`.",
        KINDS,
        [*sensors(1), "ParameterNode", "CauseNode", "another state"],
        predicts,
    ),
    "drives": (
        "A node (row) drives a state or cause (column), `graph.drives(row, column)`.",
        [*ABOVE, "KalmanStateNode", "GeneralisedStateNode"],
        [*KINDS, "KalmanCauseNode"],
        drives,
    ),
    "parametrises": (
        "A `ParameterNode` parametrises (row) of a state or cause (column), `graph.parametrises(theta, column)`.",
        ["its flow", "a mapping of it"],
        [*KINDS, "KalmanCauseNode"],
        parametrises,
    ),
    "weighs": (
        "A `PrecisionNode` with this noise (row) weighs a node (column), `graph.weighs(noise, column)`.",
        list(NOISES),
        [*KINDS, *(f"observation below a {kind}" for kind in KINDS)],
        weighs,
    ),
}
TABLES["uses"] = ("What can be done (row) with a graph of one state (column).", list(USES), [*KINDS, WITH_CAUSE], used)
KNOWN = {*pc.nodes.__all__, *(use for use in USES if use not in ("compiled", "batch"))}
INTRODUCTION = """# Which nodes and links go together

This page is made by `python docs/combinations.py`, which builds each combination and tries it on a few observations.
✓ works. A number is that of an error below the table, as it is raised; it says what to take instead.
"""


def table(title: str) -> str:
    """One table with its errors, as text."""
    what, rows, columns, tried = TABLES[title]
    errors: list[str] = []
    names = " | ".join(f"`{each}`" if each in KNOWN else each for each in columns)
    lines = [f"## {title}", "", what, "", f"| | {names} |", "| --- |" + " :-: |" * len(columns)]
    for row in rows:
        cells = []
        for column in columns:
            error = tried(row, column)
            errors += [error] if error and error not in errors else []
            cells.append(str(errors.index(error) + 1) if error else "✓")
        name = f"`{row}`" if row in KNOWN else row
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", *(f"{i}. {error}" for i, error in enumerate(errors, 1))]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text("\n".join([INTRODUCTION, *map(table, TABLES)]), encoding="utf-8")
    print(f"{PAGE.name}: {sum(len(rows) * len(columns) for _, rows, columns, _ in TABLES.values())} combinations")
