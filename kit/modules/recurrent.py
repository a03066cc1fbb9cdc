"""Recurrent networks that run without synchronising with the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn.functional import linear
from torchrl.data import Unbounded
from torchrl.envs import TensorDictPrimer

from kit.steps import SettingError

RecurrentKind = Literal["lstm", "gru"]

_STATES = {
    "lstm": ["recurrent_state_h", "recurrent_state_c"],
    "gru": ["recurrent_state"],
}
"""Keys of the hidden state, as in TorchRL's modules."""


class Recurrent(TensorDictModuleBase):
    """Hidden layers followed by one LSTM or GRU layer; writes ``features``.

    TorchRL's ``LSTMModule`` and ``GRUModule`` check on the host whether an episode has started, so
    they cannot be traced. This module has the same weights and results as PyTorch's layers. Where
    ``is_init`` is true, it multiplies the hidden state by 0.

    For inputs of batch size ``[num_envs]``, the module computes one time step. It reads the hidden
    state ``[num_envs, 1, hidden_size]`` (zeros if missing) and writes the next hidden state under
    ``("next", key)``. For sequences ``[sequences, steps]``, it starts each sequence from the hidden
    state stored in its first step, and writes no hidden state.

    Args:
        in_keys: keys of the observations.
        network: hidden layers, which map observations to a vector of size ``out_features``.
        kind: ``lstm`` or ``gru``.
        hidden_size: hidden size of the recurrent layer.
        burn_in: number of initial steps in each sequence through which no gradients flow.

    Attributes:
        out_features: size of ``features``.
        cell: PyTorch's recurrent layer, which contains the weights.
    """

    def __init__(
        self,
        in_keys: Sequence[Any],
        network: nn.Module,
        kind: RecurrentKind = "lstm",
        hidden_size: int = 64,
        burn_in: int = 0,
    ) -> None:
        super().__init__()
        self.network, self.kind, self.burn_in = network, kind, burn_in
        width = int(network.out_features)  # type: ignore[arg-type]
        layer: Any = nn.LSTM if kind == "lstm" else nn.GRU
        self.cell = layer(width, hidden_size, batch_first=True)
        for name, parameter in self.cell.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
        if kind == "lstm":  # forget gates are open initially (Jozefowicz et al. 2015, section 2.2)
            forget: Any = self.cell.bias_ih_l0
            nn.init.ones_(forget[hidden_size : 2 * hidden_size])
        self.out_features = hidden_size
        self._observed, self.states = list(in_keys), _STATES[kind]
        self.in_keys = [*in_keys, *self.states, "is_init"]
        self.out_keys = ["features", *(("next", key) for key in self.states)]

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write ``features`` and, for single time steps, the next hidden state."""
        value = self.network(*map(tensordict.get, self._observed))
        is_sequence = tensordict.ndim == 2
        if not is_sequence:
            value = value.unsqueeze(1)
        keep = torch.ones_like(value[..., :1])
        starts = tensordict.get("is_init", None)
        if starts is not None:
            keep = (~starts).reshape(keep.shape).to(value.dtype)
        hidden = [self._first(tensordict.get(key, None), value) for key in self.states]
        features, hidden = self._unrolled(value, keep, hidden)
        if is_sequence:
            return tensordict.set("features", features)
        for key, state in zip(self.states, hidden):
            tensordict.set(("next", key), state.unsqueeze(1))
        return tensordict.set("features", features.squeeze(1))

    def _first(self, state: Tensor | None, value: Tensor) -> Tensor:
        """Return the hidden state before the first step, ``[rows, hidden_size]``."""
        if state is None:
            return value.new_zeros(value.shape[0], self.out_features)
        return state.reshape(value.shape[0], -1, self.out_features)[:, 0]

    def _unrolled(
        self, value: Tensor, keep: Tensor, hidden: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return features ``[rows, steps, hidden_size]`` and the final hidden state."""
        cell = self.cell
        step = _lstm_step if self.kind == "lstm" else _gru_step
        inputs = linear(value, cell.weight_ih_l0, cell.bias_ih_l0).unbind(1)
        outputs = []
        for number, (seen, kept) in enumerate(zip(inputs, keep.unbind(1))):
            if number and number == self.burn_in:
                hidden = [state.detach() for state in hidden]
            hidden = [state * kept for state in hidden]
            recurrence = linear(hidden[0], cell.weight_hh_l0, cell.bias_hh_l0)
            hidden = step(seen, recurrence, *hidden)
            outputs.append(hidden[0])
        return torch.stack(outputs, dim=1), hidden

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Return the transform that provides TorchRL's collectors with the initial hidden state."""
        spec = Unbounded((1, self.out_features))
        return TensorDictPrimer({key: spec.clone() for key in self.states}, expand_specs=True)

    def body_parameters(self) -> list[nn.Parameter]:
        """Return all parameters, because there is no output layer."""
        return list(self.parameters())


def _lstm_step(seen: Tensor, recurrence: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
    """Return the next hidden and cell state (Hochreiter and Schmidhuber 1997, with forget gate)."""
    i, f, g, o = (seen + recurrence).chunk(4, dim=-1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return [o.sigmoid() * c.tanh(), c]


def _gru_step(seen: Tensor, recurrence: Tensor, h: Tensor) -> list[Tensor]:
    """Return the next hidden state (Cho et al. 2014, in PyTorch's variant)."""
    (seen_r, seen_z, seen_n), (r, z, n) = seen.chunk(3, dim=-1), recurrence.chunk(3, dim=-1)
    r, z = (seen_r + r).sigmoid(), (seen_z + z).sigmoid()
    n = (seen_n + r * n).tanh()
    return [n + z * (h - n)]


def check_sequences(sequence_length: int | None, burn_in: int = 0) -> None:
    """Raise SettingError if sequences are single steps, or no step remains after burn-in."""
    if sequence_length is None or sequence_length < 2:
        reason = "A recurrent network cannot learn to use its hidden state from single steps"
        hint = "Only kit's step format has the setting sequence_length"
        raise SettingError("steps.sequence_length", sequence_length, reason, [16], hint)
    if burn_in >= sequence_length:
        reason = f"Sequences of {sequence_length} steps have no steps left to train on"
        raise SettingError("burn_in", burn_in, reason, [sequence_length // 2, 0])
