"""How nip turns its settings into counts."""

from __future__ import annotations

from kit.dialects.nip.settings import NipSettings
from kit.steps.errors import SettingError, yes_or_no
from kit.steps.plan import StepPlan


def to_plan(nip: NipSettings) -> StepPlan:
    """The plan of resolved settings."""
    for name in ("anneal_lr", "normalize_observations", "test_run"):
        yes_or_no(name, getattr(nip, name))
    steps = nip.steps_of_each()
    frames = nip.frames(nip.dataset_size)
    _check(nip, steps, frames)
    documented = nip.version == "documented"
    epochs = 1 if nip.test_run else nip.num_epochs
    tests = nip.test_rollouts()
    return StepPlan(
        iterations=min(nip.num_iterations, 1) if nip.test_run else nip.num_iterations,
        num_envs=frames // steps,
        steps_per_env=steps,
        action_repeat=nip.action_repeat,
        max_episode_steps=nip.max_episode_steps,
        update_epochs=epochs,
        minibatch_size=nip.minibatch_size,
        minibatches_per_epoch=1 if nip.test_run else None,
        last_minibatch="smaller" if documented else "carry",
        final_evaluation=tests > 0,
        evaluation_episodes=max(tests, 1),
    )


def _check(nip: NipSettings, steps: int, frames: int) -> None:
    if nip.minibatch_size > frames:
        raise SettingError(
            "minibatch_size",
            nip.minibatch_size,
            f"is larger than the {frames} frames of an iteration: no gradient step is made, "
            "and nip then divides by zero",
            [frames],
        )
    rounds = nip.max_message_rounds
    if rounds is not None and steps < max(nip.min_message_rounds, 1):
        raise SettingError(
            "steps_per_env_per_iteration",
            steps,
            f"is less than the {nip.min_message_rounds} rounds of an episode, and nip fails "
            "in an iteration without a finished one",
            [rounds],
        )
    if nip.algo == "reinforce" and nip.version != "documented":
        raise SettingError(
            "algo",
            "reinforce",
            "fails in nip: its reward-to-go finds no end of an episode",
            ["vanilla_ppo", "spg"],
        )
