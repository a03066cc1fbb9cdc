"""Settings of pyrado's training scripts, and runs with them."""

from __future__ import annotations

import pytest

from kit.dialects import Pyrado
from kit.dialects.carried import map_fields
from recipes import dqn, ppo, sac, svpg
from tests.errors import raises_setting

SCRIPT = {
    "algo": "PPO",
    "env_max_steps": "500",
    "max_iter": "200 if policy.name == FNNPolicy.name else 75",
    "min_steps": "30 * env.max_steps",
    "num_epoch": "7",
    "max_grad_norm": "1.0",
    "lr_scheduler": "lr_scheduler.ExponentialLR",
    "lr_scheduler_hparam": "dict(gamma=0.999)",
    "num_workers": "8",
    "critic.num_epoch": "5",
    "critic.standardizer": "None",
    "critic.lr": "7e-4",
    "critic.max_grad_norm": "6.0",
    "critic.lr_scheduler": "lr_scheduler.ExponentialLR",
    "critic.lr_scheduler_hparam": "dict(gamma=0.99)",
}


# ---------------------------------------------------------------------- expressions of scripts
def test_script_expressions_are_evaluated():
    given = Pyrado.from_settings(SCRIPT)
    assert (given.max_iter, given.min_steps, given.num_epoch) == (200, 15_000, 7)
    assert (given.max_grad_norm, given.lr_scheduler_hparam) == (1.0, {"gamma": 0.999})
    assert (given.critic.standardizer, given.critic.lr) == (None, 7e-4)
    assert given.to_plan().frames_per_batch == 15_000
    assert "max_iter is the value that holds if policy.name == FNNPolicy.name." in given.notes()


@pytest.mark.parametrize(
    ("text", "value"),
    [("2 * env.max_steps", 40), ("int(1e2) + 10**2", 200.0), ("-(-7 // 2)", 4), ("1000", 1000)],
)
def test_arithmetic_of_scripts(text, value):
    assert Pyrado(min_steps=text, env_max_steps=20).min_steps == value


def test_script_needs_env_max_steps():
    with raises_setting("env_max_steps"):
        Pyrado.from_settings({"min_steps": "30 * env.max_steps"})


@pytest.mark.parametrize("text", ["open('x')", "1 / 0", "2 **", "[1 for _ in x]", "~1"])
def test_expressions_never_run_code(text):
    with raises_setting("min_steps"):
        Pyrado(min_steps=text)


# ---------------------------------------------------------------------- what acts
def test_ppo_script_maps_to_recipe():
    values, lines = map_fields(Pyrado.from_settings(SCRIPT), ppo.Config(), "ppo")
    assert values == {
        "max_grad_norm": 1.0, "lr_schedule": "exponential 0.999 1/7",
        "critic_epochs": 5, "critic_learning_rate": 7e-4, "critic_max_grad_norm": 6.0,
        "critic_lr_schedule": "exponential 0.99 1/5", "advantage_norm": "batch",
    }  # fmt: skip
    assert lines[0] == "accepted without effect: num_workers=8 (it does not affect the samples)"


def test_ppo2_ignores_critic_optimizer():
    given = Pyrado.from_settings(SCRIPT | {"algo": "ppo2"})
    values, lines = map_fields(given, ppo.Config())
    assert values == {
        "max_grad_norm": 1.0, "lr_schedule": "exponential 0.999 1/7", "clip_value": True,
        "advantage_norm": "batch",
    }  # fmt: skip
    assert "critic.lr=0.0007 (ppo2 does not use it)" in lines[0]


def test_ppo_variants_have_their_defining_settings():
    critic = {"critic_epochs": 10, "critic_max_grad_norm": None}
    assert map_fields(Pyrado(), ppo.Config(), "ppo")[0] == critic
    assert map_fields(Pyrado(algo="ppo2"), ppo.Config())[0] == {"clip_value": True}
    assert map_fields(Pyrado(algo="ppo2"), ppo.Config(clip_value=0.3))[0] == {}
    assert map_fields(Pyrado(), ppo.Config(critic_epochs=0), "ppo")[0] == {
        "critic_max_grad_norm": None
    }


@pytest.mark.parametrize(
    ("scheduler", "arguments", "schedule"),
    [
        (None, None, "constant"),
        ("ExponentialLR", {"gamma": 0.9}, "exponential 0.9"),
        ("StepLR", {"step_size": 5}, "exponential 0.1 5"),
        ("MultiStepLR", {"milestones": [4, 2, 9], "gamma": 0.5}, "piecewise 0.25 0.5 0.5 0.25"),
        ("MultiStepLR", {"milestones": [8]}, "constant"),
    ],
)
def test_torch_scheduler_maps_to_schedule(scheduler, arguments, schedule):
    given = Pyrado(max_iter=8, lr_scheduler=scheduler, lr_scheduler_hparam=arguments)
    assert map_fields(given, dqn.Config(), "dql")[0] == {"lr_schedule": schedule}


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("lr_scheduler", {"lr_scheduler": "LambdaLR"}),
        ("lr_scheduler_hparam", {"lr_scheduler": "ExponentialLR"}),
        ("critic.lr_scheduler", {"critic": {"lr_scheduler": "CyclicLR"}}),
    ],
)
def test_unknown_scheduler_is_rejected(field, settings):
    with raises_setting(field):
        map_fields(Pyrado(**settings), ppo.Config(), "ppo")


# ---------------------------------------------------------------------- runs
@pytest.mark.slow
def test_ppo_schedules_step_once_per_epoch():
    given = Pyrado(
        max_iter=3, min_steps=8, env_max_steps=4, num_epoch=2, lr=0.5, lr_scheduler="ExponentialLR",
        lr_scheduler_hparam={"gamma": 0.5}, max_grad_norm=1.0,
        critic={"num_epoch": 3, "lr": 0.5, "lr_scheduler": "StepLR", "max_grad_norm": 6.0,
                "lr_scheduler_hparam": {"step_size": 6, "gamma": 0.5}},
    )  # fmt: skip
    trainer = ppo.build(ppo.Config(steps=given, log_dir=None, progress=False))
    (rates, critics) = (
        trainer.registered_modules[f"anneal_{name}"].values[0].schedule
        for name in ("learning_rate", "critic_learning_rate")
    )
    fit = trainer.registered_modules["fit_critic"]
    trainer.run()
    assert [rates(k) for k in range(3)] == [0.5, 0.125, 0.03125]
    assert [critics(k) for k in range(3)] == [0.5, 0.5, 0.25]
    (optimizer,) = fit.update.optimizers.values()
    assert (trainer.optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["lr"]) == (
        0.5**7, 0.25
    )  # fmt: skip
    assert (trainer.update.max_grad_norm, fit.update.max_grad_norm) == (1.0, 6.0)
    assert fit.gradient_steps == 3 * 3


@pytest.mark.slow
def test_sac_schedule_steps_once_per_iteration():
    given = Pyrado(
        algo="sac", max_iter=3, memory_size=100, num_init_memory_steps=8, batch_size=4, min_steps=1,
        num_updates_per_step=1, env_max_steps=4, lr=0.5, lr_scheduler="ExponentialLR",
        lr_scheduler_hparam={"gamma": 0.5},
    )  # fmt: skip
    trainer = sac.build(sac.Config(steps=given, log_dir=None, progress=False))
    trainer.run()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5**4


SVPG = {"algo": "svpg", "max_iter": "2", "env_max_steps": 20, "num_particles": "3"}


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "each"), [({"min_steps": "50"}, 60), ({}, 20)])
def test_svpg_trains_particles_in_one_process(steps, each):
    given = Pyrado.from_settings(SVPG | steps | {"temperature": "2", "horizon": "50"})
    config = svpg.Config(steps=given, log_dir=None, progress=False)
    trainer = svpg.build(config)
    assert (config.num_particles, config.temperature) == (3, 2.0)
    ledger = trainer.run()
    assert ledger.policy_steps == given.to_plan().after(2).policy_steps == 2 * 3 * each
    assert ledger.gradient_steps == 2  # each is one step of every particle
    assert trainer.plan.minibatch_sizes(1) == [3 * each]


def test_svpg_needs_rollout_length():
    given = Pyrado(algo="svpg", num_particles=2, min_steps=50)
    with raises_setting("episode_length"):
        svpg.build(svpg.Config(steps=given, log_dir=None))
