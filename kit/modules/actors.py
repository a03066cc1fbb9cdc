"""Policies for any environment the kit makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import torch
from tensordict.nn import (
    CompositeDistribution,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torchrl.modules import Actor, ProbabilisticActor

from kit.modules.backbones import make_backbone, observation_network
from kit.modules.critics import make_value
from kit.modules.distributions import TanhNormal
from kit.modules.heads import (
    Continuous,
    Heads,
    MaskedHeads,
    Scaled,
    action_masks,
    bounds_of,
    head_of,
    only_action,
    parameter_keys,
)
from kit.modules.networks import Layers, linear
from kit.modules.recurrent import Recurrent
from kit.modules.squashed import SquashedActor
from kit.steps import SettingError
from kit.steps.errors import one_of


def make_actor(
    env: Any,
    hidden_sizes: Sequence[int] = (64, 64),
    activation: str = "tanh",
    *,
    continuous: Continuous = "normal",
    initial_log_std: float = 0.0,
    body: TensorDictModule | Recurrent | None = None,
    after: Layers | None = None,
    orthogonal: bool = True,
    return_log_prob: bool = True,
) -> ProbabilisticActor | Actor:
    """Make a policy for the environment's observations and actions.

    Discrete actions are drawn from categorical distributions, continuous ones from normal
    distributions, entries of a ``Dict`` space independently of each other.

    Args:
        env: the environment. Where it has an observation ``action_mask`` and one discrete action,
            forbidden choices have probability 0.
        hidden_sizes: widths of the hidden layers; those of ``body`` where one is given.
        activation: name of the activation between them.
        continuous: ``normal``: unbounded, with one learned deviation for all states (actions are
            clipped); ``tanh_normal``: squashed to the bounds, deviation learned for each state, its
            logarithm kept in [-5, 2] by a tanh; ``clipped_tanh_normal``: clipped to [-20, 2];
            ``deterministic``: one action, scaled to the bounds by tanh (for TD3 and DDPG).
        initial_log_std: initial log standard deviation of ``normal``.
        body: module that writes ``features``, shared with a critic, of :func:`make_backbone` or any
            whose ``out_features`` is their number; ``None``: a network of its own.
        after: layers after the joined observations and after each activation; not with ``body``.
        orthogonal: whether weights start orthogonal, the last layer's with gain 0.01.
        return_log_prob: whether the policy writes the log-probability of its actions; and of
            squashed ones ``action_pre_tanh``, from which losses compute it again.

    Raises:
        SettingError: if an action is of a kind this policy cannot choose, or cannot be masked; an
            observation has the name of an output; or if ``body`` comes with ``after``.
    """
    one_of("continuous", continuous, get_args(Continuous))
    if continuous == "deterministic":
        if body is not None:
            works = "leave body out: a deterministic policy has a network of its own"
            raise SettingError("body", type(body).__name__, "cannot be shared", works)
        return _deterministic(env, hidden_sizes, activation, orthogonal, after)
    kinds = continuous, initial_log_std
    heads = {leaf.key: head_of(env, leaf, *kinds) for leaf in env.action_leaves}
    columns = sum(head.columns for head in heads.values())
    parameters = parameter_keys(heads)
    masks = action_masks(env, columns if parameters == ["logits"] else 0)
    kind = MaskedHeads if masks else Heads
    keys: list[Any] = ["features"]
    network: Any
    if body is None:
        sizes = (columns, hidden_sizes, activation, orthogonal, 0.01)
        keys, network = observation_network(env, *sizes, masks, after=after)
    elif after is not None:
        why = "is for a network of the actor's own, and body is given"
        raise SettingError("after", after, why, "give the body such layers")
    else:
        network = linear(body.out_features, columns, 0.01 if orthogonal else None)
    head = kind(network, list(heads.values()))
    module: Any = TensorDictModule(head, in_keys=[*keys, *masks], out_keys=parameters)
    if body is not None:
        module = TensorDictSequential(body, module)
    if both := {leaf.key for leaf in env.observation_leaves} & {*module.out_keys}:
        why = "is written by the policy, in whose losses it would stand for the observation"
        works = f"rename it, to own_{min(both, key=str)} for example"
        raise SettingError("observation_space", min(both, key=str), why, works)
    one = next(iter(heads.values()))
    several = {
        "distribution_map": {key: head.distribution for key, head in heads.items()},
        "extra_kwargs": {key: head.keywords for key, head in heads.items()},
    }
    is_one = len(heads) == 1
    squashes = any(head.distribution is TanhNormal for head in heads.values())
    make = SquashedActor if squashes and return_log_prob else ProbabilisticActor
    return make(
        module,
        in_keys=parameters if is_one else ["params"],
        out_keys=list(heads),
        distribution_class=one.distribution if is_one else CompositeDistribution,
        distribution_kwargs=one.keywords if is_one else several,
        return_log_prob=return_log_prob,
        spec=env.action_spec if is_one else None,
    )


def _deterministic(
    env: Any,
    hidden_sizes: Sequence[int],
    activation: str,
    orthogonal: bool,
    after: Layers | None,
) -> Actor:
    leaf = only_action(env, "Box", "a deterministic policy", "make_q_network")
    action_masks(env, 0)
    spec = env.full_action_spec[leaf.key]
    head = Scaled(spec.shape[1:], *bounds_of(leaf, spec))
    sizes = (head.columns, hidden_sizes, activation, orthogonal, 0.01)
    keys, network = observation_network(env, *sizes, after=after)
    return Actor(Heads(network, [head]), in_keys=keys, out_keys=[leaf.key], spec=spec[0].clone())


def make_actor_critic(
    env: Any,
    hidden_sizes: Sequence[int] = (64, 64),
    activation: str = "tanh",
    *,
    critic_hidden_sizes: Sequence[int] | None = None,
    shared_backbone: bool = False,
    continuous: Continuous = "normal",
    initial_log_std: float = 0.0,
    device: torch.device | str = "cpu",
    **body: Any,
) -> tuple[ProbabilisticActor, TensorDictModuleBase]:
    """Make a policy, as :func:`make_actor` does, and its state-value function.

    Args:
        env: the environment.
        hidden_sizes: widths of the hidden layers of each.
        activation: name of the activation between them.
        critic_hidden_sizes: widths of the critic's; ``None``: the same.
        shared_backbone: whether they share their hidden layers.
        continuous: distribution of continuous actions.
        initial_log_std: initial log standard deviation of ``normal``.
        device: where they are.
        **body: further arguments of :func:`make_backbone`: convolutions, a recurrent layer.

    Raises:
        SettingError: if a recurrent body is not shared: collectors keep the policy's hidden state
            alone; or if the critic's widths are given and the layers are shared.
    """
    shape: dict[str, Any] = {"hidden_sizes": hidden_sizes, "activation": activation}
    of_critic = dict(shape)
    if critic_hidden_sizes is not None:
        of_critic["hidden_sizes"] = critic_hidden_sizes
        if shared_backbone:
            why = "is of layers that the critic does not have: it shares the actor's"
            raise SettingError("critic_hidden_sizes", [*critic_hidden_sizes], why, [None])
    if body.get("recurrent") and not shared_backbone:
        why = "leaves the critic without the hidden state, which collectors keep for the policy"
        raise SettingError("shared_backbone", False, why, [True])
    own = shared_backbone or body
    first = make_backbone(env, **shape, **body) if own else None
    second = make_backbone(env, **of_critic, **body) if body and not shared_backbone else first
    kind: dict[str, Any] = {"continuous": continuous, "initial_log_std": initial_log_std}
    actor = make_actor(env, **shape, body=first, **kind).to(device)
    critic = make_value(env, **of_critic, body=second).to(device)
    return actor, critic
