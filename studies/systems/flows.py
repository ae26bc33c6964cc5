"""Flows and observations of the systems of the study: functions of states (..., d) and parameters (..., p)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Observe = Callable[[Tensor], Tensor]


def _columns(*values: Tensor) -> Tensor:
    return torch.stack(values, -1)


def van_der_pol(x: Tensor, p: Tensor) -> Tensor:
    u, v = x[..., 0], x[..., 1]
    return _columns(v, p[..., 0] * (1 - u**2) * v - u)


def lorenz63(x: Tensor, p: Tensor) -> Tensor:
    u, v, w = x.unbind(-1)
    return _columns(p[..., 0] * (v - u), u * (p[..., 1] - w) - v, u * v - p[..., 2] * w)


def pendulum(x: Tensor, p: Tensor) -> Tensor:
    return _columns(x[..., 1], -p[..., 1] * x[..., 0].sin() - p[..., 0] * x[..., 1])


def fitzhugh_nagumo(x: Tensor, p: Tensor) -> Tensor:
    """Membrane potential v and recovery w under a constant current; θ = (current, rate of recovery)."""
    v, w = x[..., 0], x[..., 1]
    return _columns(v - v**3 / 3 - w + p[..., 0], p[..., 1] * (v + 0.7 - 0.8 * w))


def lorenz96(x: Tensor, p: Tensor) -> Tensor:
    return (x.roll(-1, -1) - x.roll(2, -1)) * x.roll(1, -1) - x + p[..., :1]


def oscillator(x: Tensor, p: Tensor) -> Tensor:
    """ẍ = −k x − c ẋ; θ = (c, k)."""
    return _columns(x[..., 1], -p[..., 1] * x[..., 0] - p[..., 0] * x[..., 1])


def epidemic(x: Tensor, p: Tensor) -> Tensor:
    """Susceptible, infected and recovered shares, with waning immunity; x = (s, log i), θ = (β, γ)."""
    s, i = x[..., 0], x[..., 1].exp()
    return _columns(-p[..., 0] * s * i + 0.05 * (1 - s - i), p[..., 0] * s - p[..., 1])


def three_species(x: Tensor, p: Tensor) -> Tensor:
    """Logs of three populations that eat each other; θ = (a₁₂, a₁₃, a₂₃)."""
    u, v, w = x.exp().unbind(-1)
    a, b, c = p.unbind(-1)
    return _columns(a * v + b * w, c * w - a * u, -b * u - c * v)


def brusselator(x: Tensor, p: Tensor) -> Tensor:
    """Two reacting chemicals; θ = (a, b)."""
    u, v = x[..., 0], x[..., 1]
    return _columns(p[..., 0] + u**2 * v - (p[..., 1] + 1) * u, p[..., 1] * u - u**2 * v)


def roessler(x: Tensor, p: Tensor) -> Tensor:
    """θ = (a, c), b = 0.2."""
    u, v, w = x.unbind(-1)
    return _columns(-v - w, u + p[..., 0] * v, 0.2 + w * (u - p[..., 1]))


def duffing(x: Tensor, p: Tensor) -> Tensor:
    """A particle in a double well, ẍ = kx − x³ − cẋ; θ = (c, k)."""
    u, v = x[..., 0], x[..., 1]
    return _columns(v, p[..., 1] * u - u**3 - p[..., 0] * v)


def bioreactor(x: Tensor, p: Tensor) -> Tensor:
    """Logs of biomass and substrate in a chemostat with Monod growth; θ = (largest growth rate, half-saturation)."""
    biomass, substrate = x[..., 0].exp(), x[..., 1].exp()
    growth = p[..., 0] * substrate / (p[..., 1].abs() + substrate)
    return _columns(growth - 0.3, 0.3 * (4.0 / substrate - 1) - 2.0 * growth * biomass / substrate)


def turning(x: Tensor, p: Tensor) -> Tensor:
    """A target in the plane that turns at a constant rate; x = (position, velocity), θ = the rate."""
    rate = p[..., 0]
    return _columns(x[..., 2], x[..., 3], -rate * x[..., 3], rate * x[..., 2])


def repressilator(x: Tensor, p: Tensor) -> Tensor:
    """Three proteins, each produced unless the one before represses it; θ = (strength, rate of decay)."""
    return p[..., :1] / (1 + x.roll(1, -1).abs() ** 3) - p[..., 1:] * x


def morris_lecar(x: Tensor, p: Tensor) -> Tensor:
    """Potential in mV and open share of potassium channels; θ = (current, rate of the channels)."""
    v, n = x[..., 0], x[..., 1]
    calcium = 0.5 * (1 + ((v + 1.2) / 18).tanh())
    opening, speed = 0.5 * (1 + ((v - 2) / 30).tanh()), ((v - 2) / 60).cosh()
    current = p[..., 0] - 4.4 * calcium * (v - 120) - 8 * n * (v + 84) - 2 * (v + 60)
    return _columns(current / 20, p[..., 1] * (opening - n) * speed)


def rigid_body(x: Tensor, p: Tensor) -> Tensor:
    """Euler's equations of a body without torque; θ = two ratios of its moments of inertia, the third from both."""
    a, b = p[..., 0], p[..., 1]
    third = -(a + b) / (1 + a * b)
    u, v, w = x.unbind(-1)
    return _columns(a * v * w, b * u * w, third * u * v)


def tanks(x: Tensor, p: Tensor) -> Tensor:
    """Levels of three tanks that run into each other; θ = (size of the first two outlets, of the third)."""
    first, second, third = x.clamp_min(1e-3).sqrt().unbind(-1)
    a, b = p[..., 0], p[..., 1]
    return _columns(0.7 - a * first, a * (first - second), a * second - b * third)


def lorenz84(x: Tensor, p: Tensor) -> Tensor:
    """Westerly wind and two phases of eddies; θ = (thermal forcing, its contrast)."""
    u, v, w = x.unbind(-1)
    return _columns(
        -(v**2) - w**2 - 0.25 * u + 0.25 * p[..., 0], u * v - 4 * u * w - v + p[..., 1], 4 * u * v + u * w - w
    )


def grazing(x: Tensor, p: Tensor) -> Tensor:
    """Logs of prey and predators, which are sated by much prey; θ = (rate of attack, mortality of predators)."""
    prey, predators = x[..., 0].exp(), x[..., 1].exp()
    eaten = p[..., 0] / (1 + 0.6 * p[..., 0] * prey)
    return _columns(1 - prey / 4 - eaten * predators, 0.6 * eaten * prey - p[..., 1])


def hindmarsh_rose(x: Tensor, p: Tensor) -> Tensor:
    """Potential, fast and slow currents of a neuron that bursts; θ = (applied current, rate of the slow current)."""
    v, fast, slow = x.unbind(-1)
    return _columns(fast - v**3 + 3 * v**2 - slow + p[..., 0], 1 - 5 * v**2 - fast, p[..., 1] * (4 * (v + 1.6) - slow))


def reentry(x: Tensor, p: Tensor) -> Tensor:
    """Altitude in km and speed of fall in km/s of a body that enters the atmosphere; θ = log of its drag."""
    altitude, speed = x[..., 0], x[..., 1]
    drag = (p[..., 0] - altitude / 7).exp() * speed * speed.abs()
    return _columns(-speed, 0.0098 - drag)


def glycolysis(x: Tensor, p: Tensor) -> Tensor:
    """Sel'kov's two metabolites; θ = (a, b)."""
    u, v = x[..., 0], x[..., 1]
    reacting = (p[..., 0] + u**2) * v
    return _columns(reacting - u, p[..., 1] - reacting)


def coupled_pendulums(x: Tensor, p: Tensor) -> Tensor:
    """Two pendulums with a spring between them; x = (angles, velocities), θ = (gravity, spring)."""
    first, second = x[..., 0], x[..., 1]
    pull = p[..., 1] * (second - first)
    return _columns(
        x[..., 2],
        x[..., 3],
        -p[..., 0] * first.sin() - 0.2 * x[..., 2] + pull,
        -p[..., 0] * second.sin() - 0.2 * x[..., 3] - pull,
    )


def thomas(x: Tensor, p: Tensor) -> Tensor:
    """Thomas' cyclically symmetric attractor with a drive of its own size; θ = (friction, strength)."""
    return p[..., 1:] * x.roll(-1, -1).sin() - p[..., :1] * x


def wilson_cowan(x: Tensor, p: Tensor) -> Tensor:
    """Activities of excitatory and inhibitory neurons; θ = (drive of the excitatory ones, their self-excitation)."""
    e, i = x[..., 0], x[..., 1]
    excited = torch.sigmoid(1.3 * (p[..., 1] * e - 12 * i + p[..., 0] - 4))
    return _columns(excited - e, 0.5 * (torch.sigmoid(2 * (15 * e - 3 * i - 3.7)) - i))


def infusion(x: Tensor, p: Tensor) -> Tensor:
    """Logs of a drug's concentration in blood and tissue under an infusion, with an elimination that saturates.

    θ = (largest rate of elimination, rate of exchange).
    """
    blood, tissue = x[..., 0].exp(), x[..., 1].exp()
    exchange = p[..., 1] * (tissue - blood)
    return _columns((2.0 - p[..., 0] * blood / (1.5 + blood) + exchange) / blood, -0.5 * exchange / tissue)


def reactor(x: Tensor, p: Tensor) -> Tensor:
    """Concentration and scaled temperature of a stirred tank with a reaction that heats it; θ = (log rate, cooling)."""
    c, heat = x[..., 0], x[..., 1]
    rate = c * (p[..., 0] + heat / (1 + heat / 20)).exp()
    return _columns(1 - c - rate, 8 * rate - heat - p[..., 1] * heat)


def vehicle(x: Tensor, p: Tensor) -> Tensor:
    """A vehicle in the plane; x = (position, heading, speed), θ = (curvature of its way, speed it returns to)."""
    heading, speed = x[..., 2], x[..., 3]
    return _columns(speed * heading.cos(), speed * heading.sin(), p[..., 0] * speed, 0.5 * (p[..., 1] - speed))


def friction(x: Tensor, p: Tensor) -> Tensor:
    """A driven mass on a spring with dry friction; x = (position, velocity, phase), θ = (friction, stiffness)."""
    place, velocity, phase = x.unbind(-1)
    rub = p[..., 0] * (velocity / 0.1).tanh()
    return _columns(velocity, -p[..., 1] * place - 0.1 * velocity - rub + phase.sin(), torch.full_like(phase, 0.8))


def circuit(x: Tensor, p: Tensor) -> Tensor:
    """Chua's circuit with a cubic diode; x = (two voltages, current), θ = (rate of the first, rate of the current)."""
    u, v, w = x.unbind(-1)
    return _columns(p[..., 0] * (v + u / 6 - u**3 / 6), u - v + w, -p[..., 1] * v)


def food_chain(x: Tensor, p: Tensor) -> Tensor:
    """Logs of plants, grazers and hunters; θ = (rate of grazing, rate of hunting)."""
    plants, grazers, hunters = x.exp().unbind(-1)
    grazed = p[..., 0] / (1 + 0.5 * p[..., 0] * plants)
    hunted = p[..., 1] / (1 + 2.0 * p[..., 1] * grazers)
    return _columns(1 - plants - grazed * grazers, grazed * plants - 0.4 - hunted * hunters, hunted * grazers - 0.08)


def rotors(x: Tensor, p: Tensor) -> Tensor:
    """Three phases that pull each other; θ = (coupling, frequency of the first), the others have 1.3 and 2."""
    first, second, third = x.unbind(-1)
    k = p[..., 0]
    return _columns(
        p[..., 1] + k * ((second - first).sin() + (third - first).sin()),
        1.3 + k * ((first - second).sin() + (third - second).sin()),
        2.0 + k * ((first - third).sin() + (second - third).sin()),
    )


def glucose(x: Tensor, p: Tensor) -> Tensor:
    """Minimal model of glucose (mmol/l), the remote action of insulin and insulin, with meals every 300 minutes.

    x = (glucose, action in 1/100 min, insulin over its base, time in minutes / 100), θ = (1 / time of glucose in
    1/100 min, sensitivity).
    """
    sugar, action, insulin, time = x.unbind(-1)
    meal = 6.0 * torch.exp(-0.5 * (((time % 3.0) - 0.5) / 0.15) ** 2)
    secreted = 4.0 * torch.nn.functional.softplus(sugar - 5.5)
    return _columns(
        -p[..., 0] * (sugar - 5.0) - action * sugar + 1.5 * meal,
        -2.5 * action + p[..., 1] * insulin,
        secreted - 9.0 * insulin,
        torch.ones_like(time),
    )


def driven_duffing(x: Tensor, p: Tensor) -> Tensor:
    """Duffing's oscillator under a force; x = (position, velocity, phase), θ = (damping, force)."""
    place, velocity, phase = x.unbind(-1)
    force = p[..., 1] * phase.cos()
    return _columns(velocity, place - place**3 - p[..., 0] * velocity + force, torch.full_like(phase, 1.2))


def motor(x: Tensor, p: Tensor) -> Tensor:
    """Current and speed of a motor under a voltage that changes its sign; θ = (motor constant, friction)."""
    current, speed, phase = x.unbind(-1)
    voltage = 3.0 * (3.0 * phase.sin()).tanh()
    torque = p[..., 0] * current - p[..., 1] * speed
    return _columns(2.0 * (voltage - current - p[..., 0] * speed), torque / 0.3, torch.full_like(phase, 0.7))


def calcium(x: Tensor, p: Tensor) -> Tensor:
    """Li and Rinzel's calcium in a cell; x = (log concentration, open share of channels), θ = (IP₃, pump rate)."""
    c, open_share, ip3 = x[..., 0].exp(), x[..., 1], p[..., 0]
    opened = ip3 / (ip3 + 0.13) * c / (c + 0.0823) * open_share
    q = 1.049 * (ip3 + 0.13) / (ip3 + 0.9434)
    flux = (6 * opened**3 + 0.11) * (2 - 1.185 * c) - p[..., 1] * c**2 / (c**2 + 0.01)
    return _columns(flux / c, 0.2 * (q - (q + c) * open_share))


def battery_current(phase: Tensor) -> Tensor:
    return 0.5 + 0.8 * phase.sin() + 0.4 * (4.0 * (2.3 * phase).sin()).tanh()


def battery(x: Tensor, p: Tensor) -> Tensor:
    """Charge and polarisation of a battery; θ = (rate at which polarisation vanishes, rate at which it is built)."""
    polarised, phase = x[..., 1], x[..., 2]
    current = battery_current(phase)
    return _columns(-current / 120, p[..., 1] * current - p[..., 0] * polarised, torch.full_like(phase, 0.5))


def battery_voltage(x: Tensor) -> Tensor:
    charge, polarised, phase = x.unbind(-1)
    at_rest = 3.3 + 0.5 * charge + 0.3 * (1 - (-10 * charge).exp())
    return (at_rest - polarised - 0.05 * battery_current(phase))[..., None]


def cortex(x: Tensor, p: Tensor) -> Tensor:
    """Three populations of neurons of Jansen and Rit, potentials and their velocities, in units of 10 ms.

    θ = (gain of excitation, drive).
    """
    a, b, c, da, db, dc = x.unbind(-1)

    def fired(potential: Tensor) -> Tensor:
        return 0.05 * torch.sigmoid(0.56 * (potential - 6))

    gain, drive = p[..., 0], p[..., 1]
    return _columns(
        da,
        db,
        dc,
        gain * fired(b - c) - 2 * da - a,
        gain * (drive + 108 * fired(135 * a)) - 2 * db - b,
        371.25 * fired(33.75 * a) - dc - 0.25 * c,
    )


def synapses(x: Tensor, p: Tensor) -> Tensor:
    """Firing rate of a network in Hz, and how full and how ready its synapses are, in units of 100 ms.

    Firing empties synapses and makes them readier (Tsodyks and Markram); θ = (strength of the synapses, drive).
    """
    rate, full, ready = x.unbind(-1)
    drive = torch.nn.functional.softplus((p[..., 0] * ready * full * rate + p[..., 1]) / 1.5)
    return _columns(
        (1.5 * drive - rate) / 0.13,
        (1 - full) / 2.0 - 0.1 * ready * full * rate,
        (0.3 - ready) / 15.0 + 0.03 * (1 - ready) * rate,
    )


def tumour(x: Tensor, p: Tensor) -> Tensor:
    """Logs of immune cells and of the cells of a tumour that calls and wears them out (Kuznetsov and others).

    θ = (growth rate of the tumour, largest rate at which immune cells are called).
    """
    immune, cells = x[..., 0].exp(), x[..., 1].exp()
    called = 0.118 / immune + p[..., 1] * cells / (20.2 + cells)
    return _columns(called - 0.0031 * cells - 0.374, p[..., 0] * (1 - 0.002 * cells) - immune)


def ship(x: Tensor, p: Tensor) -> Tensor:
    """A ship that rolls in irregular waves; x = (angle, its velocity, push of the waves, its velocity).

    The water rights it the less the more it leans; θ = (friction, which is quadratic, and stiffness).
    """
    angle, velocity, push, change = x.unbind(-1)
    righting = p[..., 1] * angle * (1 - angle**2 + 0.35 * angle**4)
    rub = 0.05 * velocity + p[..., 0] * velocity * velocity.abs()
    return _columns(velocity, push - righting - rub, change, -0.64 * push - 0.16 * change)


def laser(x: Tensor, p: Tensor) -> Tensor:
    """Log intensity, gain and absorption of a laser whose absorber bleaches, so that it pulses (Yamada).

    θ = (pump, absorption in the dark).
    """
    light, gain, absorbed = x[..., 0].exp(), x[..., 1], x[..., 2]
    return _columns(
        gain - absorbed - 1 + 0.01 / light,
        0.1 * (p[..., 0] - gain - gain * light),
        0.1 * (p[..., 1] - absorbed - 1.8 * absorbed * light),
    )


def magnet(x: Tensor, p: Tensor) -> Tensor:
    """A ball that a magnet keeps in the air; x = (gap, velocity, current, phase), θ = (strength, resistance).

    The voltage follows the gap and the velocity, towards a gap that is to swing with the phase.
    """
    gap, velocity, current, phase = x.unbind(-1)
    pull = p[..., 0] * (current / gap.clamp_min(0.2)) ** 2
    wanted = 1.0 + 0.2 * phase.sin()
    voltage = 1.0 + 4.0 * (gap - wanted) + 4.0 * velocity
    return _columns(velocity, 1.0 - pull, 3.0 * (voltage - p[..., 1] * current), torch.full_like(phase, 0.6))


def range_and_bearing(x: Tensor) -> Tensor:
    """Distance and direction of a target from a station at (−20, −20)."""
    u, v = x[..., 0] + 20.0, x[..., 1] + 20.0
    return _columns((u**2 + v**2).sqrt(), torch.atan2(v, u))


def seen(*places: int) -> Observe:
    """Some elements of the state."""
    chosen = list(places)
    return lambda x: x[..., chosen]
