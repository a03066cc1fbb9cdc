"""Records of runs of real libraries, and what the dialects say about them.

A case is one record: ``system``, ``version``, ``algo``, ``params`` (settings by the library's
names), ``observed`` (figures by name), and sometimes ``how`` and ``nondeterministic``.
"""

from __future__ import annotations

import importlib

from kit.steps.errors import SettingError, whole_number
from kit.testing import Expectation, check_observed

SYSTEMS = {
    "sheeprl": "sheeprl",
    "tianshou": "tianshou",
    "pyrado": "pyrado",
    "nip": "nip",
    "stable-baselines3": "sb3",
    "torchrl": "torchrl",
    "dreamerv3": "dreamer",
}
CUT = {"minibatch_sizes_per_iteration": 4, "memory_sample_batch_and_len": 10}


def check_case(case):
    """Compare a record with the dialect of its library."""
    varying = [text.split(":")[0].split()[0] for text in case.get("nondeterministic") or ()]
    return check_observed(expectation(case), case["observed"], varying=varying, cut=CUT)


def expectation(case):
    """What the dialect says; settings that say nothing are refused as a dialect refuses its own."""
    module = importlib.import_module(f"{__name__}.{SYSTEMS[case['system'].lower().split()[0]]}")
    params = dict(case["params"])
    try:
        for name in ("episode_length", "terminate_at", "env_max_steps"):
            if params.get(name) is not None:
                params[name] = whole_number(name, params[name], 1)
        return module.expect({**case, "params": params})
    except SettingError as error:
        return Expectation(refusal=str(error))
