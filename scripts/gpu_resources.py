"""What compiled GPU kernels take, in a file under review, and what is wrong with a new compile.

In: `Resources` by kernel case and target, and the file. Out: complaints, one sentence each. Nothing
here needs Triton; `gpu_kernels.py` compiles.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "tests" / "ops" / "gpu"
PINNED = "3.7"  # the Triton that torch pins
RENEW = "if that is meant, renew the file: python -m scripts.gpu_kernels"
# Registers are handed out in eights, shared memory in pieces of 1 KB.
REGISTER_MARGIN = 8
SHARED_MARGIN = 1024
# Below 64 rows the wide instructions of sm_90 and sm_100 do not apply, and HMMA multiplies.
WIDE_PRODUCT_ROWS = 64


@dataclass(frozen=True)
class Resources:
    """What a compiled kernel takes of one target. `spills`: accesses of local memory."""

    registers: int
    shared: int
    spills: int
    instructions: dict[str, int] = field(default_factory=dict)


Table = Mapping[str, Mapping[str, Resources]]  # by case, then by target


@dataclass(frozen=True)
class Recorded:
    """The file: the version of Triton that compiled, and the table."""

    triton: str
    kernels: Table


def file_for(version: str) -> Path:
    """The file for Triton's minor version, which may not exist: each version allots otherwise."""
    minor = ".".join(version.split(".")[:2])
    return FOLDER / f"triton_resources{'' if minor == PINNED else f'_{minor}'}.json"


def read(file: Path) -> Recorded:
    plain = json.loads(file.read_text())
    kernels = {
        name: {target: Resources(**one) for target, one in rows.items()}
        for name, rows in plain["kernels"].items()
    }
    return Recorded(plain["triton"], kernels)


def write(file: Path, recorded: Recorded) -> None:
    """A line for each target, so that a difference is read at a glance."""
    cases = []
    for name, rows in recorded.kernels.items():
        lines = (f"   {json.dumps(t)}: {json.dumps(asdict(one))}" for t, one in rows.items())
        cases.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    head = f' "triton": {json.dumps(recorded.triton)},\n "kernels": {{\n'
    file.write_text("{\n" + head + ",\n".join(cases) + "\n }\n}\n")


def product_instruction(target: str, rows: int) -> str:
    """The instruction that a 16-bit product of so many rows must use."""
    if target.startswith("gfx"):
        return "mfma"
    wide = {"sm_90": "HGMMA", "sm_100": "UTCHMMA"}.get(target, "HMMA")
    return wide if rows >= WIDE_PRODUCT_ROWS else "HMMA"


def drift(cases: Sequence[str], targets: Sequence[str], recorded: Table) -> Iterator[str]:
    """Cases that the file lacks, and rows of it that nothing compiles any more."""
    for name in cases:
        for target in targets:
            if target not in recorded.get(name, {}):
                yield f"{name} for {target} is not in the file; {RENEW}"
    for name, rows in recorded.items():
        if name not in cases:
            yield f"{name} is in the file, but no case compiles it; {RENEW}"
        yield from (
            f"{name} is in the file for {target}, for which nothing is compiled; {RENEW}"
            for target in rows
            if target not in targets
        )


def unused_instruction(what: str, found: Resources, instruction: str | None) -> Iterator[str]:
    """`instruction`: what its products must use, if it has any."""
    if instruction is not None and not found.instructions.get(instruction):
        used = ", ".join(found.instructions) or "no product instruction"
        yield f"{what} does not use {instruction}: it has {used}"


def complaints(what: str, found: Resources, recorded: Resources | None) -> Iterator[str]:
    """What is wrong with what one compiled kernel takes."""
    if recorded is None:
        yield f"{what} is not in the file; {RENEW}"
        return
    if found.spills > recorded.spills:
        yield f"{what} spills {found.spills} times, {recorded.spills} are recorded: a new spill"
    for taken, known, margin, unit in (
        (found.registers, recorded.registers, REGISTER_MARGIN, "registers"),
        (found.shared, recorded.shared, SHARED_MARGIN, "bytes of shared memory"),
    ):
        if taken > known + margin:
            yield f"{what} takes {taken} {unit}, {known} are recorded; {RENEW}"
