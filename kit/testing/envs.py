"""Small test environments for memory, pixels, delayed rewards, exploration, goals and masks."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Step = tuple[NDArray[Any], float, bool, bool, dict[str, Any]]


class _Task(gym.Env[NDArray[Any], np.int64]):
    """Base class of tasks whose episodes have at most ``length`` steps."""

    length = 8

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[Any], dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed, options=options)
        self.count = 0
        return self._next_observation()

    def _next_observation(self) -> tuple[NDArray[Any], dict[str, Any]]:
        """Return the next observation and its ``info``."""
        raise NotImplementedError

    def _finish_step(self, reward: bool, terminated: bool = False) -> Step:
        """Count a step and return its results. The reward is 1 if ``reward`` is true, else 0."""
        self.count += 1
        seen, info = self._next_observation()
        return seen, float(reward), terminated or self.count == self.length, False, info


class Recall(_Task):
    """Memory task: the action must equal a cue that was shown ``delay`` steps earlier.

    The observation is the one-hot cue (zero after the first step) and a flag that is 1 in the last
    step. The last action earns 1 if it equals the cue. All cues are equally likely, so a memoryless
    policy has an expected return of at most ``1 / choices``.

    Args:
        delay: steps between the cue and the last step; an episode has ``delay + 1`` steps.
        choices: number of cues.
    """

    def __init__(self, delay: int = 8, choices: int = 4) -> None:
        self.length, self.choices = delay + 1, choices
        self.observation_space = spaces.Box(0.0, 1.0, (choices + 1,), np.float32)
        self.action_space = spaces.Discrete(choices)

    def step(self, action: np.int64) -> Step:
        """Take an action; only the last action of an episode can earn a reward."""
        return self._finish_step(self.count == self.length - 1 and int(action) == self.cue)

    def _next_observation(self) -> tuple[NDArray[np.float32], dict[str, Any]]:
        seen = np.zeros(self.choices + 1, np.float32)
        if self.count == 0:
            self.cue = int(self.np_random.integers(self.choices))
            seen[self.cue] = 1.0
        seen[-1] = float(self.count == self.length - 1)
        return seen, {}


class GoNoGo(_Task):
    """Memory task: the action must follow a go or no-go cue shown ``delay`` steps earlier.

    The observation has flags for the go cue and the no-go cue (both zero after the first step) and
    a flag that is 1 in the last step. The last action earns 1 if it is 0 after a go cue, or not 0
    after a no-go cue. Both cues are equally likely, so a memoryless policy has an expected return
    of at most 1 / 2.

    Args:
        delay: steps between the cue and the last step; an episode has ``delay + 1`` steps.
        actions: number of actions; action 0 is "go".
    """

    def __init__(self, delay: int = 8, actions: int = 4) -> None:
        self.length = delay + 1
        self.observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Discrete(actions)

    def step(self, action: np.int64) -> Step:
        """Take an action; only the last action of an episode can earn a reward."""
        return self._finish_step(self.count == self.length - 1 and (int(action) == 0) == self.go)

    def _next_observation(self) -> tuple[NDArray[np.float32], dict[str, Any]]:
        first = self.count == 0
        if first:
            self.go = bool(self.np_random.integers(2))
        seen = first and self.go, first and not self.go, self.count == self.length - 1
        return np.array(seen, np.float32), {}


class Glimpse(_Task):
    """Pixel task: choose the quarter of the image that contains a bright square.

    Observations are uint8 images ``[size, size, 1]``. An episode has 8 steps, and each correct
    action earns 1.

    Args:
        size: image size in pixels.
        render_mode: ``rgb_array`` enables rendering.
    """

    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 4}

    def __init__(self, size: int = 12, render_mode: str | None = None) -> None:
        self.size, self.render_mode = size, render_mode
        self.observation_space = spaces.Box(0, 255, (size, size, 1), np.uint8)
        self.action_space = spaces.Discrete(4)

    def step(self, action: np.int64) -> Step:
        """Choose a quarter of the image."""
        return self._finish_step(int(action) == self.quarter)

    def render(self) -> NDArray[np.uint8]:
        """Return the image, enlarged eight times."""
        return self.image.repeat(8, axis=0).repeat(8, axis=1).repeat(3, axis=2)

    def _next_observation(self) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        half = self.size // 2
        row, column = (int(place) for place in self.np_random.integers(half - 1, size=2))
        self.quarter = int(self.np_random.integers(4))
        row, column = row + half * (self.quarter // 2), column + half * (self.quarter % 2)
        self.image = np.zeros((self.size, self.size, 1), np.uint8)
        self.image[row : row + 2, column : column + 2] = 255
        return self.image, {}


class Catch(_Task):
    """Delayed-reward task: catch a falling ball with a paddle in the last row.

    The observation is a flattened board with ``rows * columns`` entries: 1 for the ball and the
    paddle, else 0. Actions 0, 1 and 2 move the paddle by -1, 0 and 1 columns. The last step earns 1
    if the ball is caught, else -1 (``catch`` in Osband et al. 2020, "Behaviour suite for
    reinforcement learning").

    Args:
        rows: number of rows; an episode has ``rows - 1`` steps.
        columns: number of columns.
    """

    def __init__(self, rows: int = 10, columns: int = 5) -> None:
        self.length, self.columns = rows - 1, columns
        self.ball, self.paddle = 0, 0
        self.observation_space = spaces.Box(0.0, 1.0, (rows * columns,), np.float32)
        self.action_space = spaces.Discrete(3)

    def step(self, action: np.int64) -> Step:
        """Move the paddle, and move the ball down by one row."""
        self.paddle = min(max(self.paddle + int(action) - 1, 0), self.columns - 1)
        seen, reward, ended, truncated, info = self._finish_step(self.paddle == self.ball)
        return seen, (2 * reward - 1) * ended, ended, truncated, info

    def _next_observation(self) -> tuple[NDArray[np.float32], dict[str, Any]]:
        if self.count == 0:
            self.ball = int(self.np_random.integers(self.columns))
            self.paddle = self.columns // 2
        board = np.zeros((self.length + 1, self.columns), np.float32)
        board[self.count, self.ball] = board[-1, self.paddle] = 1.0
        return board.flatten(), {}


class Allowed(_Task):
    """Action-mask task: choose the allowed action nearest to the number in the observation.

    The nearest action earns 1. ``info["action_mask"]`` marks the allowed actions. A forbidden
    action ends the episode, which otherwise has 8 steps.

    Args:
        choices: number of actions; a third of the actions are allowed in each step.
    """

    def __init__(self, choices: int = 12) -> None:
        self.choices = choices
        self.observation_space = spaces.Box(0.0, 1.0, (choices,), np.float32)
        self.action_space = spaces.Discrete(choices)

    def step(self, action: np.int64) -> Step:
        """Choose an action."""
        forbidden = not self.mask[int(action)]
        return self._finish_step(not forbidden and int(action) == self.best, forbidden)

    def _next_observation(self) -> tuple[NDArray[np.float32], dict[str, Any]]:
        number = int(self.np_random.integers(self.choices))
        allowed = self.np_random.permutation(self.choices)[: self.choices // 3]
        self.mask = np.isin(np.arange(self.choices), allowed)
        self.best = int(min(allowed, key=lambda choice: (abs(choice - number), choice)))
        seen = np.zeros(self.choices, np.float32)
        seen[number] = 1.0
        return seen, {"action_mask": self.mask.astype(np.int8)}


class Maze(gym.Env[NDArray[np.float32], np.int64]):
    """Exploration task: a square grid of rooms with doors and a goal in the opposite corner.

    Each room has 5 x 5 cells. The observation is the position, scaled to [-1, 1]. Moves into
    walls have no effect. Reaching the goal earns 1 and ends the episode. Otherwise, the episode is
    truncated after ``steps`` steps.

    Args:
        rooms: number of rooms per side.
        steps: maximum number of steps per episode.
    """

    ROOM = 5
    MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1))

    def __init__(self, rooms: int = 3, steps: int = 100) -> None:
        self.side, self.steps = rooms * (self.ROOM + 1) - 1, steps
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(len(self.MOVES))

    def is_wall(self, x: int, y: int) -> bool:
        """Return whether a cell is outside the maze or part of a wall."""
        if not (0 <= x < self.side and 0 <= y < self.side):
            return True
        between = [place % (self.ROOM + 1) == self.ROOM for place in (x, y)]
        middle = [place % (self.ROOM + 1) == self.ROOM // 2 for place in (x, y)]
        return all(between) or (between[0] and not middle[1]) or (between[1] and not middle[0])

    def _observe(self) -> NDArray[np.float32]:
        return np.array([2 * at / (self.side - 1) - 1 for at in self.place], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start an episode in the first corner."""
        super().reset(seed=seed)
        self.place, self.count = (0, 0), 0
        return self._observe(), {}

    def step(self, action: np.int64) -> Step:
        """Move in one of four directions."""
        x, y = (here + move for here, move in zip(self.place, self.MOVES[int(action)]))
        if not self.is_wall(x, y):
            self.place = (x, y)
        self.count += 1
        found = self.place == (self.side - 1, self.side - 1)
        return self._observe(), float(found), found, self.count >= self.steps, {}


class Reach(gym.Env[dict[str, NDArray[np.float32]], NDArray[np.float32]]):
    """Sparse-reward goal task: move a point in a cube to a random goal.

    The observation is a ``Dict`` as in Gymnasium-Robotics' ``GoalEnv``. The reward is -1 if the
    point is farther from the goal than ``tolerance``, else 0. An episode has ``steps`` steps.

    Args:
        dimensions: number of dimensions of the cube, whose coordinates are in [-1, 1].
        tolerance: maximum distance at which the goal counts as reached.
        speed: maximum change of a coordinate per step.
        steps: number of steps per episode.
    """

    def __init__(
        self, dimensions: int = 3, tolerance: float = 0.1, speed: float = 0.2, steps: int = 25
    ) -> None:
        self.tolerance, self.speed, self.steps = tolerance, speed, steps
        place = spaces.Box(-1.0, 1.0, (dimensions,), np.float32)
        names = ("observation", "achieved_goal", "desired_goal")
        self.observation_space = spaces.Dict(dict.fromkeys(names, place))
        self.action_space = spaces.Box(-1.0, 1.0, (dimensions,), np.float32)

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        """Return rewards for goals ``[..., dimensions]``: 0 if the goal is reached, else -1."""
        del info
        distance = np.linalg.norm(achieved_goal - desired_goal, axis=-1)
        return -(distance > self.tolerance).astype(np.float32)

    def _observe(self) -> dict[str, NDArray[np.float32]]:
        place = self.place.copy()
        return {"observation": place, "achieved_goal": place, "desired_goal": self.goal}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, NDArray[np.float32]], dict[str, Any]]:
        """Start an episode in the centre with a new goal."""
        super().reset(seed=seed)
        shape = self.action_space.shape
        self.place, self.count = np.zeros(shape, np.float32), 0
        self.goal = self.np_random.uniform(-1, 1, shape).astype(np.float32)
        return self._observe(), {}

    def step(
        self, action: NDArray[np.float32]
    ) -> tuple[dict[str, NDArray[np.float32]], float, bool, bool, dict[str, Any]]:
        """Move the point."""
        self.place = np.clip(self.place + self.speed * action, -1, 1).astype(np.float32)
        self.count += 1
        reward = float(self.compute_reward(self.place, self.goal, {}))
        return self._observe(), reward, False, self.count >= self.steps, {"is_success": reward == 0}


for _env in (Recall, GoNoGo, Glimpse, Catch, Allowed, Maze, Reach):
    gym.register(f"kit/{_env.__name__}-v0", _env)
