"""Actors that also write pre-tanh actions, from which losses compute exact log-probabilities."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.nn import CompositeDistribution, TensorDictModuleBase
from torchrl.data import Composite
from torchrl.envs.utils import exploration_type
from torchrl.modules import (
    ProbabilisticActor,
    SafeProbabilisticModule,
    SafeProbabilisticTensorDictSequential,
)

from kit.modules.distributions import TanhNormal


def pre_tanh_key(action: Any) -> Any:
    """Return the key of the pre-tanh action, such as ``action_pre_tanh`` for ``action``."""
    if isinstance(action, str):
        return f"{action}_pre_tanh"
    return (*action[:-1], f"{action[-1]}_pre_tanh")


class SquashedSampling(SafeProbabilisticModule):  # type: ignore[misc, unused-ignore]
    """Samples squashed actions and also writes the pre-tanh actions, as ``action_pre_tanh``.

    :meth:`get_dist` reads the pre-tanh actions, so losses compute exact log-probabilities of stored
    actions even if the tanh is saturated.
    """

    @property
    def out_keys(self) -> list[Any]:
        """Keys of actions, log-probabilities and pre-tanh actions."""
        single = {self._out_keys[0]: self.distribution_class}
        kinds = self.distribution_kwargs.get("distribution_map", single)
        squashed = [pre_tanh_key(key) for key, kind in kinds.items() if kind is TanhNormal]
        return [*super().out_keys, *squashed]

    def get_dist(self, tensordict: TensorDictBase) -> Any:
        """Return the distribution, with the pre-tanh actions from the TensorDict if available."""
        dist = super().get_dist(tensordict)
        for action, part in self._parts(dist).items():
            if isinstance(part, TanhNormal):
                part.pre_tanh = tensordict.get(pre_tanh_key(action), None)
        return dist

    build_dist_from_params = get_dist

    def _parts(self, dist: Any) -> dict[Any, Any]:
        """Return a dict with the distribution of each action."""
        if isinstance(dist, CompositeDistribution):
            return dist.dists  # type: ignore[no-any-return]
        return {self._out_keys[0]: dist}

    def forward(
        self,
        tensordict: TensorDictBase,
        tensordict_out: TensorDictBase | None = None,
        _requires_sample: bool = True,
    ) -> TensorDictBase:
        """Sample and write actions, pre-tanh actions and log-probabilities."""
        if not _requires_sample:
            return super().forward(tensordict, tensordict_out, _requires_sample=False)  # type: ignore[no-any-return]
        out = tensordict if tensordict_out is None else tensordict_out
        parts = self._parts(self.get_dist(tensordict))
        for key, log_prob_key in zip(self._out_keys, self.log_prob_keys, strict=True):
            part = parts[key]
            action = self._dist_sample(part, interaction_type=exploration_type())
            out.set(key, action).set(log_prob_key, part.log_prob(action))
            if isinstance(part, TanhNormal):
                out.set(pre_tanh_key(key), part.pre_tanh)
        return out


class SquashedActor(ProbabilisticActor):  # type: ignore[misc, unused-ignore]
    """A policy that samples with :class:`SquashedSampling`.

    Args:
        module: module that maps observations to distribution parameters.
        out_keys: keys of the actions.
        spec: action spec if there is a single action, otherwise ``None``.
        **sampling: further arguments for TorchRL's ``ProbabilisticActor``.
    """

    def __init__(
        self,
        module: TensorDictModuleBase,
        *,
        out_keys: list[Any],
        spec: Any = None,
        **sampling: Any,
    ) -> None:
        specs = None if spec is None else Composite({out_keys[0]: spec})
        last = SquashedSampling(out_keys=out_keys, spec=specs, **sampling)
        SafeProbabilisticTensorDictSequential.__init__(self, module, last)
