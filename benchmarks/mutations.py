"""Mutations: small sensible faults in the kit and its recipes, each of which a test has to catch.

Run it (hours for all; not in CI)::

    python -m benchmarks.mutations              # all
    python -m benchmarks.mutations 0 5 17       # some, by number

Each is applied to a temporary copy of the repository, in which the tests that should catch it run
until one fails. A mutation that lives is a hole in the tests; the exit code is their number. The
table, ``benchmarks/results/mutations.md``, keeps what was found in earlier runs of others.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.measure import RESULTS, machine, markdown_table, write_results

HERE = Path(__file__).parents[1]
LIVES = "LIVES"
_SECONDS = 400
_LARGE = (
    "torch", "torchrl.collectors", "torchrl.objectives", "torchrl.trainers", "torchrl.data",
    "torchrl.envs", "torchrl.modules", "torchrl.checkpoint", "torchrl.record", "gymnasium",
    "matplotlib.pyplot", "hydra.main", "hypothesis",
)  # fmt: skip
"""Modules that most tests import, but none of the kit's."""


class Mutation(NamedTuple):
    """One fault."""

    file: str
    """where it is"""
    before: str
    """text that is there once"""
    after: str
    """text in its place"""
    tests: str
    """that should catch it: arguments of pytest"""


def _of(file: str, tests: str, *pairs: tuple[str, str]) -> list[Mutation]:
    return [Mutation(file, before, after, tests) for before, after in pairs]


def _passed_on(recipe: str, *settings: tuple[str, str, str]) -> list[Mutation]:
    """Settings of a recipe that are not passed on: name, text, text in its place."""
    test = "tests/test_every_setting.py::test_a_setting_changes_what_it_should"
    return [
        Mutation(f"recipes/{recipe}.py", before, after, f"'{test}[{recipe}-{name}]' -m 'not gpu'")
        for name, before, after in settings
    ]


MUTATIONS = [
    *_of(
        "kit/trainer/checkpoint.py", "tests/test_checkpoint.py",
        ("zlib.crc32(block[:count], checksum)", "zlib.crc32(block[:count])"),
        ("if not lines or _sealed(lines) != text:", "if not lines:"),
        ("if entry.is_symlink() or not", "if not"),
        ("in sums or name == _SUMS)", "in sums or True)"),
        ("for path in reversed(saved_in(folder)):", "for path in saved_in(folder):"),
        ("if other <= path][-self.keep :]", "][-self.keep :]"),
        ("self.keep = Path(folder), keep", "self.keep = Path(folder), keep + 1"),
    ),
    *_of(
        "kit/trainer/checks.py", "tests/test_trainer.py",
        ("(after := size_of(batch)) != before", "(after := size_of(batch)) > before"),
        ("torch.isin(told, drawn) | (told < 0)", "torch.isin(told, drawn) | (told < 1)"),
    ),
    *_of(
        "kit/trainer/checks_of_collection.py", "tests/test_trainer.py",
        ("if isinstance(buffer.buffer, ReplayBufferEnsemble):", "if False:"),
    ),
    *_of(
        "kit/trainer/checks_of_collection.py", "tests/test_checkpoint.py",
        ('saved_in(folder / "checkpoints"):', "False:"),
    ),
    *_of(
        "kit/envs/vector_env.py", "tests/collectors/test_stepped_by_others.py",
        ("observation = {**self._now.observation}", "observation = self._now.observation"),
    ),
    *_of(
        "kit/modules/world/model.py", "tests/world/test_world_model.py",
        ("-(seen * made.log_softmax(-1)).sum(-1) if choice else", ""),
        ("value if choices else self._scaled(value.float())", "self._scaled(value.float())"),
    ),
    *_of(
        "kit/experiment.py", "tests/test_off_policy_recipes.py",
        ("(2 if self._squares else 1)", "1"),
        ("if self._sampler is not None and self._sampler.beta:", "if False:"),
    ),
    *_of(
        "kit/update/update.py", "tests/test_trainer.py",
        ("            self._target_period.last = 0\n", "            pass\n"),
    ),
    *_of(
        "kit/dialects/sb3.py", "tests/test_dialects_in_runs.py tests/dialects",
        ("return int(min(value, steps))", "return int(value)"),
    ),
    *_of(
        "kit/trainer/resumable.py", "tests/test_checkpoint.py",
        ("            self._say_what_hooks_lose()\n", ""),
    ),
    *_of(
        "kit/update/trust_region.py", "tests/test_trust_region.py",
        ("for both in parts]).sum()", "for both in parts]).mean()"),
    ),
    *_of(
        "kit/trainer/pieces.py", "tests/test_checkpoint.py",
        ("weights_only=True, map_location", "weights_only=False, map_location"),
        ("_refuse_unreadable(written := _encoded(state), self._name)", "written = _encoded(state)"),
    ),
    *_of(
        "kit/trainer/pieces.py", "tests/test_evaluate.py",
        ("return storage if missing else None", "return None"),
    ),
    *_of(
        "kit/buffers/datasets.py", "tests/test_on_a_device.py",
        ('LazyTensorStorage(count, device="auto", compilable=True)',
         "LazyTensorStorage(count, compilable=True)"),
    ),
    *_of(
        "kit/cli/record.py", "tests/test_offline_recipes.py",
        ("self.normalizer.apply(self.statistics, seen)", "seen"),
    ),
    *_of(
        "kit/trainer/checkpoint.py",
        "tests/test_exploration_resume.py",
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
        "kit/envs/plain_values.py", "tests/envs/test_state.py",
        ('length = {"maxlen": value.maxlen}', 'length = {"maxlen": None}'),
        ('maxlen=value["maxlen"]', "maxlen=None"),
        ("            return {\"same\": self._numbers[id(value)]}", "            pass"),
        ("made.bit_generator.state = state", "pass"),
        ("**seeds) if seeds else 0", "0) if seeds else 0"),
        ("part._np_random = self(saved)", "pass"),
        ("cell.cell_contents = self._in_place_of(before[1], saved)", "pass"),
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
        ("return below and not _came_with(run, found, *project)", "return below"),
        ("not _INSTALLED.intersection(file.relative_to(root).parts)", "True"),
        ("trusted = _is_trusted(source, folder, trust)", "trusted = True"),
        ("in {*_OWN, *_environments()}", "in _OWN"),
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
        ("batch = torch.cat([self._prefill, batch], dim=-1)", "pass"),
        ("            self.update.advance(self.policy_steps)", "            pass"),
        ("        self.ledger.verify(self.plan)\n", ""),
        ("        if due.row:", "        if not due.row:"),
    ),
    *_of(
        "kit/trainer/update_phase.py", "tests/test_trainer.py tests/test_stages.py",
        ("            due -= made\n", "            due -= 1\n"),
        ("self._drawn += len(minibatches)", "self._drawn += 0"),
        ("            trainer.ledger.skipped(unseen, due)", "            pass"),
        ('            trainer.stages.fire("post_epoch")\n', ""),
        ("made * (trainer.plan.update_epochs or 1) / due if at_once else 1", "1"),
    ),
    *_of(
        "kit/envs/single_env.py", "tests/envs/test_action_repeat.py tests/envs/test_make_env.py",
        ("            total += float(reward)", "            total = float(reward)"),
        ("if terminated or truncated or not self._is_allowed", "if not self._is_allowed"),
        (" or not self._is_allowed(action, observation)", ""),
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
        "kit/hooks/evaluation.py", "tests/hooks/test_evaluation.py tests/test_evaluate.py",
        ("self._left[: episodes % self.num_envs] += 1", "pass"),
        ("result.terminated | result.truncated", "result.terminated"),
        ("self.env = env.eval()", "self.env = env"),
    ),
    *_of(
        "kit/modules/layers.py", "tests/hooks/test_evaluation.py tests/test_evaluate.py",
        ("    network.train(mode)\n", ""),
        ("            part.training = training", "            pass"),
    ),
    *_of(
        "kit/buffers/batches.py", "tests/buffers/test_batches.py tests/test_checkpoint.py",
        ('self._order = state_dict["order"].clone()', "pass"),
    ),
    *_of(
        "kit/buffers/n_step.py", "tests/buffers/test_batches.py tests/test_checkpoint.py",
        ("        truncated |= ~done", "        truncated |= done"),
        ("    done.fill_(True)", "    pass"),
        ("            going = going & ~done[later]\n", ""),
        ("self.gamma**step * reward", "reward"),
    ),
    *_of(
        "kit/buffers/direct.py", "tests/buffers/test_direct.py",
        ("        self._tell(start, end)\n", ""),
        ("fitting = 1 if self._prioritized else", "fitting ="),
    ),
    *_of(
        "kit/trainer/stages.py", "tests/test_stages.py",
        ("    if result is None:\n        return before\n", ""),
        ('        self._began |= stage == "setup"\n', ""),
    ),
    *_passed_on(
        "sac",
        ("tau", "tau=cfg.tau", "tau=0.005"),
        ("num_critics", '"num_qvalue_nets": cfg.num_critics', '"num_qvalue_nets": 2'),
        ("initial_alpha", '"alpha_init": cfg.initial_alpha,', '"alpha_init": 1.0,'),
        ("fixed_alpha", '"fixed_alpha": cfg.fixed_alpha', '"fixed_alpha": False'),
        ("target_entropy", "    target = cfg.target_entropy", "    target = None"),
        ("learning_rate", "lr=cfg.learning_rate", "lr=1e-3"),
        ("max_grad_norm", "max_grad_norm=cfg.max_grad_norm", "max_grad_norm=None"),
    ),
    *_passed_on(
        "ppo",
        ("entropy_coeff", "entropy_coeff=cfg.entropy_coeff", "entropy_coeff=0.0"),
        ("critic_coeff", "critic_coeff=cfg.joint_critic_coeff or 0.0", "critic_coeff=0.5"),
        ("clip_epsilon", "clip_epsilon=cfg.clip_epsilon", "clip_epsilon=0.2"),
        ("learning_rate", "critic], cfg.learning_rate,", "critic], 1e-3,"),
        ("max_grad_norm", "max_grad_norm=cfg.max_grad_norm", "max_grad_norm=0.5"),
        ("target_kl", "TargetKL(cfg.target_kl)", "TargetKL(None)"),
    ),
    *_passed_on(
        "dqn",
        ("double_dqn", '"double_dqn": cfg.double_dqn', '"double_dqn": True'),
        ("epsilon_start", "start, end = cfg.epsilon_start,", "start, end = 1.0,"),
        ("epsilon_end", "min(cfg.epsilon_start, cfg.epsilon_end)", "0.04"),
        ("target_update_every", "    every = cfg.target_update_every", "    every = 1"),
        ("anneal", "optimizer, cfg.anneal", 'optimizer, "linear"'),
    ),
    *_passed_on(
        "td3",
        ("policy_noise", "policy_noise=cfg.policy_noise", "policy_noise=0.2"),
        ("noise_clip", "noise_clip=cfg.noise_clip", "noise_clip=0.5"),
        ("exploration_noise", "float(cfg.exploration_noise)", "0.1"),
    ),
    *_passed_on(
        "a2c",
        ("n_step", "n_step=cfg.n_step, ", ""),
        ("optimizer", 'cfg.optimizer == "adam"', "True"),
    ),
    *_of(
        "recipes/reinforce.py",
        "tests/test_on_policy_recipes.py -k reinforce",
        ("    if cfg.baseline:", "    if True:"),
    ),
    *_passed_on("ppo_recurrent", ("burn_in", "burn_in=cfg.burn_in)", "burn_in=0)")),
    *_of(
        "recipes/rainbow.py",
        "tests/test_off_policy_recipes.py -k rainbow",
        ('"noisy": cfg.noisy', '"noisy": True'),
    ),
    *_of(
        "recipes/td3.py",
        "tests/test_off_policy_recipes.py -k td3",
        ('every={"loss_actor": cfg.policy_delay},', 'every={"loss_actor": 2},'),
        ("target_update_every=cfg.policy_delay", "target_update_every=1"),
    ),
    *_passed_on("dreamerv3", ("tau", "tau=cfg.tau", "tau=0.02")),
    *_passed_on("iql", ("expectile", "expectile=cfg.expectile", "expectile=0.7")),
    *_of(
        "kit/cli/lock.py", "tests/test_run_folder.py",
        ('holder.get("host") != this["host"]', "False"),
        ('_started(int(holder["pid"])) == holder["started"]', "True"),
        ("                self.path.unlink(missing_ok=True)\n", "                pass\n"),
        ("before is not None and not before.begun", "False"),
    ),
    *_of(
        "kit/cli/signals.py", "tests/test_signals.py",
        ("            raise SystemExit(128 + self.number)", "            raise SystemExit(1)"),
        ("            self.trainer.request_checkpoint()", "            pass"),
        ("                signal.signal(again, signal.SIG_DFL)", "                pass"),
        ("_PATIENCE = 1.5", "_PATIENCE = 1_000.0"),
        ("if not Signals.ending:", "if True:"),
    ),
    *_of(
        "kit/cli/run_folder.py", "tests/test_run_folder.py tests/test_signals.py",
        ('Checkpoints.tidy(self.folder / "checkpoints", self.checkpoint)', "pass"),
        ("            raise NotSaved(f\"{what}, while", "            print(f\"{what}, while"),
    ),
    *_of(
        "kit/cli/saved_runs.py", "tests/test_run_folder.py tests/test_signals.py",
        ('    "env.step_timeout", "save_policy",\n', ""),
    ),
    *_of(
        "kit/cli/saved_runs.py", "tests/test_compare.py",
        ("            below.clear()", "            pass"),
        ('FREE_TO_DIFFER - {"recipe"}', "FREE_TO_DIFFER"),
        ("found = [near if near.is_dir() else far", "found = [far"),
    ),
    *_of(
        "kit/cli/comparison.py", "tests/test_compare.py",
        ("run, other = (before, run) if shorter else (run, before)", "other = before"),
        ("    cut = len(values) // 4", "    cut = 0"),
        ('any(row.get("gradient_steps") and not row.get("policy_steps") for row in ends)', "False"),
        ("        if len(lengths) > 1:", "        if False:"),
        ("names = list(dict.fromkeys([*task, *names]))", "pass"),
    ),
    *_of(
        "kit/cli/compare_plot.py", "tests/test_compare.py",
        ("band = values.min(0), values.max(0)", "band = values.mean(0), values.max(0)"),
        ("any(len(some) < len(steps) for some in own)", "False"),
        ("points[:, points[0] >= steps[-1]]", "points[:, points[0] > steps[-1]]"),
    ),
    *_of(
        "kit/cli/sweep.py", "tests/test_launch.py",
        ('            make_plan(cfg, "")', "            pass"),
        ("        checks.rows_of_normalization(cfg)\n", ""),
    ),
    *_of(
        "kit/trainer/observers.py", "tests/test_observers.py",
        ("_version(value) != version or ", ""),
        ("and _is_kept(given, key)", ""),
        ("        function = function.func", "        break"),
    ),
    *_of(
        "kit/logging/loggers.py", "tests/test_loggers.py",
        ("            file.refuse_earlier_rows()", "            pass"),
        ("() if self.continues else ", ""),
    ),
    *_of(
        "kit/logging/csv_file.py", "tests/test_run_folder.py tests/test_loggers.py",
        ("<= self._last][: self.rows]", "<= self._last]"),
        ("            self._rewrite(self._rows_left())", "            self._rewrite(self._read())"),
        ("        if new or changed:", "        if new:"),
    ),
    *_of(
        "kit/hooks/video.py", "tests/hooks/test_video.py",
        ("self._due(steps) or trainer.schedule.done", "self._due(steps)"),
        ("[*own, recorded]", "[recorded]"),
        ("        return self._due.state_dict()", '        return {"last": 0}'),
    ),
    *_of(
        "kit/trainer/checkpoint.py", "tests/test_checkpoint.py",
        ("        if not name.startswith(_HOOK):", "        if False:"),
    ),
    *_of(
        "kit/collectors/policy.py", "tests/collectors/test_recurrence.py",
        ("self._known or self._restored else", "self._known else"),
    ),
    *_of(
        "kit/collectors/policy.py", "tests/collectors/test_policy.py",
        ("if before.get(k, one) != one]", "if False]"),
    ),
    *_of(
        "kit/update/update.py", "tests/test_update.py",
        ("        if owned != self._owned:", "        if False:"),
    ),
    *_of(
        "kit/losses/klpen.py", "tests/test_on_policy_recipes.py",
        ("_Unreachable(), beta.clone()", "target, beta.clone()"),
    ),
    *_of(
        "kit/losses/redq.py", "tests/test_off_policy_recipes.py",
        ("rows.get(key).sqrt()", "rows.get(key)"),
        ('            how["weights"] = weights.expand_as(loss)', "            pass"),
    ),
    *_of(
        "kit/modules/exploration.py", "tests/test_off_policy_recipes.py",
        ("self.std = torch.as_tensor(std, device=self.mean.device)", "pass"),
        ("return first if bool((half == first).all()) else half", "return first"),
    ),
    *_of(
        "recipes/td3.py", "tests/test_off_policy_recipes.py",
        ("cfg.noise_clip * unit", "cfg.noise_clip"),
    ),
    *_of(
        "kit/trainer/updates.py", "tests/test_trainer.py",
        ("return known and minibatches_are_unseen", "return minibatches_are_unseen"),
    ),
    *_of(
        "kit/envs/spaces.py", "tests/envs/test_spaces.py",
        ("(lost := converted != values).any()", "(lost := converted != converted).any()"),
    ),
    *_of(
        "kit/logging/journal.py", "tests/test_loggers.py",
        ("log_row(dict(row))\n        return", "log_row(row)\n        return"),
    ),
    *_of(
        "kit/envs/spaces.py", "tests/envs/test_spaces.py",
        ("max(chosen) > entry.highest", "max(chosen) > entry.highest + 1"),
        ("min(chosen) < 0", "min(chosen) < -1"),
        ("return 0, space.nvec - 1", "return 0, space.nvec"),
        ("return space.low, space.high", "return None, None"),
    ),
    *_of(
        "kit/hooks/policy.py", "tests/hooks/test_save_policy.py",
        ("if not (trainer.schedule.done or trainer.stop_reason)", "if not trainer.schedule.done"),
        ("if not (trainer.schedule.done or trainer.stop_reason)", "if not trainer.plan"),
    ),
    *_of(
        "kit/trainer/resumable.py", "tests/hooks/test_save_policy.py",
        ("parts = {**self.policy_parts(), **self._best_policies()}", "parts = self.policy_parts()"),
        ("parts = {**self.policy_parts(), **self._best_policies()}", "parts = self._parts()"),
    ),
    *_of(
        "kit/logging/loggers.py", "tests/test_loggers.py",
        ('id or os.environ.get("WANDB_RUN_ID") or', "id or"),
    ),
    *_of(
        "kit/envs/backends/torchrl_layers.py", "tests/envs/test_transforms.py",
        ("    return held * int(below.frame_skip)", "    return held"),
        ("            return held * frame_skip_of(made)", "            return held"),
        ("return present.copy_(saved) if fits else saved.clone()", "return saved.clone()"),
    ),
    *_of(
        "kit/envs/backends/torchrl.py", "tests/envs/test_transforms.py",
        ("for one in running if not one.frozen)", "for one in running if not one)"),
    ),
    *_of(
        "kit/envs/vector_env.py", "tests/envs/test_transforms.py",
        ("self._now.ended = bool(self._now.fresh.any())", "self._now.ended = False"),
    ),
    *_of(
        "kit/trainer/resumable.py", "tests/envs/test_transforms.py",
        (
            "**normalization_of(self.collector, self.evaluate), **self._transforms}",
            "**normalization_of(self.collector, self.evaluate)}",
        ),
    ),
    *_of(
        "kit/update/update.py", "tests/test_interop.py",
        ("            after_loss(sub_batch)", "            pass"),
    ),
    *_of(
        "kit/modules/world/ensemble.py", "tests/world/test_plan2explore.py",
        (".var(0, correction=1)", ".var(0, correction=0)"),
        ("bounded(action)]", "action]"),
    ),
    *_of(
        "kit/fast/watch.py", "tests/test_traced.py",
        ("chain(of_modules, _OF_ALL, *self._hooked)", "chain(of_modules, *self._hooked)"),
        ("chain(of_modules, _OF_ALL, *self._hooked)", "chain(of_modules, _OF_ALL)"),
        (
            'attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")',
            'attrgetter("_backward_hooks", "_backward_hooks")',
        ),
    ),
    *_of(
        "kit/update/groups.py", "tests/test_update.py",
        ("if any(p._post_accumulate_grad_hooks for p in learning):", "if not learning:"),
    ),
    *_of(
        "kit/cli/export.py", "tests/test_export.py",
        ("values = values - torch.as_tensor(leaf.start)", "values = values + 0"),
        ("action = action + torch.as_tensor(leaf.start)", "action = action + 0"),
        ("moments is None else self._normalized(moments, values)", "True else values"),
        ("    _compare(run, policy.outputs, found, chosen)\n", ""),
    ),
    *_of(
        "kit/modules/exploration.py", "tests/test_on_a_device.py",
        ("self._spec.to(next(self.buffers()).device)", "self._spec"),
    ),
    *_of(
        "kit/modules/heads.py", "tests/test_on_a_device.py",
        ("self.keywords.update({name: fn(value) for name", "({name: fn(value) for name"),
    ),
    *_of(
        "kit/experiment.py", "tests/test_on_a_device.py",
        ("            network.to(self.cfg.device)", "            pass"),
        ("            loss.to(cfg.device)", "            pass"),
    ),
    *_of(
        "kit/buffers/replay.py", "tests/buffers/test_observations.py",
        ("device=None if kept == delivered else delivered", "device=None"),
    ),
    *_of(
        "kit/collectors/tensor.py", "tests/collectors/test_tensor.py",
        ("self._choices[1], highest, out=self._choices[1]", "self._choices[1], lowest"),
    ),
    *_of(
        "kit/envs/tensor/base.py", "tests/collectors/test_tensor.py",
        ("(action if moving is None else action[moving])", "action"),
        ("if self.num_actions and action.is_floating_point():", "if False:"),
    ),
    *_of(
        "kit/logging/journal.py", "tests/test_loggers.py",
        ("last_first.enter_context(named_in_errors(logger))", "pass"),
    ),
    *_of(
        "kit/logging/loggers.py", "tests/test_loggers.py",
        ("purge_step=self._next", "purge_step=None"),
    ),
    *_of(
        "kit/envs/spaces.py", "tests/envs",
        ("wrong = given.astype(self.dtype) != given", "pass"),
        ("wrong | (given < 0) | (given > self._highest)", "wrong | (given < 0)"),
    ),
    *_of(
        "kit/fast/functions.py", "tests/test_functions.py tests/test_traced.py",
        ("return not all(map(same, self._now(), self.values))", "return False"),
        ("return [one.__self__, one.__func__]", "return [one.__func__]"),
    ),
    *_of(
        "kit/trainer/checkpoint.py", "tests/test_checkpoint.py",
        ("if not name.startswith(self._left_out)}", "}"),
    ),
    *_of(
        "kit/buffers/numba_tree.py", "tests/buffers/test_priorities.py",
        ("node += np.uint64(is_right) << one", "node += np.uint64(is_right) << two"),
        ("return left + right", "return 2 * left"),
        ("elif nodes[place[row]] == bounds[block]:", "elif nodes[place[row]] < bounds[block]:"),
        (" and highest == highest:", ":"),
    ),
    *_of(
        "kit/buffers/priorities.py", "tests/buffers/test_priorities.py",
        ("with contextlib.suppress(ImportError):  # also", "if True:  # also"),
    ),
    *_of(
        "kit/modules/numpy_samplers.py", "tests/collectors/test_numpy_policy.py",
        ("_24_BITS) / 2**24", "_32_BITS) / 2**32"),
        ("drawn >> 32 & _32_BITS, drawn & _32_BITS", "drawn & _32_BITS, drawn >> 32 & _32_BITS"),
    ),
    *_of(
        "kit/collectors/rollout.py", "tests/collectors/test_vector.py tests/envs/test_info.py",
        ("self._batches.uncounted_steps - buffer.steps", "0"),
        ("infos, self._infos = self._infos, {}", "infos = self._infos"),
        ("        if self._batches.is_full:\n            self._take_in()", ""),
        ("        self._take_in()\n        return super().take_episodes()",
         "        return super().take_episodes()"),
        ("        self._take_in()\n        return self._episodes", "        return self._episodes"),
    ),
    *_of(
        "kit/trainer/updates.py", "tests/test_trainer.py tests/test_stages.py",
        ("(update, buffer, sum(map(len, stages.values())))", "(update, buffer)"),
    ),
    *_of(
        "kit/logging/metrics.py", "tests/test_update.py",
        ("self._counts[names] += len(rows)", "self._counts[names] += 1"),
        ("rows.pop(0)", "rows[0]"),
    ),
    *_of(
        "kit/config/checks.py", "tests/test_offline_recipes.py",
        ("if max(beyond) > 1e-3", "if max(beyond) > 1e3"),
    ),
    *_of(
        "kit/buffers/datasets.py", "tests/test_offline_recipes.py",
        ('rows["action"].clamp(low, high)', 'rows["action"]'),
    ),
    *_of(
        "kit/modules/numpy_policy.py", "tests/test_on_a_device.py -k numpy",
        ("        if part._forward_hooks or part._forward_pre_hooks:", "        if False:"),
        ('if type(part).__module__.split(".")[0] not in _COPIED:', "if False:"),
        ("    if any(map(is_lazy, parameters)):", "    if False:"),
    ),
    *_of(
        "kit/collectors/tensor.py", "tests/collectors/test_tensor.py",
        ('{**step._asdict(), "observation": acted_on}', "step._asdict()"),
    ),
    *_of(
        "kit/buffers/n_step.py", "tests/buffers/test_batches.py",
        ("        _check_tensors(entries)\n        #", "        #"),
    ),
    *_of(
        "kit/cli/run_folder.py", "tests/test_run_folder.py",
        ("self._differing(state_dict)", "''"),
        ("        if given is None or (start and _is_start(given, start)):", "        if True:"),
    ),
    *_of(
        "kit/cli/start_from.py", "tests/test_run_folder.py",
        ("    _check_meaning(cfg, folder)\n", ""),
        ("    _check_normalization(trainer, checkpoint, folder)\n", ""),
    ),
    *_of(
        "kit/cli/launch.py", "tests/test_launch.py tests/test_run_folder.py",
        ("plain = [_with_start(base, plain, one, job.recipe) for one in plain]", "pass"),
    ),
    *_of(
        "kit/envs/normalize.py", "tests/test_run_folder.py",
        ("        self._check_state(state_dict)\n", ""),
        ('if here == there or (kind == "reward" and not here):', "if here == there:"),
    ),
    *_of(
        "kit/envs/episodes.py", "tests/envs/test_vector_env.py",
        (" and np.abs(sums).max() < 2**53", ""),
        (".max() < 2**53", ".max() <= 2**53"),
        ("(np.rint(reward) == reward).all()", "True"),
    ),
    *_of(
        "kit/advantages.py", "tests/test_advantages.py",
        ('_like(reward, tensordict.get(("next", "done")), "done")', "(reward > 0)"),
        ("(estimate.movedim(-1, time) for estimate", "(estimate for estimate"),
        ("    if given.numel() != values.numel():", "    if False:"),
    ),
    *_of(
        "kit/losses/distributional.py", "tests/test_distributional.py",
        ("if (self._support() is not None) != self.of_support:", "if False:"),
    ),
    *_of(
        "kit/config/checks.py", "tests/test_on_policy_recipes.py",
        ("            buffers.update(kept)\n", "            pass\n"),
    ),
    *_of(
        "kit/buffers/datasets.py", "tests/test_offline_recipes.py",
        ("for name in sorted(entries.keys()):", 'for name in ("action",):'),
        ("_check_shapes(folder, episode.id, (observation, action), episodes[0])", "pass"),
    ),
    *_of(
        "kit/logging/loggers.py", "tests/test_loggers.py",
        ("        if earlier:\n", "        if self.continues:\n"),
    ),
    *_of(
        "kit/dialects/sb3.py", "tests/dialects tests/test_dialects_in_runs.py",
        ("lambda value, given: of_each_env(value, given.n_envs)", "lambda value, given: value"),
        ("return None if critic == actor else critic", "return None"),
    ),
    *_of(
        "kit/losses/crossq.py", "tests/modules/test_renorm.py tests/test_off_policy_recipes.py",
        ("with in_training(self.actor_network, False):", "if True:"),
        ("with in_training(self.actor_network, True):", "if True:"),
        ('how["weights"] = self._maybe_get_priority_weight(tensordict)', "pass"),
    ),
    *_of(
        "kit/trainer/pieces.py", "tests/test_run_folder.py -k other",
        ("            _check_weights(component, state, path)\n", "            pass\n"),
    ),
    *_of(
        "kit/envs/normalize.py", "tests/envs/test_normalize.py",
        ("if shape != loaded:", "if len(shape) != len(loaded):"),
    ),
    *_of(
        "kit/advantages.py", "tests/test_advantages.py",
        ('names.index("time") if "time" in names else batch.ndim - 1', "batch.ndim - 1"),
    ),
    *_of(
        "kit/modules/actors.py", "tests/test_every_setting.py -k critic_hidden",
        ('of_critic["hidden_sizes"] = critic_hidden_sizes', "pass"),
    ),
    *_of(
        "kit/modules/host_copy.py", "tests/test_on_a_device.py -k numpy",
        ("memory.copy_(torch.cat(there))", "pass"),
        ("self._watch.changed() or ", ""),
    ),
    *_of(
        "kit/buffers/direct.py", "tests/test_on_a_device.py -k bytewise",
        ("value = value.to(self.tensor.dtype)", "pass"),
        ("self._bring(rows, own)", "pass"),
    ),
    *_of(
        "kit/trainer/pieces.py", "tests/test_on_a_device.py -k pieces",
        ('value.device.type in ("cpu", "cuda")', "value.is_cpu"),
    ),
    *_of(
        "kit/collectors/rollout.py", "tests/collectors",
        ("        if doubtful and buffer.has_infinite():", "        if False:"),
        ("buffer.doubtful_actions() | outputs if doubtful else outputs", "outputs"),
    ),
    *_of(
        "kit/dialects/pyrado.py", "tests/test_dialects_in_runs.py",
        ('"max_episode_steps": self.env_max_steps,', ""),
    ),
    *_of(
        "kit/trainer/checks_of_collection.py",
        "tests/test_trainer.py tests/test_evaluate.py tests/hooks",
        ("isinstance(env, VectorEnv) and env.normalizer is not running", "False"),
    ),
    *_of(
        "kit/update/groups.py", "tests/test_update.py -k no_optimiser_has",
        ("    if stay:", "    if False:"),
    ),
    *_of(
        "kit/trainer/trainer.py", "tests/test_trainer.py",
        (
            "        if not goes_on:\n            self._close",
            "        if False:\n            self._close",
        ),
        ("                close(self._prefill[..., -1])", "                pass"),
    ),
    *_of(
        "kit/trainer/updates.py", "tests/test_stages.py tests/test_neutrality.py",
        ('due_alone=not stages["optimizer"]', "due_alone=False"),
    ),
    *_of(
        "kit/collectors/rollout.py", "tests/collectors/test_stepped_by_others.py",
        ("self.goes_on = self.env.is_at(self._left)", "self.goes_on = self._left is not None"),
    ),
    *_of(
        "kit/collectors/tensor.py", "tests/collectors/test_stepped_by_others.py",
        ("self.goes_on = self._left == self._writes and not anew", "self.goes_on = not anew"),
    ),
    *_of(
        "kit/buffers/n_step.py", "tests/buffers",
        ("reward is None or reward.is_floating_point()", "True"),
    ),
    *_of(
        "kit/buffers/batches.py", "tests/buffers tests/test_checkpoint.py",
        ('if (saved := state_dict.get("size", size)) != size:', "if False:"),
    ),
    *_of(
        "kit/trainer/checks.py", "tests/hooks/test_annealing.py",
        ("if weights & trained and not any(owner is one for one in stepping):", "if False:"),
        ("if weights & trained and not any(", "if weights and not any("),
    ),
    *_of("kit/update/update.py", "tests/test_update.py", ("self._checked.clear()", "pass")),
    *_of(
        "kit/collectors/rollout.py", "tests/collectors/test_vector.py",
        ("self._gives_away or (shown and not self.reuse)", "self._gives_away"),
    ),
    *_of(
        "kit/cli/record.py", "tests/test_offline_recipes.py -k sampled",
        ("exploration_type=own.exploration_type,", ""),
    ),
    *_of(
        "kit/modules/heads.py", "tests/modules/test_actors.py",
        ("return raw.clamp(self.least, self.most)", "return raw"),
    ),
    *_of(
        "kit/fast/memory.py", "tests/test_own_memory.py",
        ('one.op == "call_function" and not one.users', "False"),
    ),
    *_of(
        "kit/hooks/annealing.py", "tests/dialects tests/hooks/test_annealing.py",
        ("begin = int(plan.prefill_is_iteration)", "begin = 0"),
    ),
    *_of(
        "kit/update/update.py", "tests/test_update.py",
        ("        if targets_moved:\n", "        if False:\n"),
        ("return self._target_period.period in (1, *[", "return 1 in (1, *["),
        ("            self._update_targets = self._target_step()\n", "            pass\n"),
    ),
    *_of(
        "kit/experiment.py", "tests/test_experiment.py -k given_replay",
        ("sampler.alpha * factor != exponent", "sampler.alpha != exponent"),
    ),
    *_of(
        "kit/collectors/asynchronous.py", "tests/collectors/test_asynchronous.py",
        ("            _check_parts(self._parts, _parts(policies))\n", ""),
    ),
    *_of(
        "kit/collectors/base.py", "tests/test_exploration_resume.py",
        ("        self.exploration_policy = exploration_policy\n", ""),
    ),
    *_of(
        "kit/trainer/update_phase.py", "tests/test_several_trainers.py",
        ("        self._end_episodes_of_others()\n", ""),
    ),
    *_of(
        "kit/trainer/resumable.py", "tests/test_checkpoint.py tests/test_torchrl_hooks.py",
        ("            self._load_left_out(found)\n", "            pass\n"),
    ),
    *_of(
        "kit/experiment.py", "tests/test_off_policy_recipes.py",
        ("        checks.shared_weights(loss, make, networks)\n", ""),
    ),
    *_of(
        "kit/hooks/annealing.py", "tests/hooks/test_annealing.py tests/test_torchrl_hooks.py",
        ("            self.value = self.values[0].readable()\n", "            pass\n"),
    ),
    *_of(
        "kit/hooks/evaluation.py", "tests/hooks/test_evaluation.py tests/test_evaluate.py",
        ("        self._actor.seeded()\n", ""),
        ("buffer.begin(shown=True)", "buffer.begin()"),
        ("            if self._shares[episode.env]:", "            if True:"),
    ),
    *_of(
        "kit/update/groups.py", "tests/test_update.py",
        ("if not losses[name].requires_grad and name not in _fixed(loss_module):", "if False:"),
        ("if any(gradient is not None for gradient in reached):", "if False:"),
    ),
    *_of(
        "kit/trainer/checks_of_collection.py", "tests/test_trainer.py -k replay_buffer",
        ("plan.on_policy and holds > plan.frames_per_batch", "False"),
    ),
    *_of(
        "kit/buffers/batches.py", "tests/test_interop.py tests/test_experiment.py",
        ("return self.n_step or next(iter(found), None)", "return self.n_step"),
    ),
]  # fmt: skip


def caught_by(mutation: Mutation, folder: Path) -> str:
    """The first test that fails with the mutation; empty if all pass.

    Raises:
        ValueError: if its text is not there exactly once, or no test runs.
    """
    file = folder / mutation.file
    whole = file.read_text()
    if whole.count(mutation.before) != 1:
        raise ValueError(f"{mutation.file} has not once: {mutation.before!r}")
    file.write_text(whole.replace(mutation.before, mutation.after))
    output = folder.with_name("output")
    process = get_context("fork").Process(target=_test, args=(mutation.tests, folder, output))
    process.start()
    process.join(_SECONDS)
    file.write_text(whole)
    if process.is_alive():
        process.kill()
        return "a run that does not end"
    said, code = output.read_text(errors="replace"), process.exitcode
    if code not in (0, 1, 2):
        raise ValueError(f"no test ran: {said[-500:]}")
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s:]+)(?:::([^\s\[]+))?", said, re.MULTILINE)
    if code and not failed:
        raise ValueError(f"nothing failed: {said[-500:]}")
    return "" if failed is None else " ".join(filter(None, failed.groups()))


def _test(words: str, folder: Path, output: Path) -> None:
    """Run tests in a fork of this process, which has imported what is large."""
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path.insert(0, str(folder))
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    options = ["-qx", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    code = pytest.main([*options, *shlex.split(words)])
    sys.stdout.flush()
    os._exit(int(code))


def _key(mutation: Mutation) -> tuple[str, str]:
    """Columns of the table that say which mutation a row is of."""
    shown = [" ".join(text.split()).replace("|", "\\|") for text in mutation[1:3]]
    return mutation.file, " → ".join(f"`{text}`" if text else "nothing" for text in shown)


def report(found: Mapping[tuple[str, str], str]) -> Path:
    """Write the table, in which what was found now takes the place of what was found before."""
    path, before = RESULTS / "mutations.md", {}
    for line in path.read_text().splitlines() if path.exists() else []:
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)]
        if len(cells) == 6:
            before[cells[1], cells[2]] = cells[3:5]
    known = {**before, **{key: [by, str(date.today())] for key, by in found.items()}}
    rows = [[*_key(m), *known[_key(m)]] for m in MUTATIONS if _key(m) in known]
    alive = sum(row[2].startswith(LIVES) for row in rows)
    table = markdown_table(["file", "mutation", "caught by", "tried"], rows)
    text = (
        f"{len(rows)} of {len(MUTATIONS)} mutations tried, {alive} alive. The last of them on: "
        f"{machine(1)}.\n\n{table}"
    )
    return write_results("mutations", "Mutations", text)


def main() -> None:
    """Try the mutations, say which live, and write the table."""
    chosen = [int(number) for number in sys.argv[1:]] or range(len(MUTATIONS))
    found = {}
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in _LARGE:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        left_out = shutil.ignore_patterns(".*", "runs", "results", "*.egg-info")
        shutil.copytree(HERE, copy, ignore=left_out)
        for number in chosen:
            mutation = MUTATIONS[number]
            try:
                found[_key(mutation)] = caught_by(mutation, copy) or LIVES
            except ValueError as error:
                found[_key(mutation)] = f"{LIVES}: {error}"
            print(number, *_key(mutation), found[_key(mutation)], flush=True)
    print(report(found))
    sys.exit(min(sum(said.startswith(LIVES) for said in found.values()), 100))


if __name__ == "__main__":
    main()
