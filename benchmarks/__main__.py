"""All benchmarks, or those that are named, one after the other.

Each writes a table to ``benchmarks/results``.
"""

from __future__ import annotations

import argparse

from benchmarks import (
    collection,
    gradient_steps,
    learning,
    off_policy,
    scale,
    tensor_envs,
    world_models,
)

BENCHMARKS = {
    "collection": collection.main,
    "off_policy": off_policy.main,
    "gradient_steps": gradient_steps.main,
    "world_models": world_models.main,
    "tensor_envs": tensor_envs.main,
    "scale": scale.main,
    "learning": learning.report,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; all by default")
    for name in parser.parse_args().names or BENCHMARKS:
        print(f"{name} ...", flush=True)
        BENCHMARKS[name]()
