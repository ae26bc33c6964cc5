"""Mutated model files: which of them raise errors without a name, or take longer than a second."""

import random
import time

import yaml

import pcnet as pc
from pcnet.errors import PcnetError
from pcnet.graphs import adaptive_filter, odem
from pcnet.io.strict_yaml import parse
from pcnet.model.specification import from_spec, to_spec

PIECES = [
    *("[]", "{}", "3", "-1", "null", "1e999", "9" * 400, "'x'", "[[1],[2,3]]", "true", "*a", "&a b", "1000000000"),
    *("!!python/object:os.system x", "0", "nan", "2020-01-01", "{a: b}", "\0", "~", "[1,2]", "- "),
]


def _mutated(text, chance):
    lines = text.split("\n")
    for _ in range(chance.randint(1, 3)):
        place, way = chance.randrange(len(lines)), chance.randrange(4)
        if way == 0 and ":" in lines[place]:
            lines[place] = f"{lines[place].split(':')[0]}: {chance.choice(PIECES)}"
        elif way == 1:
            lines[place] = lines[chance.randrange(len(lines))]
        elif way == 2 and lines[place]:
            at = chance.randrange(len(lines[place]))
            lines[place] = lines[place][:at] + chr(chance.randrange(1, 3000)) + lines[place][at + 1 :]
        elif len(lines) > 1:
            del lines[place]
    return "\n".join(lines)


def mutated_specifications(count, seed=0):
    """The number of mutated specifications, of so many, that fail without a name or take longer than a second."""
    chance, failures = random.Random(seed), 0
    known = {"parameter_mean": [0.3, -0.2, 0.3], "parameter_sd": 0.25}
    models = [odem(orders=2), adaptive_filter(pc.systems.lotka_volterra, 3, 0.01, **known)]
    texts = [yaml.safe_dump(to_spec(model)) for model in models]
    for _ in range(count):
        text, started = _mutated(chance.choice(texts), chance), time.perf_counter()
        try:
            from_spec(parse(text))
        except PcnetError:
            pass
        except Exception:
            failures += 1
        failures += time.perf_counter() - started > 1
    return failures
