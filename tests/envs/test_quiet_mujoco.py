"""What MuJoCo prints and writes while models are read."""

from __future__ import annotations

import warnings

import gymnasium as gym
import pytest

from kit.envs import make_env
from kit.envs.single_env import quiet_mujoco

mujoco = pytest.importorskip("mujoco")


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_make_env_prints_and_writes_nothing(vectorization, capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_env("HalfCheetah-v5", 2, vectorization=vectorization).close()
    out, err = capfd.readouterr()
    assert "WARNING" not in out + err
    assert list(tmp_path.iterdir()) == []


def test_quiet_mujoco_turns_other_warnings_into_python_warnings():
    spec = gym.spec("HalfCheetah-v5")
    with pytest.warns(UserWarning, match=r"HalfCheetah-v5: the floor is lava"), quiet_mujoco(spec):
        mujoco.get_mju_user_warning()("the floor is lava")


def test_quiet_mujoco_restores_previous_handler():
    heard = []
    mujoco.set_mju_user_warning(heard.append)
    try:
        with quiet_mujoco(gym.spec("HalfCheetah-v5")):
            pass
        mujoco.get_mju_user_warning()("after")
        assert heard == ["after"]
    finally:
        mujoco.set_mju_user_warning(None)


def test_quiet_mujoco_ignores_non_mujoco_environments():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = mujoco.get_mju_user_warning()
        with quiet_mujoco(gym.spec("CartPole-v1")):
            assert mujoco.get_mju_user_warning() is before
