"""Mutations: small sensible faults in the kit and its recipes, each of which a test has to catch.

Run it (hours for all; not in CI)::

    python -m benchmarks.mutations              # all
    python -m benchmarks.mutations 0 5 17       # some, by number

Each is applied to a temporary copy of the repository, in which the tests that should catch it run
until one fails. A mutation that lives is a hole in the tests; the exit code is their number.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """One fault."""

    file: str
    """where it is"""
    before: str
    """text that is there once"""
    after: str
    """text in its place"""
    tests: str
    """files of tests, separated by blanks"""


def _of(file: str, tests: str, *pairs: tuple[str, str]) -> list[Mutation]:
    return [Mutation(file, before, after, tests) for before, after in pairs]


MUTATIONS = [
    *_of(
        "kit/trainer/checkpoint.py", "tests/test_checkpoint.py",
        ("zlib.crc32(block[:count], checksum)", "zlib.crc32(block[:count])"),
        ("if not lines or _sealed(lines) != text:", "if not lines:"),
        ("if entry.is_symlink() or not", "if not"),
        ("in sums or name == _SUMS)", "in sums or True)"),
        ("weights_only=True", "weights_only=False"),
        ("for path in reversed(_all_in(folder)):", "for path in _all_in(folder):"),
        ("if other <= path][-self.keep :]", "][-self.keep :]"),
        ("self.keep = Path(folder), keep", "self.keep = Path(folder), keep + 1"),
        ("if _memory(value) not in trained", "if _memory(value) in trained"),
    ),
    *_of(
        "kit/trainer/process.py", "tests/test_several_trainers.py tests/test_checkpoint.py",
        ("            self._state = GlobalRNGState().state_dict()\n", ""),
        ("            GlobalRNGState().load_state_dict(self._outside)\n", ""),
        ("        if self._depth == 1:", "        if True:"),
        ('torch.set_num_threads(self._outside["threads"])', "pass"),
    ),
    *_of(
        "kit/envs/state.py", "tests/envs/test_state.py",
        ('length = {"maxlen": value.maxlen}', 'length = {"maxlen": None}'),
        ('maxlen=value["maxlen"]', "maxlen=None"),
        ("            return {\"same\": self._numbers[id(value)]}", "            pass"),
        ("made.bit_generator.state = state", "pass"),
        ("**seeds) if seeds else 0", "0) if seeds else 0"),
        ("part._np_random = self(saved)", "pass"),
        ("cell.cell_contents = self(saved, before[1])", "pass"),
        ("not in _BIT_GENERATORS", "in ()"),
        ("made = object.__new__(type(present))", "made = present"),
    ),
    *_of(
        "kit/envs/mujoco_state.py", "tests/envs/test_state.py",
        ('_write(_derived(present), saved["derived"], decode)', "pass"),
        ('decode(saved["model"], present.model)', "pass"),
        ("setattr(present.opt, name, value)", "pass"),
    ),
    *_of(
        "kit/cli/trust.py", "tests/test_security.py",
        ("        and not _is_brought(file, folder)\n        for", "        for"),
        ("not _INSTALLED.intersection(file.relative_to(root).parts)", "True"),
        ("if package in {*trust, *_OWN}:", "if True:"),
        ("{*trust, *_OWN, *_environments()}", "{*_OWN, *_environments()}"),
    ),
    *_of(
        "kit/logging/files.py", "tests/test_checkpoint.py",
        ("            os.truncate(path, size)", "            pass"),
        ("        temporary.unlink(missing_ok=True)\n", ""),
    ),
    *_of(
        "kit/steps/ledger.py", "tests/steps/test_step_ledger.py tests/test_trainer.py",
        ("self.local_policy_steps += policy_steps", "self.local_policy_steps += policy_steps + 1"),
        ("self.local_gradient_steps += gradient_steps", "self.local_gradient_steps += 2"),
    ),
    *_of(
        "kit/trainer/trainer.py", "tests/test_trainer.py tests/test_stages.py",
        ("            due -= made\n", "            due -= 1\n"),
        ("batch = torch.cat([self._prefill, batch], dim=-1)", "pass"),
        ("self._drawn += len(minibatches)", "self._drawn += 0"),
        ("            self.update.advance(self.policy_steps)", "            pass"),
        ("            self.ledger.skipped(unseen, due)", "            pass"),
        ("        self.ledger.verify(self.plan)\n", ""),
        ("        if due.row:", "        if not due.row:"),
        ('        self.stages.fire("post_epoch")\n', ""),
    ),
    *_of(
        "kit/envs/single_env.py", "tests/envs/test_action_repeat.py tests/envs/test_make_env.py",
        ("            total += float(reward)", "            total = float(reward)"),
        ("            if terminated or truncated:\n                break\n", ""),
        ('        info["env_steps"] = made', '        info["env_steps"] = self.repeat'),
    ),
    *_of(
        "kit/envs/backends/serial.py", "tests/envs/test_vector_env.py tests/envs/test_workers.py",
        ("            result.next_observation[key][...] = array\n", "            pass\n"),
        ("        result.truncated[number] = True", "        result.terminated[number] = True"),
        ("            result.env_steps[~active] = 0\n", ""),
    ),
    *_of(
        "kit/collectors/base.py", "tests/collectors/test_vector.py tests/hooks/test_evaluation.py",
        ("        self._state = torch.get_rng_state()\n", ""),
        ("        torch.set_rng_state(self._outside)\n", ""),
    ),
    *_of(
        "kit/hooks/evaluation.py", "tests/hooks/test_evaluation.py",
        ("self._left[: episodes % num_envs] += 1", "pass"),
        ("            if self._left[episode.env]:", "            if True:"),
        ("    policy.eval()\n", ""),
        ("        policy.train(training)", "        pass"),
        ("self.env = env.eval()", "self.env = env"),
    ),
    *_of(
        "kit/buffers/batches.py", "tests/buffers/test_batches.py tests/test_checkpoint.py",
        ("        truncated |= ~done", "        truncated |= done"),
        ("    done.fill_(True)", "    pass"),
        ('self._order = state_dict["order"].clone()', "pass"),
    ),
    *_of(
        "kit/trainer/stages.py", "tests/test_stages.py",
        ("    if result is None:\n        return before\n", ""),
        ('        self._began |= stage == "setup"\n', ""),
    ),
    *_of(
        "recipes/sac.py", "tests/test_every_setting.py",
        ("tau=cfg.tau", "tau=0.005"),
        ('"num_qvalue_nets": cfg.num_critics', '"num_qvalue_nets": 2'),
        ('"alpha_init": initial,', '"alpha_init": 1.0,'),
        ("lr=cfg.learning_rate", "lr=1e-3"),
        ("gamma=cfg.gamma", "gamma=0.99"),
        ("max_grad_norm=cfg.max_grad_norm", "max_grad_norm=None"),
    ),
    *_of(
        "recipes/ppo.py", "tests/test_every_setting.py",
        ("entropy_coeff=cfg.entropy_coeff", "entropy_coeff=0.0"),
        ("critic_coeff=cfg.critic_coeff", "critic_coeff=0.5"),
        ("clip_epsilon=cfg.clip_epsilon", "clip_epsilon=0.2"),
        ("critic], cfg.learning_rate,", "critic], 1e-3,"),
        ("max_grad_norm=cfg.max_grad_norm", "max_grad_norm=0.5"),
    ),
]  # fmt: skip


def lives(mutation: Mutation, folder: Path) -> bool:
    """Whether the tests pass with the mutation.

    Raises:
        ValueError: if its text is not there exactly once.
    """
    file = folder / mutation.file
    whole = file.read_text()
    if whole.count(mutation.before) != 1:
        raise ValueError(f"{mutation.file} has not once: {mutation.before!r}")
    file.write_text(whole.replace(mutation.before, mutation.after))
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", "-m",
               "not slow and not gpu", *mutation.tests.split()]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(
            command, cwd=folder, env=environment, check=False, capture_output=True, timeout=900
        )
        return ran.returncode == 0
    except subprocess.TimeoutExpired:
        return False  # noticed: a run that does not end
    finally:
        file.write_text(whole)


def main() -> None:
    """Try the mutations and say which live."""
    chosen = [int(number) for number in sys.argv[1:]] or range(len(MUTATIONS))
    alive = 0
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        left_out = shutil.ignore_patterns(".*", "runs", "results", "*.egg-info")
        shutil.copytree(HERE, copy, ignore=left_out)
        for number in chosen:
            mutation = MUTATIONS[number]
            try:
                said = "LIVES" if lives(mutation, copy) else "caught"
            except ValueError as error:
                said = f"stale: {error}"
            alive += said == "LIVES"
            print(f"{number:3} {said:6} {mutation.file}: {mutation.before.strip()!r}", flush=True)
    print(f"{alive} of {len(chosen)} live")
    sys.exit(min(alive, 100))


if __name__ == "__main__":
    main()
