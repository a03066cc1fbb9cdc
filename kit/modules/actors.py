"""Policies for environments with discrete, continuous or mixed actions."""

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
from torch import nn
from torchrl.modules import Actor, ProbabilisticActor

from kit.modules.backbones import make_backbone, observation_network
from kit.modules.critics import make_value
from kit.modules.distributions import TanhNormal
from kit.modules.gsde import state_dependent_head
from kit.modules.heads import (
    Continuous,
    Heads,
    MaskedHeads,
    Parameters,
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
    """Create a policy for the environment's observation and action spaces.

    The distribution of discrete actions is categorical. ``continuous`` selects the distribution of
    continuous actions. The entries of a ``Dict`` action space are sampled independently.

    Args:
        env: the environment. If it has a single discrete action and an observation ``action_mask``,
            forbidden actions have probability 0.
        hidden_sizes: hidden layer sizes; ignored if ``body`` is given.
        activation: name of the activation function.
        continuous: distribution of continuous actions. ``normal``: unbounded, with a learned
            state-independent standard deviation (the environment clips actions); ``tanh_normal``:
            squashed to the bounds, with a state-dependent log standard deviation bounded to [-5, 2]
            by a tanh; ``clipped_tanh_normal``: as ``tanh_normal``, but the log standard deviation
            is clipped to [-20, 2]; ``gsde``, ``tanh_gsde`` and ``tanh_gsde_expln``:
            unbounded or squashed, with state-dependent exploration (see :mod:`kit.modules.gsde`);
            ``deterministic``: scaled to the bounds by a tanh (for TD3 and DDPG).
        initial_log_std: initial log standard deviation of the ``normal`` and gSDE distributions.
        body: backbone to share with a critic, such as one from :func:`make_backbone`. It must write
            ``features`` and have an attribute ``out_features``. ``None``: create hidden layers.
        after: factory of extra layers, inserted after the joined observations and after each
            activation; cannot be combined with ``body``.
        orthogonal: whether to initialise weights orthogonally, with gain 0.01 in the last layer.
        return_log_prob: whether the policy writes log-probabilities. For squashed actions, it then
            also writes ``action_pre_tanh``, from which losses recompute the log-probabilities.

    Raises:
        SettingError: if the action space is not supported or cannot be masked, if an observation
            has the same name as a policy output, or if ``body`` is combined with ``after`` or a
            deterministic policy.
    """
    one_of("continuous", continuous, get_args(Continuous))
    if continuous == "deterministic":
        if body is not None:
            reason = "A deterministic policy cannot use a shared backbone"
            raise SettingError("body", type(body).__name__, reason, [None])
        return _deterministic(env, hidden_sizes, activation, orthogonal, after)
    gain = 0.01 if orthogonal else None
    heads: dict[Any, Parameters]
    state_dependent = "gsde" in continuous
    if state_dependent:
        if body is None:
            body = make_backbone(env, hidden_sizes, activation, orthogonal=orthogonal)
        heads = state_dependent_head(env, body.out_features, continuous, initial_log_std, gain)
    else:
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
        reason = "Extra layers cannot be added to an existing backbone (body)"
        raise SettingError("after", after, reason, "Add the layers to the backbone")
    elif state_dependent:
        network = nn.Identity()  # the head reads the features
    else:
        network = linear(body.out_features, columns, gain)
    head = kind(network, list(heads.values()))
    module: Any = TensorDictModule(head, in_keys=[*keys, *masks], out_keys=parameters)
    if body is not None:
        module = TensorDictSequential(body, module)
    if conflicts := {leaf.key for leaf in env.observation_leaves} & {*module.out_keys}:
        name = min(conflicts, key=str)
        reason = "A policy output has the same name and would overwrite the observation"
        hint = f"Rename the observation, for example to env_{name}"
        raise SettingError("observation_space", name, reason, hint)
    first = next(iter(heads.values()))
    composite = {
        "distribution_map": {key: head.distribution for key, head in heads.items()},
        "extra_kwargs": {key: head.keywords for key, head in heads.items()},
    }
    is_single = len(heads) == 1
    squashes = any(head.distribution is TanhNormal for head in heads.values())
    make = SquashedActor if squashes and return_log_prob else ProbabilisticActor
    return make(
        module,
        in_keys=parameters if is_single else ["params"],
        out_keys=list(heads),
        distribution_class=first.distribution if is_single else CompositeDistribution,
        distribution_kwargs=first.keywords if is_single else composite,
        return_log_prob=return_log_prob,
        spec=env.action_spec if is_single else None,
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
    orthogonal: bool = True,
    device: torch.device | str = "cpu",
    **body: Any,
) -> tuple[ProbabilisticActor, TensorDictModuleBase]:
    """Create a policy, as in :func:`make_actor`, and a state-value function.

    Args:
        env: the environment.
        hidden_sizes: hidden layer sizes of both networks.
        activation: name of the activation function.
        critic_hidden_sizes: hidden layer sizes of the critic; ``None``: same as ``hidden_sizes``.
        shared_backbone: whether policy and critic share their hidden layers.
        continuous: distribution of continuous actions.
        initial_log_std: initial log standard deviation of the ``normal`` and gSDE distributions.
        orthogonal: whether to initialise weights orthogonally.
        device: device of the networks.
        **body: further arguments for :func:`make_backbone`, such as ``convolutions``.

    Raises:
        SettingError: if the backbone is recurrent but not shared (collectors store only the
            policy's hidden state), or if it is shared and ``critic_hidden_sizes`` is set.
    """
    shape: dict[str, Any] = {"hidden_sizes": hidden_sizes, "activation": activation}
    shape["orthogonal"] = orthogonal
    critic_shape = dict(shape)
    if critic_hidden_sizes is not None:
        critic_shape["hidden_sizes"] = critic_hidden_sizes
        if shared_backbone:
            reason = "With shared_backbone, the critic uses the actor's hidden layers"
            raise SettingError("critic_hidden_sizes", [*critic_hidden_sizes], reason, [None])
    if body.get("recurrent") and not shared_backbone:
        reason = "Collectors only store the policy's hidden state, so the critic must share it"
        raise SettingError("shared_backbone", False, reason, [True])
    first = make_backbone(env, **shape, **body) if shared_backbone or body else None
    separate = body and not shared_backbone
    second = make_backbone(env, **critic_shape, **body) if separate else first
    kind: dict[str, Any] = {"continuous": continuous, "initial_log_std": initial_log_std}
    actor = make_actor(env, **shape, body=first, **kind).to(device)
    critic = make_value(env, **critic_shape, body=second).to(device)
    return actor, critic
