"""Hindsight goals come from the same episode of the same environment."""

from __future__ import annotations

import io
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrl.data import HERReplayBuffer, LazyTensorStorage

import recipes.sac
from kit.buffers import (
    HindsightReplayBuffer,
    ObservationStorage,
    ReplayMinibatches,
    SequenceSampler,
    make_replay_buffer,
)
from kit.experiment import EnvConfig, OffPolicySteps
from tests.errors import raises_setting


class Episodes:
    """Environments whose episodes have random lengths; goals say where they come from."""

    def __init__(self, num_envs: int, seed: int) -> None:
        self.num_envs = num_envs
        self.generator = torch.Generator().manual_seed(seed)
        self.episode = [0] * num_envs
        self.step = [0] * num_envs

    def batch(self, steps: int) -> TensorDict:
        """``[num_envs, steps]``; a goal is (environment, episode, step)."""
        here = torch.zeros(self.num_envs, steps, 3)
        done = torch.zeros(self.num_envs, steps, 1, dtype=torch.bool)
        for t in range(steps):
            for env in range(self.num_envs):
                here[env, t] = torch.tensor([env, self.episode[env], self.step[env]])
                self.step[env] += 1
                if torch.rand((), generator=self.generator) < 0.2:
                    done[env, t] = True
                    self.step[env], self.episode[env] = 0, self.episode[env] + 1
        following = {"reward": torch.zeros(self.num_envs, steps, 1), "done": done}
        following |= {"terminated": done.clone(), "desired_goal": -torch.ones_like(here)}
        following["achieved_goal"] = here.clone()
        rows = {"achieved_goal": here, "where": here.clone()}
        rows |= {"desired_goal": -torch.ones_like(here), "next": following}
        return TensorDict(rows, [self.num_envs, steps])


def replay_of(size: int, strategy: str, **kwargs) -> ReplayMinibatches:
    buffer = HindsightReplayBuffer(
        lambda rows: torch.ones(len(rows), 1), her_ratio=1.0, strategy=strategy,
        storage=LazyTensorStorage(size), batch_size=256, **kwargs,
    )  # fmt: skip
    return ReplayMinibatches(buffer)


def check(replay: ReplayMinibatches, strategy: str) -> None:
    """Every goal is of the row's own episode, and where in it the strategy says."""
    torch.manual_seed(0)
    sample = replay.buffer.sample()
    torch.manual_seed(0)
    assert (replay._samples(256, 1)[0] == sample).all()
    stored = replay.buffer.storage[:]["where"]
    for where, goal in zip(sample["where"], sample["desired_goal"]):
        assert torch.equal(where[:2], goal[:2]), "another episode"
        own = stored[(stored[:, :2] == where[:2]).all(-1)][:, 2]
        allowed = {"future": own[own >= where[2]], "episode": own, "final": own.max().reshape(1)}
        assert goal[2] in allowed[strategy]
    assert torch.equal(sample["next", "desired_goal"], sample["desired_goal"])
    assert (sample["next", "reward"] == 1).all()


BATCHES = st.lists(st.integers(1, 9), min_size=1, max_size=25)


@pytest.mark.parametrize("strategy", ["future", "episode", "final"])
@given(st.integers(1, 5), BATCHES, st.integers(20, 60), st.integers(0, 1_000))
@settings(max_examples=25)
def test_relabeled_goals_come_from_same_episode(strategy, num_envs, batches, size, seed):
    """Whatever the lengths of episodes and batches, also when old rows are overwritten."""
    torch.manual_seed(seed)
    episodes, replay = Episodes(num_envs, seed), replay_of(size, strategy)
    for steps in batches:
        replay.extend(episodes.batch(steps))
        check(replay, strategy)


def test_random_strategy_draws_goals_from_all_episodes():
    torch.manual_seed(0)
    replay, batch = replay_of(100, "random"), Episodes(2, 0).batch(4)
    replay.extend(batch)
    goals = {tuple(goal) for goal in replay.buffer.sample()["desired_goal"].tolist()}
    assert goals == {tuple(where) for where in batch["where"].flatten(0, 1).tolist()}


def test_add_matches_extend():
    batch, drawn = Episodes(1, 0).batch(9), []
    one_by_one, at_once = replay_of(20, "future"), replay_of(20, "future")
    for row in batch[0]:
        one_by_one.buffer.add(row)
    at_once.extend(batch)
    for replay in (one_by_one, at_once):
        torch.manual_seed(0)
        drawn.append(replay.buffer.sample()["desired_goal"])
    assert torch.equal(*drawn)


def test_emptied_buffer_accepts_different_num_envs():
    replay = replay_of(50, "future")
    replay.extend(Episodes(2, 0).batch(4))
    replay.buffer.empty()
    replay.extend(Episodes(3, 1).batch(4))
    assert len(replay.buffer) == 12
    check(replay, "future")


def test_rewards_are_unchanged_when_her_ratio_is_zero():
    replay = replay_of(50, "future")
    replay.buffer.her_ratio = 0.0
    replay.extend(Episodes(1, 0).batch(4))
    sample = replay.buffer.sample()
    assert (sample["next", "reward"] == 0).all()
    assert (sample["desired_goal"] == -1).all()


@pytest.mark.parametrize("num_envs", [1, 3])
def test_restored_buffer_draws_same_goals(num_envs):
    episodes = Episodes(num_envs, 1)
    before, after = replay_of(50, "future"), replay_of(50, "future")
    for steps in (7, 1, 20, 4):
        before.extend(episodes.batch(steps))
    file = io.BytesIO()
    torch.save(before.state_dict(), file)
    file.seek(0)
    after.load_state_dict(torch.load(file, weights_only=True))
    more = episodes.batch(6)
    drawn = []
    for replay in (before, after):
        replay.extend(more.clone())
        torch.manual_seed(3)
        drawn.append(replay.buffer.sample()["desired_goal"])
        check(replay, "future")
    assert torch.equal(*drawn)


@pytest.mark.parametrize("how", ["state_dict", "dumps"])
def test_torchrl_save_and_load_keep_goals_in_episode(how, tmp_path):
    episodes, before, after = Episodes(2, 1), replay_of(50, "future"), replay_of(50, "future")
    for steps in (7, 20, 4):
        before.extend(episodes.batch(steps))
    if how == "dumps":
        before.buffer.dumps(tmp_path)
        after.buffer.loads(tmp_path)
    else:
        after.buffer.load_state_dict(before.buffer.state_dict())
    after.extend(episodes.batch(6))
    check(after, "future")


def test_goals_do_not_cross_closed_episodes():
    """After a resume with environments that could not continue where they were."""
    torch.manual_seed(0)
    replay, episodes = replay_of(200, "future"), Episodes(2, 2)
    replay.extend(episodes.batch(3))
    replay.close_open_episodes(2)
    for env in range(2):
        episodes.episode[env], episodes.step[env] = episodes.episode[env] + 1, 0
    replay.extend(episodes.batch(3))
    check(replay, "future")


def test_torchrl_her_buffer_rejects_multiple_envs():
    def torchrls() -> ReplayMinibatches:
        return ReplayMinibatches(
            HERReplayBuffer(
                lambda rows: torch.ones(len(rows), 1), storage=LazyTensorStorage(50), batch_size=4
            )
        )

    torchrls().extend(Episodes(1, 0).batch(4))
    with raises_setting("buffer"):
        torchrls().extend(Episodes(2, 0).batch(4))


def test_extend_rejects_padded_episodes():
    batch = Episodes(2, 0).batch(4)
    batch["collector", "mask"] = torch.ones(2, 4, dtype=torch.bool)
    for replay in (replay_of(50, "future"), make_replay_buffer(50, 2, sequence_length=2)):
        with raises_setting("buffer"):
            replay.extend(batch)


def test_extend_rejects_changed_num_envs():
    replay = replay_of(50, "future")
    replay.extend(Episodes(2, 0).batch(4))
    with raises_setting("num_envs"):
        replay.extend(Episodes(3, 0).batch(4))


def test_buffer_rejects_rows_of_only_some_envs():
    buffer = replay_of(50, "future").buffer
    buffer.belong_to(2)
    rows = Episodes(1, 0).batch(3)[0]
    with raises_setting("num_envs") as refused:
        buffer.extend(rows)
    assert refused.value.works == "Collect with steps_per_env instead of whole episodes"
    with raises_setting("num_envs"):
        buffer.add(rows[0])
    assert len(buffer) == 0


def test_hindsight_rejects_n_step():
    n_step = make_replay_buffer(50, 2, n_step=3).n_step
    with raises_setting("n_step"):
        ReplayMinibatches(replay_of(50, "future").buffer, n_step)


class Reaching(gym.Env):
    """A point that moves by its action, and a goal."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, dtype: str = "float32") -> None:
        place = spaces.Box(-99, 99, (2,), np.dtype(dtype))
        seen = spaces.Box(-99, 99, (2,), np.float32)
        self.place = np.zeros(2, dtype)
        self.observation_space = spaces.Dict(
            observation=seen, achieved_goal=place, desired_goal=place
        )

    def _seen(self) -> dict[str, Any]:
        goal = {"achieved_goal": self.place, "desired_goal": self.place + 50}
        return {"observation": self.place.astype(np.float32), **goal}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self._seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self._seen(), -1.0, False, False, {}


gym.register("kit/Reaching-v0", entry_point=Reaching, max_episode_steps=5)


@pytest.mark.parametrize(
    "env",
    [
        {"normalize_observation": True},
        {"normalize_observation": True, "normalize_reward": True},
        {"normalize_observation": True, "kwargs": {"dtype": "int64"}},
    ],
)
def test_hindsight_compares_raw_goals_with_normalisation(env):
    """Each entry of an observation is normalised by its own statistics, after goals are chosen."""
    achieved, compared = ("next", "achieved_goal"), []

    def reward(rows: TensorDict) -> torch.Tensor:
        compared.append(rows["desired_goal"] - rows[achieved])
        return (rows[achieved] == rows["desired_goal"]).all(-1, keepdim=True).float()

    buffer = HindsightReplayBuffer(
        reward, achieved_goal_key=achieved, storage=LazyTensorStorage(50), batch_size=4
    )
    steps = OffPolicySteps(
        total_policy_steps=20, learning_starts=10, minibatch_size=4, evaluation_episodes=1
    )
    config = recipes.sac.Config(
        env=EnvConfig(id="kit/Reaching-v0", num_envs=2, **env), steps=steps,
        hidden_sizes=[4], log_dir=None, progress=False,
    )  # fmt: skip
    assert recipes.sac.build(config, buffer=buffer).run().policy_steps == 20
    assert not torch.cat(compared).any(), "the point stays where it is"


def test_sequence_sampler_keeps_goals_in_episode():
    buffer = HindsightReplayBuffer(
        lambda rows: torch.ones(len(rows), 1), her_ratio=1.0, strategy="future",
        batch_size=256, storage=LazyTensorStorage(300), sampler=SequenceSampler(4),
    )  # fmt: skip
    replay, episodes = ReplayMinibatches(buffer), Episodes(3, seed=0)
    for _ in range(20):
        replay.extend(episodes.batch(4))
    sample = buffer.sample()
    assert torch.equal(sample["where"][:, :2], sample["desired_goal"][:, :2])


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
@pytest.mark.parametrize("once", [False, True], ids=["both observations", "stored once"])
def test_hindsight_goals_match_reference_loop(strategy, once):
    """Goals are states reached after an action; each allowed one is drawn, and no other."""
    steps, num_envs, ends = 6, 2, {0: (2, 5), 1: (3,)}
    storage = ObservationStorage(20) if once else LazyTensorStorage(20)
    reward = lambda rows: rows["next", "achieved_goal"] - rows["desired_goal"]  # noqa: E731
    buffer = HindsightReplayBuffer(
        reward, her_ratio=1.0, strategy=strategy, storage=storage, batch_size=600
    )
    rows = torch.zeros(num_envs, steps, 1)
    done = torch.zeros(num_envs, steps, 1, dtype=torch.bool)
    for env in range(num_envs):
        for step in range(steps):
            rows[env, step] = 100 * env + 10 * step
            done[env, step] = step in ends[env]
    after = dict.fromkeys(("observation", "achieved_goal"), rows + 1)  # no row's own start
    after |= {"desired_goal": rows * 0 - 1, "reward": rows * 0, "done": done, "terminated": done}
    before = {"observation": rows, "achieved_goal": rows, "desired_goal": rows * 0 - 1}
    replay = ReplayMinibatches(buffer)
    replay.extend(TensorDict({**before, "next": after}, [num_envs, steps]))
    allowed: dict[float, set[float]] = {}
    for env in range(num_envs):
        begin = 0
        for step in range(steps):
            end = next((one for one in ends[env] if one >= step), steps - 1)
            first = {"future": step, "final": end, "episode": begin}[strategy]
            reached = {100.0 * env + 10 * later + 1 for later in range(first, end + 1)}
            allowed[100.0 * env + 10 * step] = reached
            begin = step + 1 if step in ends[env] else begin
    torch.manual_seed(0)
    for sample in (buffer.sample(), replay._samples(600, 1)[0]):
        drawn: dict[float, set[float]] = {start: set() for start in allowed}
        starts, goals = (sample[key].flatten() for key in ("observation", "desired_goal"))
        for start, goal in zip(starts.tolist(), goals.tolist()):
            drawn[start].add(goal)
        assert drawn == allowed
        assert torch.equal(sample["next", "desired_goal"].flatten(), goals)
        assert torch.equal(sample["next", "reward"].flatten(), starts + 1 - goals)
