"""An exported policy acts as the run's, in a process that knows neither the kit nor TorchRL."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

import recipes.dqn
import recipes.ppo
import recipes.ppo_recurrent
import recipes.sac
import recipes.svpg
from kit.__main__ import main as kit
from kit.cli.export import export
from kit.evaluate import SavedRun
from kit.experiment import EnvConfig
from kit.steps import SettingError
from kit.steps.settings import OffPolicySteps, OnPolicySteps
from tests.errors import raises_setting

ON_POLICY = {
    "steps": OnPolicySteps(
        total_policy_steps=64, steps_per_env=32, update_epochs=1, minibatch_size=32,
        evaluation_episodes=1,
    )
}  # fmt: skip
OFF_POLICY = {
    "steps": OffPolicySteps(
        total_policy_steps=40,
        steps_per_env=1,
        learning_starts=20,
        minibatch_size=8,
        evaluation_episodes=1,
    )
}


class Everything(gym.Env[Any, Any]):
    """Observations and actions of every kind, some of which begin with another number than 0."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict(
            {
                "place": gym.spaces.Box(-1, 1, (2,), np.float32),
                "cards": gym.spaces.MultiDiscrete([3, 2], start=[1, 5]),
                "inner": gym.spaces.Dict({"coin": gym.spaces.Discrete(2, start=4)}),
            }
        )
        self.action_space = gym.spaces.Dict(
            {
                "push": gym.spaces.Box(-0.1, 0.1, (2,), np.float32),
                "gear": gym.spaces.Discrete(3, start=-1),
            }
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.left = 12
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action)
        self.left -= 1
        return self.observation_space.sample(), 0.0, self.left == 0, False, {}


gym.register("kit/Everything-v0", Everything)


class Bandit(gym.Env[Any, Any]):
    """Its episodes are one step long."""

    def __init__(self, dtype: Any = np.float32) -> None:
        self.observation_space = gym.spaces.Box(-1, 1, (3,), dtype)
        self.action_space = gym.spaces.Box(-2, 2, (2,), dtype)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.uniform(-1, 1, 3).astype(self.observation_space.dtype), {}

    def step(self, action):
        return self.reset()[0], 0.0, True, False, {}


gym.register("kit/Bandit-v0", Bandit)
gym.register("kit/Bandit64-v0", lambda: Bandit(np.float64))

RUNS = {
    "ppo": (recipes.ppo, {"env": EnvConfig(num_envs=2, normalize_observation=True), **ON_POLICY}),
    "squashed": (
        recipes.ppo,
        {"env": EnvConfig("Pendulum-v1", 2), "squash_actions": True, **ON_POLICY},
    ),
    "gsde": (recipes.ppo, {"env": EnvConfig("Pendulum-v1", 2), "gsde": True, **ON_POLICY}),
    "sac": (recipes.sac, {"env": EnvConfig("Pendulum-v1", 1), **OFF_POLICY}),
    "dqn": (recipes.dqn, OFF_POLICY),
    "masked": (recipes.ppo, {"env": EnvConfig("kit.testing.envs:kit/Allowed-v0", 2), **ON_POLICY}),
    "everything": (recipes.ppo, {"env": EnvConfig("kit/Everything-v0", 2), **ON_POLICY}),
}


def played(recipe: Any, folder: Path, **settings: Any) -> SavedRun:
    """The policy of a short run."""
    config = recipe.Config(log_dir=str(folder), progress=False, hidden_sizes=[8], **settings)
    trainer = recipe.build(config)
    trainer.run()
    return SavedRun(trainer.folder)


@pytest.mark.parametrize(
    ("name", "suffix"),
    [*((name, ".pt2") for name in RUNS), ("ppo", ".onnx"), ("everything", ".onnx")],
)
def test_exported_policy_matches_actions_for_any_batch_size(name, suffix, tmp_path):
    if suffix == ".onnx":
        pytest.importorskip("onnxscript")
    recipe, settings = RUNS[name]
    run, file = played(recipe, tmp_path, **settings), tmp_path / "exported" / f"policy{suffix}"
    text = export(run, file, seed=3)
    assert "same actions as the run in " in text
    policy = run.policy()
    env = policy.make_env()
    observation, info = env.reset(seed=11)
    seen, chosen, done = [], [], False
    while not done and len(seen) < 50:
        seen.append(flat(observation, env.observation_space))
        action = policy(observation, info)
        chosen.append(flat(action, env.action_space))
        observation, _, terminated, truncated, info = env.step(action)
        done = terminated or truncated
    for rows in (len(seen), 1):
        batch = [np.stack(entry)[:rows] for entry in zip(*seen)]
        found = acts(file, batch)
        for ours, theirs in zip(found, zip(*chosen), strict=True):
            assert ours.dtype == theirs[0].dtype
            np.testing.assert_allclose(ours, np.stack(theirs)[:rows], rtol=1e-5, atol=1e-6)
    run.close()


def test_export_from_one_step_episodes_takes_any_batch_size(tmp_path):
    run = played(recipes.ppo, tmp_path, env=EnvConfig("kit/Bandit-v0", 2), **ON_POLICY)
    file = tmp_path / "policy.pt2"
    assert "in 1 steps" in export(run, file)
    policy, seen = run.policy(), np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)
    for rows in (5, 1):
        (found,) = acts(file, [seen[:rows]])
        expected = np.stack([policy(observation) for observation in seen[:rows]])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    run.close()


def test_onnx_export_takes_float64_observations(tmp_path):
    pytest.importorskip("onnxscript")
    import onnx

    run = played(recipes.ppo, tmp_path, env=EnvConfig("kit/Bandit64-v0", 2), **ON_POLICY)
    file = tmp_path / "policy.onnx"
    assert export(run, file).startswith("observation [n, 3] float64 -> action [n, 2] float64")
    (taken,) = onnx.load(file).graph.input
    assert taken.type.tensor_type.elem_type == onnx.TensorProto.DOUBLE
    policy, seen = run.policy(), np.linspace(-1, 1, 15).reshape(5, 3)
    (found,) = acts(file, [seen])
    expected = np.stack([policy(observation) for observation in seen])
    assert found.dtype == expected.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    run.close()


def test_export_rejects_particle_policies(tmp_path):
    steps = OnPolicySteps(
        total_policy_steps=64, steps_per_env=32, update_epochs=1, minibatch_size=32,
        evaluation_episodes=2,
    )  # fmt: skip
    env = EnvConfig("CartPole-v1", 2)
    run = played(recipes.svpg, tmp_path, env=env, num_particles=2, steps=steps)
    with pytest.raises(SettingError, match="It reads the particle index"):
        export(run, tmp_path / "policy.pt2")


def flat(tree: Any, space: gym.Space[Any]) -> list[np.ndarray]:
    """The arrays of a nested observation or action, in the order of the space."""
    if isinstance(space, gym.spaces.Dict):
        return [leaf for name, inner in space.items() for leaf in flat(tree[name], inner)]
    return [np.asarray(tree, space.dtype)]


def acts(file: Path, batch: list[np.ndarray]) -> list[np.ndarray]:
    if file.suffix == ".pt2":
        program = torch.export.load(file).module()
        return [action.numpy() for action in program(*map(torch.from_numpy, batch))]
    from onnx import load
    from onnx.reference import ReferenceEvaluator

    model = ReferenceEvaluator(load(file))
    return list(model.run(None, dict(zip(model.input_names, batch))))


def test_export_command_prints_shapes_and_file_needs_only_torch(tmp_path, capsys):
    recipe, settings = RUNS["ppo"]
    run, file = played(recipe, tmp_path, **settings), tmp_path / "policy.pt2"
    assert kit(["export", str(run.folder), str(file), "--best"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{file}: observation [n, 4] float32 -> action [n] int64, determinis")
    code = (
        "import sys, torch; act = torch.export.load(sys.argv[1]).module(); "
        "(action,) = act(torch.zeros(3, 4)); print(tuple(action.shape), "
        "{'kit', 'torchrl', 'tensordict', 'gymnasium'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True)
    assert done.stdout == "(3,) set()\n", done.stderr


def test_export_rejects_policy_when_actions_differ(tmp_path):
    recipe, settings = RUNS["dqn"]
    run, file = played(recipe, tmp_path, **settings), tmp_path / "policy.pt2"
    network = run.trainer.evaluate.policy.module[0].module[0]
    forward = network.forward

    def moody(*args, **kwargs):
        outputs = forward(*args, **kwargs)
        outputs["action_value"] = outputs["action_value"] * random.choice([-1, 1])
        return outputs

    network.forward = moody
    with raises_setting("run"):
        export(run, file)
    assert not file.exists()


def test_export_rejects_untraceable_policy_in_one_line(tmp_path):
    recipe, settings = RUNS["dqn"]
    run, file = played(recipe, tmp_path, **settings), tmp_path / "policy.pt2"
    network = run.trainer.evaluate.policy.module[0].module[0]
    forward = network.forward

    def decides(seen):
        return forward(seen if float(seen["observation"].sum()) > 0 else seen.clone())

    network.forward = decides
    with raises_setting("policy") as refused:
        export(run, file)
    assert "\n" not in str(refused.value)
    assert refused.value.works == "Use SavedRun.policy() instead"
    assert not file.exists()


def test_export_rejects_recurrent_policy(tmp_path):
    steps = OnPolicySteps(
        total_policy_steps=64, steps_per_env=32, update_epochs=1, minibatch_size=2,
        sequence_length=16, evaluation_episodes=1,
    )  # fmt: skip
    run = played(recipes.ppo_recurrent, tmp_path, steps=steps, env=EnvConfig(num_envs=2))
    with raises_setting("policy"):
        export(run, tmp_path / "policy.pt2")


def test_export_rejects_unsupported_file_format(tmp_path):
    recipe, settings = RUNS["dqn"]
    run = played(recipe, tmp_path, **settings)
    with pytest.raises(
        SettingError, match=r"policy.pth': This file format is not supported. .*\.pt2.*onnx"
    ):
        export(run, tmp_path / "policy.pth")
