"""Finished episodes, noted on the device and read when somebody asks."""

from __future__ import annotations

import torch
from torch import Tensor

from kit.envs.episodes import Episode


class FinishedEpisodes:
    """A list of finished episodes that never makes the host wait for the device.

    It keeps the last ``capacity`` episodes that nobody has taken; all are counted.

    Args:
        num_envs: number of copies.
        device: where batches come from.
        capacity: episodes it keeps.
    """

    def __init__(self, num_envs: int, device: torch.device, capacity: int = 2**16) -> None:
        self.num_envs, self.capacity = num_envs, capacity
        self._ended = torch.zeros((), dtype=torch.int64, device=device)
        self._taken = 0
        # One place more than the capacity, for steps that end no episode.
        self._whole = torch.zeros(4, capacity + 1, dtype=torch.int64, device=device)
        self._returns = torch.zeros(capacity + 1, device=device)
        self._open_env_steps = torch.zeros(num_envs, dtype=torch.int64, device=device)

    def add(
        self,
        terminated: Tensor,
        truncated: Tensor,
        episode_return: Tensor,
        length: Tensor,
        env_steps: Tensor | None,
    ) -> None:
        """Take in a batch; every tensor is ``[steps, num_envs]``.

        Args:
            terminated: whether the episode ended by itself.
            truncated: whether it was cut.
            episode_return: sum of rewards since the episode began.
            length: policy steps since the episode began.
            env_steps: of each policy step; ``None``: one.
        """
        done = terminated | truncated
        made = length if env_steps is None else self._env_steps(done, env_steps)
        copies = torch.arange(self.num_envs, device=done.device).expand_as(length)
        for start in range(0, len(done), max(self.capacity // self.num_envs, 1)):
            part = slice(start, start + max(self.capacity // self.num_envs, 1))
            flat = done[part].reshape(-1)
            places = (self._ended + flat.cumsum(0) - 1) % self.capacity
            places = torch.where(flat, places, self.capacity)
            values = [copies[part], length[part], made[part], terminated[part].long()]
            whole = torch.stack([value.reshape(-1) for value in values])
            self._whole.scatter_(1, places.expand_as(whole), whole)
            self._returns.scatter_(0, places, episode_return[part].reshape(-1).float())
            self._ended += flat.sum()

    def _env_steps(self, done: Tensor, env_steps: Tensor) -> Tensor:
        """Return the env steps since each episode began, ``[steps, num_envs]``."""
        made = env_steps.long().cumsum(0)
        at_ends = (made * done).cummax(0).values
        before = torch.cat([torch.zeros_like(made[:1]), at_ends[:-1]])
        since = made - before + self._open_env_steps * (before == 0)
        self._open_env_steps = torch.where(done[-1], torch.zeros_like(since[-1]), since[-1])
        return since

    def count(self) -> int:
        """Return how many have ended; waits for the device."""
        return int(self._ended)

    def take(self) -> list[Episode]:
        """Return the episodes that ended since the last call; waits for the device."""
        ended = self.count()
        first = max(self._taken, ended - self.capacity)
        self._taken = ended
        places = torch.arange(first, ended, device=self._returns.device) % self.capacity
        whole, returns = self._whole[:, places].tolist(), self._returns[places].tolist()
        return [
            Episode(copy, value, length, made, bool(terminated))
            for copy, length, made, terminated, value in zip(*whole, returns)
        ]

    def restart(self) -> None:
        """All copies begin new episodes."""
        self._open_env_steps = torch.zeros_like(self._open_env_steps)

    def state_dict(self) -> dict[str, Tensor | int]:
        """Return what goes on; episodes that nobody took are the collector's to keep."""
        return {"ended": self.count(), "open_env_steps": self._open_env_steps.cpu().clone()}

    def load_state_dict(self, state_dict: dict[str, Tensor | int]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._taken = int(state_dict["ended"])
        self._ended.fill_(self._taken)
        self._open_env_steps.copy_(torch.as_tensor(state_dict["open_env_steps"]))
