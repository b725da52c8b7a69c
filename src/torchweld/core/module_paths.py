"""Paths of modules: without wrappers, and those that differ only in numbers under one name.

In: texts such as `layers.3.mlp`. Out: texts such as `layers.*.mlp`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

# What torch.compile and the parallel wrappers put into a path.
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})


def normal_path(path: str) -> str:
    """The path without the names that wrappers add."""
    return ".".join(name for name in path.split(".") if name not in WRAPPERS)


def pattern_of(path: str) -> str:
    """The path with a star for each number, so that alike paths become equal."""
    return ".".join("*" if name.isdecimal() else name for name in path.split("."))


def by_pattern(paths: Iterable[str]) -> dict[str, list[str]]:
    """Groups of paths that differ only in numbers."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(pattern_of(path), []).append(path)
    return groups


def grouped_paths(paths: Sequence[str], everything: Iterable[str] = ()) -> dict[str, list[str]]:
    """Name -> the paths it stands for. `everything`: paths that a star must not match as well."""
    known = by_pattern(everything)
    return {
        joined(same, known.get(pattern, ())): same for pattern, same in by_pattern(paths).items()
    }


def joined(paths: Sequence[str], everything: Iterable[str] = ()) -> str:
    """One name for `paths`, which differ only in numbers: `layers.*.mlp`.

    A number that all share stays. If other paths of `everything` would match the star too, the
    numbers are listed instead: `layers.[0-3].mlp`.
    """
    if len(paths) == 1:
        return paths[0]
    columns = list(zip(*(path.split(".") for path in paths), strict=True))
    others = [path.split(".") for path in everything]
    names = []
    for i, column in enumerate(columns):
        if len(set(column)) == 1:
            names.append(column[0])
        elif any(path[i] not in column for path in others):
            names.append("[" + _ranges(sorted({int(name) for name in column})) + "]")
        else:
            names.append("*")
    return ".".join(names)


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> `0-2,5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
