"""What makes no sense is refused in one line that says what works, and loses nothing."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import recipes.crossq
import recipes.ddpg
import recipes.ppo
import recipes.ppo_pixels
import recipes.ppo_recurrent
import recipes.rainbow
import recipes.redq
import recipes.sac
import recipes.td3
from kit.cli.launch import main
from kit.collectors import VectorCollector
from kit.envs import EnvError, make_env
from kit.hooks.evaluation import Evaluator
from kit.modules import make_actor
from kit.steps import SettingError
from kit.trainer.checkpoint import Checkpoints
from recipes.ppo import build
from tests.errors import raises_setting
from tests.faulty import FallsOver
from tests.short_runs import COMMON, SHORT, one_line, policy_steps_in, the_run, tiny_config
from tests.tiny import Scripted

RECIPES = {
    "ppo": recipes.ppo,
    "sac": recipes.sac,
    "td3": recipes.td3,
    "ddpg": recipes.ddpg,
    "crossq": recipes.crossq,
    "rainbow": recipes.rainbow,
    "redq": recipes.redq,
    "ppo_pixels": recipes.ppo_pixels,
    "ppo_recurrent": recipes.ppo_recurrent,
}


@pytest.fixture
def command(tmp_path, capsys, monkeypatch):
    """Runs a recipe as the command line does and returns what it says on the error stream."""
    monkeypatch.chdir(tmp_path)

    def run(words: str, code: int = 1) -> str:
        recipe, *given = words.split()
        module = RECIPES[recipe]
        chosen = {word.split("=")[0] for word in given}
        short = SHORT["ppo" if recipe.startswith("ppo") else "sac"]
        usual = [w for w in [*short, *COMMON] if w.split("=")[0] not in chosen]
        arguments = given if any(w.startswith(("steps=", "resume=")) for w in given) else usual
        arguments = [*given, *arguments] if arguments is usual else given
        if code == 0:
            main(module.Config, module.build, arguments)
        else:
            with pytest.raises(SystemExit) as ended:
                main(module.Config, module.build, arguments)
            assert ended.value.code == code
        return capsys.readouterr().err

    return run


REFUSED = {
    "ppo env.id=CartPole-v2": "env.id='CartPole-v2': Gymnasium cannot create this environment: ",
    "ppo env.id=nowhere_at_all:Bar-v0": "environment: No module named 'nowhere_at_all'",
    "ppo env.id=Blackjack-v1": "This kind of space is not supported. Use Box, ",
    "sac env=Pendulum-v1": "env='Pendulum-v1': This is a group of settings, not a single one. "
    "Use env.id=Pendulum-v1.",
    "sac env.id=CartPole-v1": "env.id='CartPole-v1': The sac recipe needs continuous "
    "actions, but the action space is Discrete(2). Use an environment with a float Box",
    "ppo env.kwargs.foo=1": "creating it raised TypeError: ",
    "ppo env.vectorization=asnc": "env.vectorization='asnc' is not a valid choice. Try: async,",
    "ppo env.num_envs=0": "env.num_envs=0: The value must be at least 1",
    "ppo steps.total_policy_steps=72 steps.rounding=error": "steps.total_policy_steps=72 is not a "
    "multiple of the 16 policy steps per iteration. Try: 64 or 80, or steps.rounding=up",
    "ppo steps.minibatches=2 steps.minibatch_size=128": "steps.minibatches=2 conflicts with "
    "steps.minibatch_size=128. Use steps.minibatches=null.",
    "ppo steps.rounding=upp": "steps.rounding='upp' is not a valid choice. Try: up,",
    "sac steps.replay_ratio=nan": "steps.replay_ratio=nan is not a finite number >= 0. Use a "
    "number such as 0.5 or '1/3'.",
    "ppo steps=tianshu": "steps='tianshu' is not a valid choice. Try: tianshou,",
    "ppo steps=sb3 steps.n_step=8": "steps.n_step=8: The sb3 dialect has no such setting. Try: ",
    "sac steps.learning_starts=60": "steps.learning_starts=60: Training would start after "
    "60 policy steps, but the run has only 40. Start training earlier, or run ",
    "redq steps.sequence_length=1": "steps.sequence_length=1: REDQLoss does not support",
    "ppo shared_backbone=true critic_hidden_sizes=[8]": "the critic uses the actor's",
    "crossq renorm_actor=true loss=CrossQLoss": "renorm_actor=True: It needs a loss "
    "that updates the actor's running statistics. Use loss=kit.losses:CrossQLoss.",
    "ppo collector_kwargs.exploration_type=3": "collector_kwargs={'exploration_type': 3}: "
    "The collector cannot be created: ValueError: 3 is not a valid ",
    "ppo env.kwargs.id=Pendulum-v1": "env.kwargs.id='Pendulum-v1': This argument "
    "cannot be set in env.kwargs. Use env.id='Pendulum-v1'",
    "ppo env.kwargs.gamma=0.5": "env.kwargs.gamma=0.5: This argument cannot be "
    "set in env.kwargs. Use gamma",
    "sac buffer_size=1_000_000_000_000": "buffer_size=1000000000000: It needs ",
    "ppo seed=9223372036854775808": "The value must be at most 9223372036854775807.",
    "ppo device=meta": "device='meta': PyTorch cannot use it",
    "ppo loss=SACLoss": "loss='SACLoss': The loss is not compatible with this recipe: TypeError: "
    "SACLoss.__init__() got an unexpected keyword argument 'loss_critic_type'",
    "td3 loss=SACLoss": "loss='SACLoss': The loss is not compatible with this recipe: ",
    "ppo learning_rat=1": "learning_rat='1': There is no such setting. Try: learning_rate=1",
    "ppo num_envs=3": "num_envs='3': There is no such setting. Try: env.num_envs=3.",
    "ppo +zzz=3": "zzz='3': There is no such setting. List all settings with --help=all.",
    "ppo seed": "command line='seed': Settings are written as name=value. Use seed=VALUE.",
    "ppo hydra.run.dir=there": "hydra.run.dir='there': There is no such setting",
    "ppo --multirn": "'--multirn': There is no such option. Try: --multirun.",
    "ppo env.id=[1,2": "command line='env.id=[1,2': Hydra rejects it: no viable alternative",
    "ppo seed=1,2": "seed='1,2': Several values need a sweep. Use seed=[1,2] for a list, or",
    "ppo env.id=${bar}": "Interpolation key 'bar' not found",
    "ppo preset=mujco": "preset='mujco' is not a valid choice. Try: mujoco, classic",
    "ppo lr_schedule=lin": "lr_schedule='lin' is not a schedule. Try: linear, ",
    "ppo activation=tan": "activation='tan' is not a valid choice. Try: tanh,",
    "ppo collector=vecor": "collector='vecor' is not a registered collector. Try: vector,",
    "ppo collector_kwargs.fast_polcy=exact": "collector_kwargs={'fast_polcy': 'exact'}: "
    "The collector cannot be created: TypeError: ",
    "ppo collector=async collector_kwargs.max_stalenes=2": "collector_kwargs={"
    "'max_stalenes': 2}: The collector cannot be created: RuntimeError: the collector's process ",
    "ppo collector=torchrl collector_kwargs.max_frames_per_traj=x": "collector_kwargs="
    "{'max_frames_per_traj': 'x'}: The collector cannot be created: ValueError: invalid literal",
    "ppo collector_kwargs.frames_per_batch=8": "collector_kwargs={'frames_per_batch': 8}: The "
    "collector cannot be created: TypeError: ",
    "ppo logger=wanb": "logger='wanb' is not a valid choice. Try: wandb,",
    "ppo learning_rate=-1": "learning_rate=-1.0: The value must be above 0.",
    "ppo gamma=2": "gamma=2.0: The value must be at least 0 and at most 1.",
    "rainbow exploration_share=0": "exploration_share=0.0: The value must be above 0 and",
    "sac env.kwargs.stacked_frames=3": "env.kwargs.stacked_frames=3: This argument cannot be set",
    "ppo device=gpu": "device='gpu': PyTorch has no device with this name. Try: cuda",
    "ppo initial_log_std=-.inf": "initial_log_std='-.inf' is not a number.",
    "ppo stop_at_return=9 steps.evaluation_every=null": "stop_at_return=9.0: It has no effect",
    "ppo log_dir=/proc/no": "/proc/no/ppo/CartPole-v1 cannot be written",
    "ppo resume=nowhere": "resume='nowhere': There is no such folder",
    "ppo resume=latest": "resume='latest': There is no run in runs/ppo.",
}


@pytest.mark.parametrize("words", REFUSED)
def test_cli_rejects_invalid_input_in_one_line(command, words, tmp_path):
    assert REFUSED[words] in one_line(command(words))
    assert not list(tmp_path.iterdir())  # before anything was written


@pytest.mark.parametrize(
    "make",
    [
        lambda env: VectorCollector(env, None, steps_per_env=2, device="gpu"),
        lambda env: Evaluator(env, make_actor(env, [4]), device="gpu:1"),
    ],
)
def test_components_reject_unknown_device(make):
    with raises_setting("device"):
        make(make_env("CartPole-v1"))


# ---------------------------------------------------------------------- environments that fail
def raises(step: int) -> None:
    if step == 30:
        raise OSError("the simulator fell over")


def exits(step: int) -> None:
    if step == 30:
        raise SystemExit(3)


def writes_lines(step: int) -> None:
    if step == 30:
        raise OSError("the simulator\n  fell\n\nover")


FAULTS: dict[str, tuple[Any, str]] = {
    "raises": (raises, "step() raised OSError: the simulator fell over"),
    "nan": (
        lambda step: np.full(2, np.nan, np.float32) if step == 30 else None,
        "returned NaN as observation, 1 policy steps into its episode",
    ),
    "infinity": (
        lambda step: np.full(2, np.inf, np.float32) if step == 30 else None,
        "returned infinity as observation, 1 policy steps into its episode",
    ),
    "exits": (exits, "step() raised SystemExit: 3"),
    "lines": (writes_lines, "step() raised OSError: the simulator fell over"),
    "shape": (
        lambda step: np.zeros(3, np.float32) if step == 30 else None,
        "returned observation of shape (3,) as observation, but its space has shape (2,)",
    ),
    "text": (
        lambda step: "nothing" if step == 30 else None,
        "returned observation of shape () as observation, but its space has shape (2,)",
    ),
}


class Spoilt(Scripted):
    """Returns another value in one place of what its thirtieth step returns."""

    def __init__(self, place, value) -> None:
        super().__init__(7)
        self.place, self.value = place, value

    def step(self, action):
        returned = [*super().step(action)]
        if self.total == 30:
            returned[self.place] = self.value
        return tuple(returned)


class InfiniteReset(Scripted):
    """Begins with an infinite observation."""

    def reset(self, **how):
        return np.full_like(super().reset(**how)[0], np.inf), {}


class NoReset(Scripted):
    """Cannot be reset."""

    def reset(self, **_):
        raise RuntimeError("no power")


class NotMade(Scripted):
    """Cannot be made."""

    def __init__(self) -> None:
        raise RuntimeError("no licence")


class Pair(Scripted):
    """Has actions of a kind that no policy here chooses."""

    action_space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(2)))


@pytest.fixture
def odd(monkeypatch):
    """Registers environments that misbehave as ``odd/<name>-v0``."""
    made = {
        **{name: lambda fault=fault: Scripted(7, fault) for name, (fault, _) in FAULTS.items()},
        "falls": FallsOver,
        "reward": lambda: Spoilt(1, np.nan),
        "infinite": lambda: Spoilt(1, -np.inf),
        "flag": lambda: Spoilt(2, np.nan),
        "begins": InfiniteReset,
        "reset": NoReset,
        "made": NotMade,
        "pair": Pair,
    }
    before = dict(gym.registry)
    for name, make in made.items():
        gym.register(f"odd/{name}-v0", entry_point=make)
    yield
    gym.registry.clear()
    gym.registry.update(before)


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize("fault", FAULTS)
def test_error_names_faulty_env_and_step(command, fault):
    message = one_line(command(f"ppo env.id=odd/{fault}-v0"))
    assert message.startswith(f"environment odd/{fault}-v0, env 0, after 29 policy steps: ")
    assert FAULTS[fault][1] in message


@pytest.mark.usefixtures("odd")
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("reward", ", env 0, after 29 policy steps: returned NaN as reward"),
        ("infinite", ", env 0, after 29 policy steps: returned infinity as reward, 1 policy steps"),
        ("flag", ", env 0, after 29 policy steps: returned nan as terminated"),
        ("begins", ", env 0, after 0 policy steps: returned infinity as observation when it was"),
        ("reset", ", env 0: reset() raised RuntimeError: no power"),
        ("made", ": creating it raised RuntimeError: no licence"),
    ],
)
def test_error_names_other_env_faults(command, name, what):
    message = one_line(command(f"ppo env.id=odd/{name}-v0"))
    assert message.startswith(f"environment odd/{name}-v0{what}")


@pytest.mark.usefixtures("odd")
def test_cli_rejects_unsupported_action_space(command):
    message = one_line(command("ppo env.id=odd/pair-v0"))
    assert message.startswith("action_space=Tuple(Discrete(2), Discrete(2))")


@pytest.mark.usefixtures("odd")
def test_failed_run_ends_processes_and_keeps_files(command, tmp_path):
    gc.collect()
    before = {process.pid for process in multiprocessing.active_children()}
    words = "ppo env.id=odd/falls-v0 env.vectorization=async checkpoint_every=16 log_every=16"
    assert one_line(command(words)).startswith("environment odd/falls-v0, env 0, after 29 policy")
    assert {process.pid for process in multiprocessing.active_children()} <= before
    opened = [os.readlink(f) for f in Path("/proc/self/fd").iterdir() if f.exists()]
    assert not [path for path in opened if path.startswith(str(tmp_path))]
    run = the_run(tmp_path)
    assert policy_steps_in(run) == [16, 32, 48]
    latest = Checkpoints.latest(run / "checkpoints")
    assert latest is not None
    assert latest.name == "checkpoint-000000000048"
    assert re.search(r"^policy steps +64 +64 +48$", (run / "plan.txt").read_text(), re.MULTILINE)
    assert (run / "curve.png").is_file()


# ---------------------------------------------------------------------- hooks that raise
class Fails:
    """Raises at the third batch."""

    batches = 0

    def register(self, trainer, name="fails"):
        trainer.register_op("batch_process", self.look)

    def look(self, batch):
        self.batches += 1
        if self.batches == 3:
            raise KeyError("reward")


RAISED = re.compile(
    r"hook Fails\.look at stage 'batch_process' raised KeyError: 'reward' "
    r"\(test_bad_input\.py, line \d+\)"
)


def test_cli_names_hook_that_raises(command, monkeypatch):
    monkeypatch.setattr(
        recipes.ppo, "build", lambda config: build(config, hooks=[Fails()])
    )  # as a recipe of a user might
    message = one_line(command("ppo"))
    assert RAISED.fullmatch(message)


# ---------------------------------------------------------------------- resuming something else
@pytest.fixture
def finished(tmp_path) -> Path:
    build(tiny_config(tmp_path)).run()
    return the_run(tmp_path)


def test_resume_error_lists_all_changed_settings(command, finished):
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    message = one_line(command(f"ppo resume={finished} gamma=0.5 env.num_envs=4 logger=none"))
    assert message == (
        f"resume='{finished}': The run has other settings (env.num_envs: saved 2, now 4; "
        "gamma: saved 0.99, now 0.5). Remove these settings, or start a new run without resume."
    )
    assert before == {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("sac resume={}", "This is a run of ppo, not of sac. Use: kit train ppo resume={}"),
        ("ppo resume={} steps=sb3", "steps='sb3': A resumed run keeps its settings. Remove it"),
        ("ppo resume={} preset=mujoco", "preset='mujoco': A resumed run keeps its settings"),
        ("ppo resume={} gama=1", "gama='1': There is no such setting. Try: gamma"),
    ],
)
def test_resume_rejects_other_recipe_or_settings(command, finished, words, message):
    assert message.format(finished) in one_line(command(words.format(finished)))


def test_resume_reports_unreadable_config_in_one_line(command, finished):
    (finished / "config.yaml").write_text("env: [")
    assert "The folder has no readable config.yaml" in one_line(command(f"ppo resume={finished}"))
    (finished / "config.yaml").write_text("learning_rat: 1\nrecipe: ppo\n")
    message = one_line(command(f"ppo resume={finished}"))
    assert message.startswith("learning_rat=1 is not a setting of Config. Try: learning_")


def test_env_error_survives_pickling():
    import pickle

    fault = EnvError("Env-v0", 3, "fell over", 17)
    assert str(pickle.loads(pickle.dumps(fault))) == str(fault)


def test_error_lists_each_valid_value_once():
    assert str(SettingError("n", 0, "is too small", [100, 100])).endswith("Try: 100.")
