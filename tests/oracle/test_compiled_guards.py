"""Guards of compiled ticks, negated one by one: the tick changes nothing, and the eager engine takes it over.

A number in memory, the selector, tells compiled code which of its guards to negate; 0 for none. The memory for settings
that differ over the batch has room for it, because these models have no such settings.
"""

import ctypes
import random
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

import pcnet as pc
from pcnet.engine.compiled import scalar_rules, tick_compiler, variants
from pcnet.engine.compiled.element_tick import LARGEST
from pcnet.engine.compiled.ir import Function
from pcnet.engine.compiled.layout import Layout, Slot
from pcnet.engine.compiled.run import EVERYTHING, WORD, CompiledRun
from pcnet.engine.compiled.trace import _Recorder
from pcnet.engine.compiled.values import DOUBLE
from pcnet.graphs import Level, hierarchy, odem
from pcnet.results.recorder import Record
from support.filters import single_filter

TICKS = 40
Y = pc.simulate.glv_process(samples=TICKS, noise="white", seed=3).observations
GAPS = Y.clone()  # each pattern of missing channels is a variant of its own: one channel, or all
GAPS[5::7, 1], GAPS[9::13] = torch.nan, torch.nan


def tracking():
    settings = {"parameter_mean": [0.3, -0.2, 0.3], "parameter_sd": 0.25}
    return single_filter(pc.systems.lotka_volterra, 3, 0.01, **settings)


def two_levels():
    def oscillator(x, theta):
        return torch.stack([x[..., 1], -theta[..., 0] * x[..., 0]], -1)

    first = Level(oscillator, 2, parameter_mean=[1.0], parameter_sd=[0.2], process_noise_sd=0.1, learn_noise=True)
    second = Level(pc.systems.linear([[-0.1]]), 1, mapping=lambda x, _: 1.0 + x, process_noise_sd=0.14)
    return hierarchy(first, second, dt=0.05, every=16)


MODELS = {
    "adaptive filter with gaps": lambda: (tracking(), GAPS),
    "odem": lambda: (odem(model="glv", orders=2, every=16), Y),
    "two levels": lambda: (two_levels(), Y[:, :2]),
    "a batch of series with gaps": lambda: (tracking(), torch.stack([GAPS, Y.flip(-1)])),
}


class Case(NamedTuple):
    """A tick of a batch element in compiled code: the state before and after it, and what was given, (n,) each."""

    kind: object
    before: np.ndarray
    given: np.ndarray
    after: np.ndarray


class Hook:
    """What the engine does, with guards that can be negated.

    counts: number of guards of each variant, in the order in which variants are made. cases: the ticks that were done,
    each by batch element.
    """

    def __init__(self, monkeypatch, form):
        self.counts, self.cases, self.last = [], [], 0
        monkeypatch.setenv("PCNET_CACHE", "")
        make, lower, leave, advance, compiled = (
            tick_compiler.compile_tick,
            tick_compiler.lowered,
            Function.leave_unless_condition,
            CompiledRun.advance,
            tick_compiler.compiled,
        )

        def made(*given):
            self.counts.append(0)
            try:
                return make(*given)
            except BaseException:
                self.counts.pop()
                raise

        def lowered(*given):
            tick = lower(*given)
            values = tick.values
            selector = values.new(DOUBLE, "input", "settings", 0)
            guards = []
            for guard in tick.guards:
                chosen = values.compare("eq", selector, values.constant(self._next(), DOUBLE))
                guards.append(values.compare("ne", guard, chosen))
            return tick._replace(guards=guards)

        def leave_unless(f, condition):
            if f.name in ("prepare", "tick"):  # not the functions of single operations, whose outcome is checked there
                chosen = f.compare("oeq", f.load("%settings", 0), f.module.number(float(self._next())))
                if f.module.width > 1:
                    count = f.module.width
                    f.module.declare(f"i1 @llvm.vector.reduce.or.v{count}i1(<{count} x i1>)")
                    chosen = f.put(f"call i1 @llvm.vector.reduce.or.v{count}i1(<{count} x i1> {chosen})")
                condition = f.put(f"xor i1 {condition}, {chosen}")
            leave(f, condition)

        def logged(run, block):
            before = run._state.copy()
            done, record = advance(run, block)
            if done == len(block.kinds) == 1:
                kind, given = run.kinds[int(block.kinds[0])], np.broadcast_to(block.given[0], (run.batch, run.n_given))
                parts = (before[0].T, given, run._state[0].T.copy())
                self.cases.append(
                    [Case(kind, *part) for part in zip(*(each[: run.batch] for each in parts), strict=True)]
                )
            return done, record

        def quickly(text, cache, **options):
            return compiled(text, cache, **options | {"quick": True, "vectorise": False})

        monkeypatch.setattr(tick_compiler, "compile_tick", made)
        monkeypatch.setattr(CompiledRun, "advance", logged)
        monkeypatch.setattr(tick_compiler, "compiled", quickly)
        if form == "scalars":
            monkeypatch.setattr(tick_compiler, "lowered", lowered)
        else:
            monkeypatch.setattr(scalar_rules, "MAX_VALUES", 0)
            monkeypatch.setattr(Function, "leave_unless_condition", leave_unless)

    def _next(self):
        self.counts[-1] += 1
        self.last += 1
        return self.last

    def numbers(self, variant):
        """The numbers of the guards of a variant, from 1 on."""
        first = 1 + sum(self.counts[:variant])
        return range(first, first + self.counts[variant])


def negate(session, number, lane=0):
    """Let a guard be negated, in one lane; 0 for none."""
    run, stepper = session._engine.lead.engine.run, session._engine.lead._stepper
    run._settings[...] = 0.0
    run._settings[0, 0, lane] = number
    run._stale[:] = EVERYTHING  # it may be in derived values
    if stepper is not None and number:
        stepper._words[WORD["stale"]] = EVERYTHING


def attempt(engine, i, case, number=0, lane=0):
    """Call the machine code of variant i, with this case in all lanes: whether its guards hold, and the new state.

    number, lane: the guard that is negated, and where.
    """
    variant, width = engine.variants.all[i], engine.run.width
    state, given = (np.repeat(each[:, None], width, 1) for each in (case.before, case.given))
    settings = np.zeros((1, width))
    settings[0, lane] = number
    sizes = len(state), variant.derived, Layout.size(engine.run.layout.record)
    new, derived, record = (np.zeros((n + 1, width)) for n in sizes)
    new[:-1] = state  # a tick writes only what it changes
    kept = [(each, each.copy()) for each in (state, given, settings)]
    addresses = [ctypes.c_void_p(each.ctypes.data) for each in (state, new, given, settings, derived, record)]
    pointers = [ctypes.c_void_p] * 6
    ctypes.CFUNCTYPE(None, *pointers)(variant.library.address("prepare"))(*addresses)
    held = ctypes.CFUNCTYPE(ctypes.c_bool, *pointers)(variant.library.address("tick"))(*addresses)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(variant.library.address("finish"))(addresses[1])
    for each, before in kept:
        np.testing.assert_array_equal(each, before)
    return held, new[:-1, 0]


def assert_equal(one, other):
    assert one.traces.keys() == other.traces.keys()
    for name, trace in one.traces.items():
        size = np.nanmax(np.abs(trace.values), initial=1e-300)
        np.testing.assert_allclose(other.traces[name].values, trace.values, rtol=1e-9, atol=1e-9 * size, err_msg=name)
    np.testing.assert_allclose(other.free_action, one.free_action, rtol=1e-8)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("adaptive filter with gaps", "scalars"),
        ("odem", "scalars"),
        ("odem", "loops"),
        ("a batch of series with gaps", "loops"),
        pytest.param("adaptive filter with gaps", "loops", marks=pytest.mark.slow),
        pytest.param("a batch of series with gaps", "scalars", marks=pytest.mark.slow),
        pytest.param("two levels", "scalars", marks=pytest.mark.slow),
        pytest.param("two levels", "loops", marks=pytest.mark.slow),
    ],
)
def test_a_tick_with_one_guard_negated_is_left_to_the_eager_engine(name, form, monkeypatch):
    hook = Hook(monkeypatch, form)
    model, observations = MODELS[name]()
    ticks = list(observations.movedim(-2, 0))
    clean = model.start(engine="compiled")
    for y in ticks:
        clean.run(y[..., None, :])
    engine = clean._engine.lead.engine
    made, width, batch = engine.variants.all, engine.run.width, engine.run.batch
    assert clean.result().eager_ticks == 0
    assert len(hook.cases) == TICKS
    assert {each.form for each in made} == {form}
    assert len(made) == len(hook.counts) > 2

    # machine code: each guard of each variant
    first, holding = {}, []
    for elements in hook.cases:
        holding.append([])
        for case in elements:
            held = [i for i, v in enumerate(made) if v.kind == case.kind and attempt(engine, i, case)[0]]
            assert len(held) == 1
            holding[-1] += held
            first.setdefault(held[0], case)
    assert first.keys() == set(range(len(made)))
    for i, case in first.items():
        assert len(hook.numbers(i)) > 10
        for guard in hook.numbers(i):
            assert not attempt(engine, i, case, guard, guard % width)[0], f"guard {guard} of variant {i}"
        np.testing.assert_array_equal(attempt(engine, i, case)[1], case.after)

    # sessions: a guard at a time, each of another tick
    chance, refused = random.Random(1), set()
    session = model.start(engine="compiled").prepare(observations)
    for tick, y in enumerate(ticks):
        element = min(range(batch), key=lambda each: (holding[tick][each] in refused, chance.random()))
        i = holding[tick][element]
        if i in refused and chance.random() < 0.6:
            session.step(y)
            continue
        refused.add(i)
        negate(session, chance.choice(hook.numbers(i)), element)
        before, eager = session.state.tensors(), session.result().eager_ticks
        mine = session._engine.lead.engine
        mine.load(session.state)
        series = mine.series({"y": y[None]}, None)
        assert mine.advance(series, 0, 1, session.tick, session.snapshot.clock, 1).ticks == 0
        for path, value in mine.state().tensors().items():
            np.testing.assert_array_equal(value, before[path], err_msg=path)
        session.step(y)
        negate(session, 0)
        assert session.result().eager_ticks == eager + 1
    assert refused == first.keys()
    assert len(made) == len(hook.counts) == len(first)
    found = session.result()
    assert found.engine == "compiled"
    assert len(refused) <= found.eager_ticks < TICKS
    assert_equal(model.run(observations, engine="eager"), found)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("adaptive filter with gaps", "scalars"),
        ("a batch of series with gaps", "loops"),
        pytest.param("adaptive filter with gaps", "loops", marks=pytest.mark.slow),
        pytest.param("a batch of series with gaps", "scalars", marks=pytest.mark.slow),
    ],
)
def test_a_tick_that_makes_a_large_number_is_left_to_the_eager_engine(name, form, monkeypatch):
    """One observation is so large that a finite state exceeds the limit of compiled code."""
    Hook(monkeypatch, form)
    model, observations = MODELS[name]()
    one, other = (model.start(engine=engine) for engine in ("eager", "compiled"))
    for session in (one, other):
        session.run(observations[..., :20, :])
    assert_equal(one.result(), other.result())
    assert other.result().eager_ticks == 0
    outlier = observations[..., 20, :].clone()
    outlier.reshape(-1, 3)[0] = 1e3 * LARGEST  # of one batch element
    for session in (one, other):
        session.step(outlier)
    assert other.result().eager_ticks == 1
    assert LARGEST < one.mean("x").abs().max() < 1e4 * LARGEST
    for path, value in one.state.tensors().items():
        torch.testing.assert_close(other.state.tensors()[path], value, rtol=1e-8, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_number_that_was_taken_for_a_constant_is_found_at_the_second_use(batch, monkeypatch):
    """The eager engine then takes over, with its digits."""
    monkeypatch.setenv("PCNET_CACHE", "")
    monkeypatch.setenv("PCNET_ENGINE", "compiled")
    add = _Recorder.add_input

    def forget(self, name, tensor):
        add(self, name, tensor)
        if name == "state/x/belief/mean":
            self._varies[self.inputs[name].storage] = False
            place = self.inputs[name].storage
            self.storages[place] = self.storages[place]._replace(source="constant")

    y = torch.stack([Y] * batch, 1) if batch > 1 else Y
    expected = tracking().run(y, engine="eager").mean("x")
    monkeypatch.setattr(_Recorder, "add_input", forget)
    session = tracking().start(engine="auto").run(y)
    assert "than the eager engine" in session.engine_report
    np.testing.assert_allclose(session.result().mean("x"), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("slope", "given_up"), [(1.0, True), (1e12, False)])
def test_ticks_that_rounding_alone_changes_are_no_reason_to_give_compiled_code_up(slope, given_up, monkeypatch):
    """Where the eager engine leads elsewhere from the same numbers rounded otherwise, nothing can be said."""

    class Tick:
        def __init__(self, one, layout, kind, wanted, state, given):
            self.state = state

        def tried(self):
            return (), {"state/x/mean": torch.sin(slope * self.state["x/mean"])}

    monkeypatch.setattr(variants, "ElementProgram", lambda program, element: None)
    layout = SimpleNamespace(state=[Slot("x/mean", 0, (3,), torch.float64)])
    found = variants.Variants(layout, 1, Record(("mean",)), make_tick=Tick)
    found.all.append(SimpleNamespace(kind="every tick", outcomes=()))
    state = {"x/mean": torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.float64)}
    other = {"x/mean": torch.sin(slope * state["x/mean"]) + 1e-3}
    assert found.agrees(0, None, 0, state, other, {}) != given_up
    assert len(found.all) == (not given_up)
