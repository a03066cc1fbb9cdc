"""TorchRL's losses with small networks, and minibatches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl import objectives
from torchrl.data import Bounded, Categorical, OneHot
from torchrl.modules import (
    Actor,
    DistributionalQValueActor,
    NormalParamExtractor,
    OneHotCategorical,
    ProbabilisticActor,
    QValueActor,
    TanhNormal,
    ValueOperator,
)
from torchrl.objectives import LossModule, SoftUpdate

from kit.losses import CrossQLoss, DroQLoss, TD3Loss
from kit.modules import BatchRenorm

OBSERVATIONS, ACTIONS = 4, 2


class Joined(nn.Sequential):
    """A network of several inputs, joined."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(torch.cat(inputs, dim=-1))


def net(inputs: int, outputs: int, kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    return kind(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs))


def normal_actor(*first: nn.Module) -> ProbabilisticActor:
    network = nn.Sequential(*first, net(OBSERVATIONS, 2 * ACTIONS), NormalParamExtractor())
    return ProbabilisticActor(
        TensorDictModule(network, ["observation"], ["loc", "scale"]),
        in_keys=["loc", "scale"], distribution_class=TanhNormal, return_log_prob=True,
        spec=Bounded(-1.0, 1.0, (ACTIONS,)),
    )  # fmt: skip


def discrete_actor(one_hot: bool = False) -> ProbabilisticActor:
    return ProbabilisticActor(
        TensorDictModule(net(OBSERVATIONS, ACTIONS), ["observation"], ["logits"]),
        in_keys=["logits"], return_log_prob=True,
        distribution_class=OneHotCategorical if one_hot else torch.distributions.Categorical,
        spec=OneHot(ACTIONS) if one_hot else Categorical(ACTIONS),
    )  # fmt: skip


def deterministic_actor() -> Actor:
    network = nn.Sequential(net(OBSERVATIONS, ACTIONS), nn.Tanh())
    return Actor(network, spec=Bounded(-1.0, 1.0, (ACTIONS,)))


def value() -> ValueOperator:
    return ValueOperator(net(OBSERVATIONS, 1), ["observation"])


def action_value() -> ValueOperator:
    return ValueOperator(net(OBSERVATIONS + ACTIONS, 1, Joined), ["observation", "action"])


def action_values(key: str = "action_value") -> ValueOperator:
    return ValueOperator(net(OBSERVATIONS, ACTIONS), ["observation"], [key])


def q_actor() -> QValueActor:
    return QValueActor(net(OBSERVATIONS, ACTIONS), spec=OneHot(ACTIONS))


# ---------------------------------------------------------------------- minibatches
def transitions(rows: int, kind: str = "continuous", seed: int = 0) -> TensorDict:
    """A minibatch of everything that a loss may read, advantages included."""
    random = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    choices = torch.randint(ACTIONS, (rows,), generator=random)
    action = {
        "continuous": numbers(rows, ACTIONS).tanh() * 0.9,
        "choice": choices,
        "one_hot": nn.functional.one_hot(choices, ACTIONS),
    }[kind]
    terminated = torch.rand(rows, 1, generator=random) < 0.2
    return TensorDict(
        {
            "observation": numbers(rows, OBSERVATIONS),
            "action": action,
            "action_log_prob": numbers(rows) - 1,
            "loc": numbers(rows, ACTIONS),
            "scale": numbers(rows, ACTIONS).exp(),
            "logits": numbers(rows, ACTIONS),
            "advantage": numbers(rows, 1),
            "value_target": numbers(rows, 1),
            "state_value": numbers(rows, 1),
            "next": {
                "observation": numbers(rows, OBSERVATIONS),
                "reward": numbers(rows, 1),
                "terminated": terminated,
                "done": terminated,
            },
        },
        [rows],
    )


# ---------------------------------------------------------------------- losses
def _with_estimator(loss: LossModule) -> LossModule:
    loss.make_value_estimator(gamma=0.95)
    return loss


def _iql() -> LossModule:
    return objectives.IQLLoss(normal_actor(), action_value(), value_network=value())


def _discrete_iql() -> LossModule:
    return objectives.DiscreteIQLLoss(
        discrete_actor(one_hot=True), action_values("state_action_value"), value_network=value(),
        action_space="one_hot",
    )  # fmt: skip


def _shared_body() -> LossModule:
    body = TensorDictModule(net(OBSERVATIONS, 6), ["observation"], ["features"])
    head = TensorDictModule(nn.Linear(6, ACTIONS), ["features"], ["logits"])
    actor = ProbabilisticActor(
        TensorDictSequential(body, head), in_keys=["logits"],
        distribution_class=torch.distributions.Categorical, return_log_prob=True,
    )  # fmt: skip
    critic = TensorDictSequential(body, ValueOperator(nn.Linear(6, 1), ["features"]))
    return objectives.ClipPPOLoss(actor, critic, separate_losses=False)


def _distributional() -> LossModule:
    support = torch.linspace(-2, 2, 5)
    network = nn.Sequential(net(OBSERVATIONS, 5 * ACTIONS), nn.Unflatten(-1, (5, ACTIONS)))
    actor = DistributionalQValueActor(network, support=support, action_space="one_hot")
    return objectives.DistributionalDQNLoss(actor, gamma=0.95, delay_value=True)


def _droq() -> LossModule:
    network = Joined(nn.Linear(6, 8), nn.Dropout(0.2), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1))
    return DroQLoss(normal_actor(), ValueOperator(network, ["observation", "action"]))


def _crossq() -> LossModule:
    network = Joined(BatchRenorm(6), nn.Linear(6, 8), nn.ReLU(), BatchRenorm(8), nn.Linear(8, 1))
    critic = ValueOperator(network, ["observation", "action"])
    return CrossQLoss(normal_actor(BatchRenorm(OBSERVATIONS)), critic)


def _tqc() -> LossModule:
    critic = ValueOperator(net(OBSERVATIONS + ACTIONS, 5, Joined), ["observation", "action"])
    return objectives.TQCLoss(normal_actor(), critic, num_qvalue_nets=2)


Make = tuple[Callable[[], LossModule], str]

LOSSES: dict[str, Make] = {
    "ClipPPOLoss": (lambda: objectives.ClipPPOLoss(normal_actor(), value()), "continuous"),
    "ClipPPOLoss, discrete": (lambda: objectives.ClipPPOLoss(discrete_actor(), value()), "choice"),
    "ClipPPOLoss, clipped values": (
        lambda: objectives.ClipPPOLoss(discrete_actor(), value(), clip_value=0.2), "choice",
    ),
    "ClipPPOLoss, shared body": (_shared_body, "choice"),
    "KLPENPPOLoss": (lambda: objectives.KLPENPPOLoss(normal_actor(), value()), "continuous"),
    "PPOLoss": (lambda: objectives.PPOLoss(discrete_actor(), value()), "choice"),
    "A2CLoss": (lambda: objectives.A2CLoss(discrete_actor(), value()), "choice"),
    "ReinforceLoss": (
        lambda: objectives.ReinforceLoss(discrete_actor(), value()), "choice",
    ),
    "SACLoss": (
        lambda: _with_estimator(objectives.SACLoss(normal_actor(), action_value())), "continuous",
    ),
    "SACLoss with state values": (
        lambda: _with_estimator(objectives.SACLoss(normal_actor(), action_value(), value())),
        "continuous",
    ),
    "DiscreteSACLoss": (
        lambda: _with_estimator(
            objectives.DiscreteSACLoss(
                discrete_actor(one_hot=True), action_values(), action_space="one_hot",
                num_actions=ACTIONS,
            )
        ),
        "one_hot",
    ),
    "DQNLoss": (
        lambda: _with_estimator(
            objectives.DQNLoss(
                q_actor(), action_space="one_hot", delay_value=True
            )
        ),
        "one_hot",
    ),
    "DQNLoss, double": (
        lambda: _with_estimator(
            objectives.DQNLoss(
                q_actor(), action_space="one_hot", delay_value=True, double_dqn=True
            )
        ),
        "one_hot",
    ),
    "DistributionalDQNLoss": (_distributional, "one_hot"),
    "DDPGLoss": (
        lambda: _with_estimator(
            objectives.DDPGLoss(
                deterministic_actor(), action_value(), delay_actor=True, delay_value=True
            )
        ),
        "continuous",
    ),
    "TD3Loss": (
        lambda: _with_estimator(
            objectives.TD3Loss(
                deterministic_actor(), action_value(), bounds=(-1, 1), delay_actor=True
            )
        ),
        "continuous",
    ),
    "TD3Loss, one critic": (
        lambda: _with_estimator(
            TD3Loss(deterministic_actor(), action_value(), bounds=(-1, 1), delay_actor=True)
        ),
        "continuous",
    ),
    "TD3BCLoss": (
        lambda: _with_estimator(
            objectives.TD3BCLoss(
                deterministic_actor(), action_value(), bounds=(-1, 1), delay_actor=True
            )
        ),
        "continuous",
    ),
    "REDQLoss": (
        lambda: _with_estimator(
            objectives.REDQLoss(normal_actor(), action_value(), num_qvalue_nets=4)
        ),
        "continuous",
    ),
    "CrossQLoss": (
        lambda: _with_estimator(objectives.CrossQLoss(normal_actor(), action_value())),
        "continuous",
    ),
    "CrossQLoss, batch renormalisation": (lambda: _with_estimator(_crossq()), "continuous"),
    "DroQLoss": (lambda: _with_estimator(_droq()), "continuous"),
    "TQCLoss": (lambda: _with_estimator(_tqc()), "continuous"),
    "IQLLoss": (lambda: _with_estimator(_iql()), "continuous"),
    "DiscreteIQLLoss": (lambda: _with_estimator(_discrete_iql()), "one_hot"),
    "CQLLoss": (
        lambda: _with_estimator(objectives.CQLLoss(normal_actor(), action_value())), "continuous",
    ),
    "DiscreteCQLLoss": (
        lambda: _with_estimator(
            objectives.DiscreteCQLLoss(q_actor(), action_space="one_hot")
        ),
        "one_hot",
    ),
}  # fmt: skip
"""How each loss is made, and the kind of its actions."""


def make_loss(name: str, seed: int = 0) -> LossModule:
    torch.manual_seed(seed)
    return LOSSES[name][0]()


def minibatch_for(name: str, rows: int = 6, seed: int = 0) -> TensorDict:
    return transitions(rows, LOSSES[name][1], seed)


def has_targets(loss: LossModule) -> bool:
    return any(n.startswith("target_") for n, c in loss.named_children() if len(list(c.buffers())))


def soft_update(loss: LossModule, **settings: Any) -> SoftUpdate | None:
    return SoftUpdate(loss, **(settings or {"tau": 0.1})) if has_targets(loss) else None
