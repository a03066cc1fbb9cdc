"""Small environments that test one ability: what they pay for, and when they end."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from kit.testing.envs import Catch, GoNoGo, Maze


@pytest.mark.parametrize("name", ["Recall", "GoNoGo", "Glimpse", "Catch", "Allowed", "Maze"])
def test_small_env_passes_gymnasium_check(name):
    check_env(gym.make(f"kit/{name}-v0").unwrapped, skip_render_check=True)


def caught(follow) -> list[float]:
    """Rewards of an episode of Catch with actions that follow the board."""
    env, rewards, ended = Catch(rows=6, columns=5), [], False
    board, _ = env.reset(seed=3)
    while not ended:
        board, reward, ended, truncated, _ = env.step(follow(board.reshape(6, 5)))
        rewards.append(reward)
        assert not truncated
    return rewards


def towards(board) -> int:
    ball, paddle = board[:-1].any(0).argmax(), board[-1].argmax()
    return int(np.sign(ball - paddle)) + 1


def test_catch_rewards_caught_ball_on_arrival():
    assert caught(towards) == [0, 0, 0, 0, 1]
    assert caught(lambda board: 2 - towards(board)) == [0, 0, 0, 0, -1]


@pytest.mark.parametrize("remembers", [True, False])
def test_go_no_go_rewards_remembered_cue(remembers):
    env, returns = GoNoGo(delay=3), []
    for seed in range(40):
        seen, _ = env.reset(seed=seed)
        (go, not_go, due), ended, rewards = seen, False, []
        assert (go + not_go, due) == (1, 0)
        while not ended:
            seen, reward, ended, *_ = env.step(0 if go == remembers else 1 + seed % 3)
            rewards.append(reward)
            assert [*seen] == [0, 0, len(rewards) == 3], "whether the answer is due, no more"
        assert rewards == [0, 0, 0, remembers]
        returns.append(go)
    assert 10 < sum(returns) < 30, "both cues are shown"


def walk(env, *moves: tuple[int, int]) -> list[float]:
    """Rewards of so many steps in so many directions."""
    return [env.step(direction)[1] for direction, steps in moves for _ in range(steps)]


DOWN, RIGHT = 0, 2


def test_maze_rooms_connect_only_through_doors():
    env = Maze(rooms=2)
    env.reset()
    walk(env, (DOWN, 8))
    assert env.place == (4, 0), "a wall"
    walk(env, (RIGHT, 2), (DOWN, 4))
    assert env.place == (8, 2), "the door in the middle"
    rewards = walk(env, (RIGHT, 8), (DOWN, 2))
    assert env.place == (10, 10)
    assert rewards == [0.0] * 9 + [1.0]


def test_maze_terminates_at_goal_and_truncates_at_time_limit():
    env = Maze(rooms=1, steps=9)
    env.reset()
    outcomes = [env.step(action)[1:4] for action in [DOWN] * 4 + [RIGHT] * 4]
    assert outcomes[-1] == (1.0, True, False)
    assert not any(map(any, outcomes[:-1]))
    env.reset()
    assert [env.step(1)[2:4] for _ in range(9)] == [(False, False)] * 8 + [(False, True)]
