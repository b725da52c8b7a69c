"""What do finding and planning cost? Seconds and memory, of GPT-2 or any target.

    python benchmarks/planning.py                          GPT-2 (124M) at one token
    python benchmarks/planning.py hf:llama                 another target

`tw.find` and `tw.plan` each run in a fresh process, with nothing remembered. Memory is the model's
own, and the most by which the process grew meanwhile; packed copies of weights are part of it, and
take as much again where everything is packed. GPT-2 has to be found in within 10 s and planned
within 60, in less than twice its own memory. Exits 1 if a figure is missed.
"""

import argparse
import json
import subprocess
import sys

LIMITS_S = {"find": 10.0, "plan": 60.0, "plan, packing=False": 60.0}
MOST_MEMORY = 2.0

CODE = """
import json, sys, time
import torch, torchweld as tw, transformers
from torchweld.models.targets import resolve

def memory(what):
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(what))

what, target = sys.argv[1:3]
torch.ops.torchweld.chain  # loads the kernels
chosen = resolve(target, sys.argv[3:])
given = [w.inputs if w.inputs is not None else w.run for w in chosen.workloads]
tensors = [*chosen.model.parameters(), *chosen.model.buffers()]
size = sum(tensor.nbytes for tensor in tensors)
del tensors
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the largest so far is what is held now
built = memory("VmRSS")
begun_s = time.perf_counter()
if what == "find":
    found = tw.find(chosen.model, given)
    said = f"{len(found)} blocks, {len(found.refused)} refused"
else:
    made = tw.plan(chosen.model, given, remember=False, packing=what == "plan")
    said = made.sentence()
seconds = time.perf_counter() - begun_s
more = memory("VmHWM") - built
print(json.dumps(dict(seconds=seconds, size=size, more=more, said=said)))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", nargs="?", default="hf:gpt2")
    parser.add_argument("--input", action="append", help="such as input_ids=1x1:int64")
    args = parser.parse_args()
    inputs = args.input or (["input_ids=1x1:int64"] if args.target == "hf:gpt2" else [])
    kept = True
    for what, limit_s in LIMITS_S.items():
        done = subprocess.run(
            [sys.executable, "-c", CODE, what, args.target, *inputs],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        memory = 1 + found["more"] / found["size"]
        words = ["kept" if found["seconds"] < limit_s else "MISSED"]
        words.append("kept" if memory < MOST_MEMORY else "MISSED")
        kept = kept and "MISSED" not in words
        print(
            f"tw.{what}: {found['seconds']:.1f} s ({words[0]}), {memory:.2f} times the model's "
            f"{found['size'] / 1e6:.0f} MB ({words[1]}); {found['said']}",
            flush=True,
        )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
