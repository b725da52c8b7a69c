"""What must not be on the path of a call on a GPU, found in the source.

A CUDA graph is captured without running anything. So a call may not wait for the device, may not
read a tensor's values, and may get memory from torch alone. In: the source of a module, or of a C++
or CUDA file. Out: a line for each offence.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

# Methods that wait for the device, or whose result's size depends on values.
METHODS = frozenset(
    {
        *("item", "tolist", "cpu", "numpy", "cuda", "pin_memory", "synchronize", "wait", "query"),
        *("nonzero", "is_nonzero", "unique", "unique_consecutive", "masked_select"),
        *("equal", "allclose", "elapsed_time"),
    }
)
FUNCTIONS = frozenset(
    {
        *(f"torch.{name}" for name in ("nonzero", "unique", "masked_select", "equal", "allclose")),
        *(f"torch.{name}" for name in ("is_nonzero", "tensor", "as_tensor", "from_numpy")),
        *(f"torch.{name}" for name in ("save", "bincount", "repeat_interleave")),
        *(f"torch.cuda.{name}" for name in ("synchronize", "empty_cache", "Stream", "Event")),
        *(f"torch.cuda.{name}" for name in ("caching_allocator_alloc", "mem_get_info")),
        "torch.UntypedStorage",
        "torch.cuda.memory.CUDAPluggableAllocator",
    }
)
MODULES = frozenset({"numpy", "cupy", "ctypes", "mmap", "pycuda", "numba", "cuda"})
READERS = frozenset({"bool", "int", "float", "str", "repr", "print", "format", "any", "all", "max"})
# What makes a tensor, for names without an annotation.
MAKERS = frozenset(
    {
        *("empty", "empty_like", "zeros", "zeros_like", "new_empty", "new_zeros", "new_full"),
        *("mm", "addmm", "sum", "contiguous", "view", "reshape", "t", "to", "clone"),
    }
)

# Calls of CUDA's runtime that wait or get memory, and calls of torch's C++ that read values.
_IN_CPP = re.compile(
    r"cuda\w*Synchronize|cuda(Malloc|Free|HostAlloc|HostRegister|Memcpy(?!\w*Async)|Memset(?!Async))"
    r"\w*|cudaEventQuery|cudaStreamQuery|\.item<|\.item\(|\.cpu\(\)|\bat::k?CPU\b|is_nonzero|"
    r"\bnonzero\(|masked_select|unique_dim|to_vector|\bequal\(|\bprintf\(|thrust::"
)


def offences_in_cpp(source: str) -> list[str]:
    """The same for C++ and CUDA, by words; comments do not count."""
    code = re.sub(r"//[^\n]*", "", source)
    return [line.strip() for line in code.splitlines() if _IN_CPP.search(line)]


def offences(source: str) -> list[str]:
    found = _Lint()
    found.visit(ast.parse(source))
    return found.found


def functions_with_offences(source: str) -> dict[str, list[str]]:
    """Offences by the name of the top function or class around them; "" outside of any."""
    found: dict[str, list[str]] = {}
    for node in ast.parse(source).body:
        name = getattr(node, "name", "")
        if lines := offences(ast.unparse(node)):
            found.setdefault(name, []).extend(lines)
    return found


class _Lint(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[str] = []
        self._tensors: list[set[str]] = [set()]

    def _say(self, node: ast.AST, what: str) -> None:
        self.found.append(f"{what}: {ast.unparse(node)}")

    # ---- which names are tensors ----

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        given = node.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        own = {a.arg for a in every if a.annotation is not None and _is_tensor(a.annotation)}
        self._tensors.append(self._tensors[-1] | own)
        self.generic_visit(node)
        self._tensors.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        made = isinstance(node.value, ast.Call) and _name_of(node.value.func) in MAKERS
        for target in node.targets:
            if isinstance(target, ast.Name) and made:
                self._tensors[-1].add(target.id)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if isinstance(node.target, ast.Name) and _is_tensor(node.annotation):
            self._tensors[-1].add(node.target.id)
        self.generic_visit(node)

    def _reads(self, node: ast.expr) -> bool:
        """Whether the truth or the text of this expression is that of a tensor."""
        if isinstance(node, ast.Name):
            return node.id in self._tensors[-1]
        if isinstance(node, ast.Subscript | ast.Starred):
            return self._reads(node.value)
        if isinstance(node, ast.BinOp):
            return self._reads(node.left) or self._reads(node.right)
        if isinstance(node, ast.Compare):
            by_identity = (ast.Is, ast.IsNot)
            return not all(isinstance(op, by_identity) for op in node.ops) and any(
                self._reads(one) for one in (node.left, *node.comparators)
            )
        return isinstance(node, ast.Call) and _name_of(node.func) in MAKERS - {"to", "view"}

    # ---- offences ----

    def visit_Call(self, node: ast.Call) -> None:
        name, dotted = _name_of(node.func), ast.unparse(node.func)
        method = isinstance(node.func, ast.Attribute)
        places = dotted == "torch.where" and len(node.args) == 1
        reads = name == "print" or any(self._reads(given) for given in node.args)
        if dotted in FUNCTIONS or (method and name in METHODS) or places:
            self._say(node, "waits, or gets memory elsewhere")
        elif name == "to" and any(_is_device(given) for given in _arguments(node)):
            self._say(node, "copies to another device")
        elif not method and name in READERS and reads:
            self._say(node, "reads a tensor's values")
        self.generic_visit(node)

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        if self._reads(node.value):
            self._say(node.value, "reads a tensor's values")
        self.generic_visit(node)

    def _condition(self, test: ast.expr) -> None:
        if self._reads(test):
            self._say(test, "reads a tensor's values")

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for value in node.values:
            self._condition(value)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._condition(node.operand)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        for one in node.names:
            if one.name.partition(".")[0] in MODULES:
                self._say(node, "gets memory elsewhere")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").partition(".")[0] in MODULES:
            self._say(node, "gets memory elsewhere")

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
            self._condition(node.test)
        super().visit(node)


def _arguments(node: ast.Call) -> Iterator[ast.expr]:
    yield from node.args
    yield from (one.value for one in node.keywords)


def _is_device(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_tensor(annotation: ast.expr) -> bool:
    parts = {part.strip() for part in ast.unparse(annotation).strip("'\"").split("|")}
    return bool(parts & {"Tensor", "torch.Tensor"})


def _name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
