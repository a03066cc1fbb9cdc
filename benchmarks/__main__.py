"""All benchmarks, or those that are named, one after the other.

Each writes a table to ``benchmarks/results``::

    python -m benchmarks
    python -m benchmarks ppo collection
"""

from __future__ import annotations

from benchmarks import collection, imports, learning, ppo, tensor_envs, workers

if __name__ == "__main__":
    for benchmark in (
        imports.main,
        collection.main,
        tensor_envs.main,
        workers.main,
        ppo.main,
        learning.report,
    ):
        print(f"{benchmark.__module__} ...", flush=True)
        benchmark()
