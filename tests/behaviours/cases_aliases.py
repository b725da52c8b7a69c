"""Cases that change a hidden value or the output in place, directly or through shared memory.

A change becomes part of the changed value. If the result is no longer a chain, it is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from tests.behaviours.harness import Mlp, Steps, X, either, refused, welded
from torch import Tensor
from torch.utils.dlpack import from_dlpack

# Aliases of a hidden value [8, 20]. The change made through them is a clamp at values that ordinary
# inputs do not reach, so results on the recorded inputs do not show it.
ALIASES: dict[str, Callable[[Tensor], object]] = {
    "itself": lambda h: h,
    "a_view": lambda h: h.view(-1),
    "a_view_of_a_view": lambda h: h.view(-1).view(4, -1)[1],
    "view_as": lambda h: h.view_as(torch.empty(40, 4)),
    "reshape": lambda h: h.reshape(-1),
    "flatten": lambda h: h.flatten(),
    "ravel": lambda h: h.ravel(),
    "a_slice": lambda h: h[:, 2:7],
    "a_slice_with_a_step": lambda h: h[:, ::3],
    "a_slice_of_rows": lambda h: h[2:],
    "an_ellipsis": lambda h: h[..., 1],
    "a_new_axis": lambda h: h[None],
    "narrow": lambda h: h.narrow(1, 3, 4),
    "t": lambda h: h.t(),
    "mT": lambda h: h.mT,
    "permute": lambda h: h.permute(1, 0),
    "swapaxes": lambda h: h.swapaxes(0, 1),
    "movedim": lambda h: h.movedim(0, 1),
    "unsqueeze": lambda h: h.unsqueeze(0),
    "squeeze": lambda h: h.squeeze(0),
    "unflatten": lambda h: h.unflatten(1, (4, 5))[:, 1],
    "chunk": lambda h: h.chunk(2, dim=-1)[1],
    "split": lambda h: h.split([5, 15], dim=-1)[0],
    "tensor_split": lambda h: h.tensor_split(3, dim=-1)[2],
    "unbind": lambda h: h.unbind(0)[3],
    "select": lambda h: h.select(1, 4),
    "diagonal": lambda h: h.diagonal(),
    "unfold": lambda h: h.unfold(1, 2, 2),
    "as_strided": lambda h: h.as_strided((4, 4), (20, 1)),
    "expand": lambda h: h.expand(8, -1),
    "detach": lambda h: h.detach(),
    "detach_of_a_slice": lambda h: h[:, 4:].detach(),
    "data": lambda h: h.data,
    "data_of_a_view": lambda h: h.view(-1).data,
    "real": lambda h: h.real,
    "alias_copy_free_to": lambda h: h.to(torch.float32),
    "contiguous": lambda h: h.contiguous(),
    "from_dlpack": lambda h: from_dlpack(h),
    "from_numpy": lambda h: torch.from_numpy(h.numpy()),
    "as_tensor": lambda h: torch.as_tensor(h),
    "a_tensor_set_to_its_storage": lambda h: torch.tensor([]).set_(h.untyped_storage()),
}
# Other changes in place that ordinary inputs do not reach.
EDITS: dict[str, Callable[[Tensor], object]] = {
    "iteration": lambda h: [row.clamp_(-50, 50) for row in h],
    "out": lambda h: torch.clamp(h, -50, 50, out=h),
    "out_of_a_view": lambda h: torch.clamp(h[:, :4], -50, 50, out=h[:, :4]),
    "foreach": lambda h: torch._foreach_clamp_max_([h], 50.0),
    "foreach_on_views": lambda h: torch._foreach_clamp_max_(list(h.unbind(1))[:3], 50.0),
    "setitem_by_mask": lambda h: h.__setitem__(h > 50, 50.0),
    "setitem_of_a_slice": lambda h: h.__setitem__(slice(2, 5), h[2:5].clamp(max=50)),
    "setitem_by_index": lambda h: h.__setitem__(torch.tensor([1, 3]), h[[1, 3]].clamp(max=50)),
    "masked_fill_": lambda h: h.masked_fill_(h > 50, 50.0),
    "index_put_": lambda h: h.index_put_((h > 50,), torch.tensor(50.0)),
    "index_copy_": lambda h: h.index_copy_(1, torch.tensor([0]), h[:, :1].clamp(max=50)),
    "copy_": lambda h: h.copy_(h.clamp(-50, 50)),
    "copy_into_a_view": lambda h: h[:, :10].copy_(h[:, :10].clamp(-50, 50)),
    "sub_of_the_excess": lambda h: operator.isub(h, F.relu(h - 50)),
    "an_operator_on_a_view": lambda h: operator.isub(h[:, :9], F.relu(h[:, :9] - 50)),
    "hardtanh_": lambda h: F.hardtanh_(h.view(-1), -50, 50),
    "renorm_": lambda h: h.renorm_(2, 0, 500.0),
    "set_": lambda h: h.set_(h.clamp(-50, 50)),  # type: ignore[call-overload]
    "new_data": lambda h: setattr(h, "data", h.clamp(-50, 50)),
    "swap_tensors": lambda h: torch.utils.swap_tensors(h, h.clamp(-50, 50)),
    "numpy": lambda h: np.clip(h.numpy(), -50, 50, out=h.numpy()),
    "apply_": lambda h: h.apply_(lambda value: min(value, 50.0)),
    "map_": lambda h: h.map_(h, lambda value, _: min(value, 50.0)),
}


def _declare(name: str, edit: Callable[[Tensor], object]) -> None:
    def steps() -> Steps:
        class Model(Mlp):
            def forward(self, x: Tensor) -> Tensor:
                h = self.up(x)
                edit(h)
                y: Tensor = self.down(F.gelu(h))
                return y

        model = yield Model()
        yield model(X)
        yield model(300.0 * X)

    steps.__name__ = f"a_hidden_value_is_clamped_through_{name}"
    refused(r"cases_aliases\.py:\d+")(steps)


def _clamp_through(alias: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    return lambda h: alias(h).clamp_(-50, 50)  # type: ignore[attr-defined]


for _name, _alias in ALIASES.items():
    _declare(_name, _clamp_through(_alias))
for _name, _edit in EDITS.items():
    _declare(_name, _edit)


# ---- changes after which it is still a chain ----


@welded
def an_activation_in_place() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.relu(self.up(x), inplace=True))
            return y

    model = yield Model()
    yield model(X)


@welded
def an_activation_in_place_whose_result_is_not_used() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            h.relu_()
            y: Tensor = self.down(h)
            return y

    model = yield Model()
    yield model(X)


@welded
def an_activation_by_out() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            torch.tanh(h, out=h)
            y: Tensor = self.down(h)
            return y

    model = yield Model()
    yield model(X)


@either
def an_activation_through_a_view_of_all() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            h.view(-1).relu_()
            y: Tensor = self.down(h)
            return y

    model = yield Model()
    yield model(X)


@either
def an_activation_through_the_halves_of_a_chunk() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            for half in h.chunk(2, dim=-1):
                half.relu_()
            y: Tensor = self.down(h)
            return y

    model = yield Model()
    yield model(X)


@welded
def the_output_is_scaled_in_place() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            y.mul_(0.5)
            return y

    model = yield Model()
    yield model(X)


@either
def the_output_is_scaled_through_a_view() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            y.view(-1).mul_(0.5)
            return y

    model = yield Model()
    yield model(X)


@refused(r"cases_aliases\.py:\d+")
def part_of_the_output_is_set() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            y[:, 0] = 1.0
            return y

    model = yield Model()
    yield model(X)


@welded
def a_copy_is_changed_and_not_used() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            h.clone().view(-1).zero_()
            y: Tensor = self.down(F.gelu(h))
            return y

    model = yield Model()
    yield model(X)


@welded
def a_value_is_changed_after_its_last_use() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            a = F.gelu(h)
            h.zero_()
            y: Tensor = self.down(a)
            return y

    model = yield Model()
    yield model(X)


@refused(r"cases_aliases\.py:\d+")
def a_view_is_taken_before_and_read_after_the_change() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            view = h.view(-1)
            h.clamp_(-0.5, 0.5)
            y: Tensor = self.down(F.gelu(view.view(h.shape)))
            return y

    model = yield Model()
    yield model(X)


@refused(r"cases_aliases\.py:\d+")
def the_hidden_value_is_changed_by_an_activation_of_its_view() -> Steps:
    """relu_ on one half also changes the whole value, which is used again."""

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            F.relu_(h[:, :10])
            y: Tensor = self.down(F.gelu(h))
            return y

    model = yield Model()
    yield model(X)
