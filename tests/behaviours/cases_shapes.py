"""Cases that call with shapes, rows, layouts and values that were not recorded."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.behaviours.harness import K, Mlp, Steps, X, attempt, either, inside, refused, welded
from tests.support.helpers import fixed
from torch import Tensor

from torchweld import Inputs

BATCH = X.view(2, 4, K)


# ---- number of dimensions ----


@welded
def the_same_rows_in_other_shapes() -> Steps:
    model = yield Mlp()
    yield model(X)
    yield model(BATCH)
    yield model(X.view(8, 1, K))
    yield model(X.view(1, 8, K))
    yield model(X.view(2, 2, 2, K))


@welded
def a_single_row_with_and_without_a_dimension() -> Steps:
    model = yield Mlp()
    yield model(X)
    yield model(X[0])
    yield model(X[:1])


@welded
def a_branch_on_the_number_of_dimensions() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if x.dim() == 3 else y

    model = yield Model()
    yield model(X)
    yield model(BATCH)
    yield inside(model(X))


@welded
def a_branch_on_ndim_of_a_hidden_value() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            y: Tensor = self.down(F.relu(h) if h.ndim > 2 else F.gelu(h))
            return y

    model = yield Model()
    yield model(X)
    yield model(BATCH)


@welded
def a_branch_on_the_length_of_the_shape() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if len(x.shape) == 1 else y

    model = yield Model()
    yield model(X)
    yield model(X[0])


@welded
def an_unpacked_shape_raises_on_other_dimensions() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            _rows, _features = x.shape
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    yield model(X)
    yield attempt(lambda: model(BATCH))


@welded
def an_assertion_on_the_shape() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            assert x.dim() == 2, x.shape
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y

    model = yield Model()
    yield model(X)
    yield attempt(lambda: model(BATCH))


@welded(inputs=[X, BATCH])
def both_numbers_of_dimensions_are_recorded() -> Steps:
    model = yield Mlp()
    yield model(X)
    yield inside(model(BATCH))
    yield model(X.view(2, 2, 2, K))


@refused("different", inputs=[X, BATCH])
def other_things_are_computed_for_other_dimensions() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            y: Tensor = self.down(F.relu(h) if x.dim() == 3 else F.gelu(h))
            return y

    model = yield Model()
    yield model(X)
    yield model(BATCH)


@welded(inputs=BATCH)
def tokens_are_flattened_and_given_their_shape_back() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x.reshape(-1, x.shape[-1]))))
            return y.view(*x.shape[:-1], -1)

    model = yield Model()
    yield model(BATCH)
    yield model(X)
    yield model(fixed(3, 5, K))


# ---- number of rows ----


class RowRanged(Mlp):
    """Recorded on 4 and on 32 rows; numbers between are proved valid, or not covered."""


ROWS = [fixed(4, K), fixed(32, K)]


@welded(inputs=ROWS)
def rows_between_those_recorded() -> Steps:
    model = yield Mlp()
    yield model(ROWS[0])
    yield inside(model(ROWS[1]))
    for rows in (1, 3, 5, 6, 16, 33, 100):
        yield model(fixed(rows, K))


def _branching_on_rows(name: str, source: str) -> None:
    """Takes another branch only for numbers of rows that were not recorded."""

    def steps() -> Steps:
        namespace: dict[str, object] = {}
        exec(f"def asked(x): return {source}", namespace)
        asked = namespace["asked"]

        class Model(Mlp):
            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = self.down(F.gelu(self.up(x)))
                return y.tanh() if asked(x) else y  # type: ignore[operator]

        model = yield Model()
        yield model(ROWS[0])
        for rows in (5, 6, 7, 31, 1, 33, 101):
            yield model(fixed(rows, K))
        yield inside(model(ROWS[1]))

    steps.__name__ = f"a_branch_on_{name}"
    welded(inputs=ROWS)(steps)


_branching_on_rows("five_rows", "x.shape[0] == 5")
_branching_on_rows("more_than_a_hundred_rows", "x.shape[0] > 100")
_branching_on_rows("odd_rows", "x.shape[0] % 2 == 1")
_branching_on_rows("len", "len(x) == 5")
_branching_on_rows("numel", "x.numel() == 60")
_branching_on_rows("size", "x.size(0) == 5")
_branching_on_rows("the_text_of_the_shape", "str(tuple(x.shape)) == '(5, 12)'")
_branching_on_rows("a_formatted_shape", "f'{x.shape[0]}' == '5'")
_branching_on_rows("a_table_of_shapes", "{5: True, 7: True}.get(x.shape[0], False)")
_branching_on_rows("a_set_of_shapes", "tuple(x.shape) in {(5, 12), (31, 12)}")
_branching_on_rows("the_shape_as_a_whole", "x.shape == (5, 12)")
_branching_on_rows("an_integer_of_the_rows", "int(x.shape[0]) == 5")
_branching_on_rows("a_range_of_the_rows", "5 in range(x.shape[0] - 1, x.shape[0] + 1)")
_branching_on_rows("bytes", "x.nbytes == 240")
_branching_on_rows("the_stride_of_a_transpose", "x.t().contiguous().stride(0) == 5")
# Symbols for sizes are no ints, and their comparisons are objects.
_branching_on_rows("a_comparison_that_is_true", "(x.shape[0] == 5) is True")
_branching_on_rows("a_comparison_that_is_not_false", "(x.shape[0] != 5) is False")
_branching_on_rows("a_comparison_of_elements_that_is_true", "(x.numel() == 60) is True")
_branching_on_rows("a_comparison_that_is_kept", "{'five': x.size(0) == 5}['five'] is True")
_branching_on_rows("rows_that_are_an_int", "isinstance(x.shape[0], int) and x.shape[0] == 5")
_branching_on_rows("sizes_that_are_ints", "5 in [n for n in x.shape if isinstance(n, int)]")
_branching_on_rows("an_attribute_of_the_rows", "getattr(x.shape[0], 'real', 4) == 5")


@welded(inputs=[fixed(2, 3, K), fixed(8, 9, K)])
def sizes_that_are_one_object() -> Steps:
    """Python keeps one object for each small number."""

    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            rows, columns = x.shape[:2]
            return y.tanh() if rows is columns else y

    model = yield Model()
    yield inside(model(fixed(2, 3, K)))
    yield model(fixed(4, 4, K))
    yield model(fixed(5, 5, K))


@welded(inputs=ROWS)
def rows_that_are_asked_for_a_view_alone() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            rows = x.shape[0]
            y: Tensor = self.down(F.gelu(self.up(x.reshape(rows, -1))))
            return y.view(rows, -1) if mask is None else y

    model = yield Model()
    yield inside(model(fixed(7, K)))
    yield inside(model(fixed(31, K)))


@welded(inputs=Inputs(X, mask=fixed(8, K)))
def a_comparison_of_another_arguments_rows_that_is_true() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.tanh() if (mask.shape[0] == 3) is True else y

    model = yield Model()
    yield inside(model(X, mask=fixed(8, K)))
    yield model(X, mask=X[:3])


@either(inputs=ROWS)
def the_output_is_divided_by_the_rows() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y / x.shape[0]

    model = yield Model()
    yield model(ROWS[0])
    yield model(fixed(6, K))
    yield model(ROWS[1])


@welded
def the_output_is_divided_by_the_rows_of_one_size() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y / x.shape[0]

    model = yield Model()
    yield model(X)
    yield model(X[:4])
    yield model(BATCH)


@either(inputs=[fixed(4, K), fixed(32, K)])
def rows_are_taken_one_by_one() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.down(F.gelu(self.up(row))) for row in x])

    model = yield Model()
    yield model(X[:4])
    yield model(X)


@either(inputs=BATCH)
def the_view_depends_on_the_first_dimension() -> Steps:
    class Model(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down(F.gelu(self.up(x)))
            return y.view(x.shape[0], -1, K)

    model = yield Model()
    yield model(BATCH)
    yield model(X)
    yield attempt(lambda: model(X[0]))


@welded
def no_rows_at_all() -> Steps:
    model = yield Mlp()
    yield model(X)
    yield model(X[:0])
    yield model(X.view(8, 1, K)[:, :0])


@welded
def another_number_of_features_raises() -> Steps:
    model = yield Mlp()
    yield model(X)
    yield attempt(lambda: model(fixed(8, K + 1)))
    yield attempt(lambda: model(torch.tensor(1.0)))


# ---- layout ----


@welded
def inputs_that_are_not_contiguous() -> Steps:
    model = yield Mlp()
    yield model(X)
    yield model(fixed(K, 8).t())
    yield model(fixed(8, 2 * K)[:, ::2])
    yield model(fixed(1, K).expand(8, K))
    yield model(X.flip(0))


def _branching_on_layout(name: str, source: str) -> None:
    def steps() -> Steps:
        namespace: dict[str, object] = {}
        exec(f"def asked(x): return {source}", namespace)
        asked = namespace["asked"]

        class Model(Mlp):
            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = self.down(F.gelu(self.up(x)))
                return y.tanh() if asked(x) else y  # type: ignore[operator]

        model = yield Model()
        yield model(X)
        yield model(fixed(K, 8).t())
        yield model(fixed(16, K)[::2])
        yield model(fixed(9, K)[1:])

    steps.__name__ = f"a_branch_on_{name}"
    either(steps)


_branching_on_layout("contiguity", "not x.is_contiguous()")
_branching_on_layout("a_stride", "x.stride(0) != 12")
_branching_on_layout("all_strides", "x.stride() != (12, 1)")
_branching_on_layout("the_storage_offset", "x.storage_offset() != 0")
_branching_on_layout("whether_it_is_a_view", "x._is_view()")
_branching_on_layout("the_data_pointer", "x.data_ptr() % 64 == 48")
