"""torch.nn's recurrent layers, written out so that K-FAC can see every product.

torch.nn's run all their steps in one call, which shows neither the hidden states that W_hh multiplies
nor the gradients of its products. The modules here have the same constructors, parameters, state_dicts
and results, and take every product in a submodule of its own, `Product`: W_ih for all steps at once,
W_hh (and W_hr of a projected LSTM) step by step; a cell both. Python runs the steps: slower than
torch.nn's where those are fused. As with torch.nn's, torch.compile breaks the graph at the layers unless
`torch._dynamo.config.allow_rnn` is set.

K-FAC treats the steps as rows that share a weight: Martens, Ba & Johnson 2018 ("Kronecker-factored
curvature approximations for recurrent neural networks", ICLR), the factorization they start from.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

AnyModule = TypeVar("AnyModule", bound=nn.Module)


class Product(nn.Module):
    """`input` @ `weight`ᵀ + `bias` with the parent's parameters; it has none of its own.

    Args:
        weight_name: the parent's name of the weight, e.g. 'weight_hh_l0_reverse'.
        bias_name: its name of the bias, or None.
    """

    def __init__(self, weight_name: str, bias_name: str | None) -> None:
        super().__init__()
        self.weight_name = weight_name
        self.bias_name = bias_name

    def forward(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """(..., d_in) -> (..., d_out)."""
        return F.linear(input, weight, bias)

    def extra_repr(self) -> str:
        return self.weight_name if self.bias_name is None else f"{self.weight_name}, {self.bias_name}"


class _OfProducts(nn.Module):
    """What has its products in submodules."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._add_products()

    def _add_products(self) -> None:
        raise NotImplementedError

    def _product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        product = getattr(self, f"product_{name}")
        bias = None if product.bias_name is None else getattr(self, product.bias_name)
        result: torch.Tensor = product(x, getattr(self, product.weight_name), bias)
        return result


class _StepByStep(_OfProducts, nn.RNNBase):
    """What the three layers share; a kind adds `_step`. The state is a tuple: (h,), or (h, c)."""

    def _add_products(self) -> None:
        for suffix in self._suffixes():
            for side in ("ih", "hh"):
                bias_name = f"bias_{side}{suffix}" if self.bias else None
                self.add_module(f"product_{side}{suffix}", Product(f"weight_{side}{suffix}", bias_name))
            if self.proj_size:
                self.add_module(f"product_hr{suffix}", Product(f"weight_hr{suffix}", None))

    def _suffixes(self) -> list[str]:
        """What parameter names end in, in the order of the hidden states."""
        directions = ("", "_reverse") if self.bidirectional else ("",)
        return [f"_l{layer}{direction}" for layer in range(self.num_layers) for direction in directions]

    def forward(self, input: Any, hx: Any = None) -> Any:
        """As in torch.nn: input (L, N, H_in), (N, L, H_in), (L, H_in) or a PackedSequence."""
        if isinstance(input, PackedSequence):
            data, batch_sizes, order, inverse_order = input
            state = self._start(data, batch_sizes, int(batch_sizes[0]), hx)
            state = tuple(part if order is None else part.index_select(1, order) for part in state)
            rows, state = self._layers(data, batch_sizes.tolist(), state)
            if inverse_order is not None:
                state = tuple(part.index_select(1, inverse_order) for part in state)
            return PackedSequence(rows, batch_sizes, order, inverse_order), self._as_hx(state)
        if input.dim() not in (2, 3):
            raise ValueError(f"input must have 2 or 3 axes, got shape {tuple(input.shape)}")
        for part in self._parts(hx):
            if part.dim() != input.dim():
                raise RuntimeError(
                    f"hx must have as many axes as input, {input.dim()}, got shape {tuple(part.shape)}"
                )
        if input.dim() == 2:
            return self._unbatched(input, hx)
        batch = input.shape[0 if self.batch_first else 1]
        state = self._start(input, None, batch, hx)
        steps_first = input.transpose(0, 1) if self.batch_first else input
        if not steps_first.shape[0]:
            raise RuntimeError(f"input must have at least one step, got shape {tuple(input.shape)}")
        output, state = self._layers(steps_first, None, state)
        return output.transpose(0, 1) if self.batch_first else output, self._as_hx(state)

    def _unbatched(self, input: torch.Tensor, hx: Any) -> tuple[torch.Tensor, Any]:
        axis = 0 if self.batch_first else 1
        state = tuple(part.unsqueeze(1) for part in self._parts(hx))
        output, hx = self.forward(input.unsqueeze(axis), self._as_hx(state) if state else None)
        state = tuple(part.squeeze(1) for part in self._parts(hx))
        return output.squeeze(axis), self._as_hx(state)

    def _start(
        self, data: torch.Tensor, batch_sizes: torch.Tensor | None, batch: int, hx: Any
    ) -> tuple[torch.Tensor, ...]:
        """The initial state, each part (layers * directions, batch, its size), checked as torch does."""
        if hx is None:
            count = self.num_layers * (2 if self.bidirectional else 1)
            hx = self._as_hx(
                tuple(
                    torch.zeros(count, batch, size, dtype=data.dtype, device=data.device)
                    for size in self._state_sizes()
                )
            )
        self.check_forward_args(data, hx, batch_sizes)
        return self._parts(hx)

    def _layers(
        self, rows: torch.Tensor, batch_sizes: list[int] | None, state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """All layers: rows are (steps, batch, features), or packed (rows, features)."""
        suffixes = self._suffixes()
        directions = len(suffixes) // self.num_layers
        finals = []
        for layer in range(self.num_layers):
            if layer and self.dropout:
                rows = F.dropout(rows, self.dropout, self.training)
            outputs = []
            for place in range(layer * directions, (layer + 1) * directions):
                start = tuple(part[place] for part in state)
                output, final = self._direction(rows, batch_sizes, start, suffixes[place])
                outputs.append(output)
                finals.append(final)
            rows = outputs[0] if directions == 1 else torch.cat(outputs, dim=-1)
        return rows, tuple(torch.stack(parts) for parts in zip(*finals, strict=True))

    def _direction(
        self,
        rows: torch.Tensor,
        batch_sizes: list[int] | None,
        start: tuple[torch.Tensor, ...],
        suffix: str,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """One layer in one direction: the outputs of all steps, and the last state.

        Packed sequences are sorted by length: those that are still running at a step come first.
        """
        projected = self._product("ih" + suffix, rows)
        steps = list(projected.unbind(0) if batch_sizes is None else projected.split(batch_sizes))
        backwards = suffix.endswith("_reverse")
        state = tuple(part[: steps[-1 if backwards else 0].shape[0]] for part in start)
        ended: list[tuple[torch.Tensor, ...]] = []
        outputs = []
        for step in reversed(steps) if backwards else steps:
            running, now = state[0].shape[0], step.shape[0]
            if now < running:  # forwards: the shortest sequences have ended
                ended.append(tuple(part[now:] for part in state))
                state = tuple(part[:now] for part in state)
            elif now > running:  # backwards: they begin
                pairs = zip(state, start, strict=True)
                state = tuple(torch.cat([part, first[running:now]]) for part, first in pairs)
            state = self._step(step, state, suffix)
            outputs.append(state[0])
        if ended:
            state = tuple(torch.cat(parts) for parts in zip(state, *reversed(ended), strict=True))
        if backwards:
            outputs.reverse()
        return (torch.stack(outputs) if batch_sizes is None else torch.cat(outputs)), state

    def _step(
        self, projected: torch.Tensor, state: tuple[torch.Tensor, ...], suffix: str
    ) -> tuple[torch.Tensor, ...]:
        """The next state, given W_ih x + b_ih (batch, gates) of this step."""
        raise NotImplementedError

    def _state_sizes(self) -> tuple[int, ...]:
        return (self.hidden_size,)

    def _parts(self, hx: Any) -> tuple[torch.Tensor, ...]:
        return () if hx is None else (hx,)

    def _as_hx(self, state: tuple[torch.Tensor, ...]) -> Any:
        return state[0]


class RNN(_StepByStep, nn.RNN):
    """`torch.nn.RNN` step by step:  h ← f(W_ih x + b_ih + W_hh h + b_hh),  f = tanh or relu."""

    def _step(
        self, projected: torch.Tensor, state: tuple[torch.Tensor, ...], suffix: str
    ) -> tuple[torch.Tensor, ...]:
        (h,) = state
        return (_rnn(projected + self._product("hh" + suffix, h), self.nonlinearity),)


class LSTM(_StepByStep, nn.LSTM):
    """`torch.nn.LSTM` step by step:

        i, f, g, o = W_ih x + b_ih + W_hh h + b_hh
        c ← σ(f) c + σ(i) tanh(g),   h ← W_hr (σ(o) tanh(c))

    W_hr only with `proj_size`.
    """

    def _step(
        self, projected: torch.Tensor, state: tuple[torch.Tensor, ...], suffix: str
    ) -> tuple[torch.Tensor, ...]:
        h, c = state
        h, c = _lstm(projected + self._product("hh" + suffix, h), c)
        return (self._product("hr" + suffix, h) if self.proj_size else h), c

    def _state_sizes(self) -> tuple[int, ...]:
        return (self.proj_size or self.hidden_size, self.hidden_size)

    def _parts(self, hx: Any) -> tuple[torch.Tensor, ...]:
        return () if hx is None else tuple(hx)

    def _as_hx(self, state: tuple[torch.Tensor, ...]) -> Any:
        return state


class GRU(_StepByStep, nn.GRU):
    """`torch.nn.GRU` step by step:

    r_x, z_x, n_x = W_ih x + b_ih,   r_h, z_h, n_h = W_hh h + b_hh
    r = σ(r_x + r_h),   z = σ(z_x + z_h),   n = tanh(n_x + r n_h)
    h ← (1 - z) n + z h
    """

    def _step(
        self, projected: torch.Tensor, state: tuple[torch.Tensor, ...], suffix: str
    ) -> tuple[torch.Tensor, ...]:
        (h,) = state
        return (_gru(projected, self._product("hh" + suffix, h), h),)


class _Cell(_OfProducts, nn.RNNCellBase):
    """What the three cells share; a kind adds `_step`."""

    def _add_products(self) -> None:
        for side in ("ih", "hh"):
            bias_name = f"bias_{side}" if self.bias else None
            self.add_module(f"product_{side}", Product(f"weight_{side}", bias_name))

    def forward(self, input: torch.Tensor, hx: Any = None) -> Any:
        """As in torch.nn: input (N, H_in) or (H_in,), state (N, H_out) or (H_out,)."""
        parts = () if hx is None else self._parts(hx)
        for name, x, size in [("input", input, self.input_size)] + [
            ("hx", part, self.hidden_size) for part in parts
        ]:
            if x.dim() not in (1, 2) or x.dim() != input.dim() or x.shape[-1] != size:
                raise RuntimeError(
                    f"{name} must have 1 axis, or 2 as input has, and the last one of {size}, got shape "
                    f"{tuple(x.shape)}"
                )
        if not parts:
            zeros = input.new_zeros((*input.shape[:-1], self.hidden_size))
            parts = self._parts((zeros, zeros)) if isinstance(self, nn.LSTMCell) else (zeros,)
        projected, product = self._product("ih", input), self._product("hh", parts[0])
        return self._step(projected, product, parts)

    def _parts(self, hx: Any) -> tuple[torch.Tensor, ...]:
        return (hx,)

    def _step(self, projected: torch.Tensor, product: torch.Tensor, state: Any) -> Any:
        """The next state, given W_ih x + b_ih and W_hh h + b_hh."""
        raise NotImplementedError


class RNNCell(_Cell, nn.RNNCell):
    """`torch.nn.RNNCell`, see `RNN`."""

    def _step(self, projected: torch.Tensor, product: torch.Tensor, state: Any) -> Any:
        return _rnn(projected + product, self.nonlinearity)


class LSTMCell(_Cell, nn.LSTMCell):
    """`torch.nn.LSTMCell`, see `LSTM`."""

    def _parts(self, hx: Any) -> tuple[torch.Tensor, ...]:
        return tuple(hx)

    def _step(self, projected: torch.Tensor, product: torch.Tensor, state: Any) -> Any:
        return _lstm(projected + product, state[1])


class GRUCell(_Cell, nn.GRUCell):
    """`torch.nn.GRUCell`, see `GRU`."""

    def _step(self, projected: torch.Tensor, product: torch.Tensor, state: Any) -> Any:
        return _gru(projected, product, state[0])


def _rnn(total: torch.Tensor, nonlinearity: str) -> torch.Tensor:
    return torch.tanh(total) if nonlinearity == "tanh" else torch.relu(total)


def _lstm(total: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """h, before a projection, and c."""
    i, f, g, o = total.chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(projected: torch.Tensor, product: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    reset_x, update_x, new_x = projected.chunk(3, dim=-1)
    reset_h, update_h, new_h = product.chunk(3, dim=-1)
    update = torch.sigmoid(update_x + update_h)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return new + update * (h - new)


WRITTEN_OUT: dict[type[nn.Module], type[_OfProducts]] = {
    **{nn.RNN: RNN, nn.LSTM: LSTM, nn.GRU: GRU},
    **{nn.RNNCell: RNNCell, nn.LSTMCell: LSTMCell, nn.GRUCell: GRUCell},
}


def replace_recurrent(module: AnyModule) -> AnyModule:
    """Turn every nn.RNN, nn.LSTM, nn.GRU, and cell of theirs, into the one of this file, in place.

        >>> model = replace_recurrent(model)  # before `KFAC(model, ...)`

    The modules stay the same objects: their parameters (an optimizer may hold them already), hooks,
    `training` flags and places in the model are untouched; only their class changes and products are
    added. Subclasses of torch.nn's are left alone, whose `forward` may be another.

    Args:
        module: the model, or a recurrent layer itself.

    Returns:
        `module`.

    Raises:
        TypeError: not a torch.nn.Module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    for part in list(module.modules()):
        written_out = WRITTEN_OUT.get(type(part))
        if written_out is not None:
            part.__class__ = written_out
            assert isinstance(part, _OfProducts)
            part._add_products()
    return module
