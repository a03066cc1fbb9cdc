"""Random settings of every dialect, valid and not."""

from __future__ import annotations

import math
import random
import typing
from dataclasses import fields
from functools import cache
from typing import Any

from kit.dialects import DIALECTS, dialect
from kit.dialects.pyrado import PyradoGAE

NASTY = [None, True, False, "", "4", "many", [], {}, (1,), object(), -1, 0, 0.5, 1e6, 2.0]
NASTY += [math.nan, math.inf, -math.inf, 10**12, 10**19, 10**400, 1e300, -1e-300, 5e-324]
FLOATS = [0.0, 0.1, 0.3, 1 / 3, 0.5, 1.0, 1.5, 2.5, 0.0625, 20.0]


def sensible(name: str, hint: Any, draw: random.Random) -> Any:
    """A value that could be meant, for a field by its name and type."""
    if name == "train_freq":
        return draw.choice([None, 1, 4, (2, "episode"), [3, "step"]])
    if name == "precision":
        return draw.choice([None, "32-true"])
    if name == "sampler":
        return draw.choice([None, "random", "without_replacement"])
    if name == "critic":
        return draw.choice([PyradoGAE(), PyradoGAE(num_epoch=3, batch_size=16), {"num_epoch": 2}])
    options = [o for o in typing.get_args(hint) if o is not type(None)] or [hint]
    if None.__class__ in typing.get_args(hint) and draw.random() < 0.3:
        return None
    if bool in options:
        return draw.random() < 0.5
    if float in options:
        return draw.choice(FLOATS)
    if int in options:
        return draw.choice([1, 2, 3, 4, 5, 7, 8, 10, 16, 20, 32, 50, 64, 100, 128, 500, 1000])
    return None


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def random_settings(name: str, draw: random.Random, nasty: float) -> dict[str, Any]:
    """Some settings of a dialect; each is a nasty value with probability ``nasty``."""
    cls = dialect(name)
    hints = _hints(cls)
    chosen = [f.name for f in fields(cls) if draw.random() < 0.5]
    settings = {}
    for field in chosen:
        if field == "version":
            settings[field] = draw.choice([*cls.VERSIONS])
        elif field == "algo":
            settings[field] = draw.choice([*cls.ALGORITHMS, "on_policy", "off_policy", None])
        else:
            settings[field] = sensible(field, hints[field], draw)
        if draw.random() < nasty:
            settings[field] = draw.choice(NASTY)
    return settings


EVERY_DIALECT = sorted(DIALECTS)
VERSIONS = {name: [*dialect(name).VERSIONS] for name in EVERY_DIALECT}
