"""`StandIns`: what replaces the names on a page. Each kind of text has its way, a method.

A name has one stand-in on the whole page, whatever kind of text it stands in: `layers.3.mlp.up` is
`m1.3.m2.m3` in a table, in a sentence and in a command. So all texts that are known to be names are
learned first, and then every text is made anew.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from datetime import datetime

from torchweld.pages.public_names import (
    WORD,
    is_library_path,
    is_own_word,
    is_public_op,
    is_torch_class,
)
from torchweld.pages.public_words import own_options
from torchweld.report.flame_stacks import BEYOND

# Rows of the environment whose values stay: they tell how fast a machine is, not whose it is.
KEPT_ROWS = ("CPU", "instruction set", "threads", "torch", "torchweld", "kernels", "rank", "seed")
NAMED_ROWS = {"machine": "machine", "commit": "commit", "model": "kind"}
# Rows in torchweld's words.
TOLD_ROWS = frozenset(
    (
        *("inputs", "mode", "recorded", "load", "preset", "weights", "device", "GPU"),
        *("seconds per side and cell", "cores that others used", "compute capability"),
        *("GPU memory", "multiprocessors", "GPU runtime", "GPU driver", "triton", "cuda"),
    )
)
# Between two values of one row of the environment.
BOTH = " · "
# Parts of a path, and classes, that are torch's or torchweld's own.
KEPT_PARTS = frozenset({"", "*", "weight", "bias", "optimizer", "the model"})
KEPT_KINDS = frozenset({"", "workload", "Optimizer"})
# Frames that are no module, op or kernel.
FRAMES = frozenset(
    (
        *("", "backward", "recompute", "Python", "between nodes", "runtime calls", BEYOND),
        *("launched by no known op", "smaller ones", "several short ones", "device", "the model"),
    )
)
# Rules for texts that are names, or consist of names that other texts tell.
LATE = ("title", "name")
SENTENCES = ("text", "verdict", "plot", "what", "tensor")
# What titles and verdicts of kept runs, gates and benches name.
HEADS = {
    "title": (
        (re.compile(r"(?:gate|history of) ([^:]+)"), ("run",)),
        (re.compile(r"bench of (.+)"), ("target",)),
        (re.compile(r"([^:]+): (.+)"), ("run", "target")),
    ),
    "verdict": (
        (re.compile(r"gate (.+?), (.+): (?:passed|FAILED|not measured)\."), ("run", "target")),
        (
            re.compile(r"(?:fuse|bench|profile|gate|check) of (.+), \d{4}-.*", re.DOTALL),
            ("target",),
        ),
    ),
}
# What the rows of modules say of themselves.
EXTRAS = frozenset(
    (
        *("in_features", "out_features", "bias", "True", "False", "None", "p", "inplace", "eps"),
        *("elementwise_affine", "affine", "momentum", "track_running_stats", "kernel_size"),
        *("stride", "padding", "padding_mode", "padding_idx", "dilation", "groups", "dim", "tanh"),
        *("approximate", "none", "num_embeddings", "embedding_dim", "num_features", "scale_factor"),
        *("normalized_shape", "output_size", "start_dim", "end_dim", "batch_first", "num_layers"),
        *("negative_slope", "alpha", "beta", "threshold", "size", "mode", "upscale_factor"),
        *("sum", "mean", "max", "zeros", "nearest", "bilinear"),
    )
)
# Words of sentences that are names of modules in many models. They stay where they are no name of
# a list: "the input is", but not "in one call with input, gate: …".
PROSE = frozenset(
    (
        *("a", "after", "all", "an", "and", "as", "at", "backward", "be", "before", "block"),
        *("blocks", "by", "cache", "call", "calls", "copy", "cpu", "device", "down", "each"),
        *("first", "forward", "from", "gate", "group", "host", "in", "input", "inputs", "is"),
        *("it", "key", "last", "layer", "layers", "left", "less", "linear", "linears", "loss"),
        *("machine", "memory", "mode", "model", "module", "modules", "more", "no", "norm", "not"),
        *("of", "on", "one", "op", "ops", "or", "other", "out", "output", "over", "right", "row"),
        *("rows", "run", "same", "scale", "size", "step", "steps", "table", "test", "text"),
        *("the", "time", "to", "torch", "up", "use", "value", "weight", "weights", "whole"),
        "with",
    )
)
# A list of numbers in a pattern of paths: "layers.[0-3,5].mlp".
_NUMBERS = re.compile(r"\d+|\[[\d,-]+\]")
_SIZES = re.compile(
    r"\d[\d.,x×→–…:-]*(?:e[+-]?\d+)?(?:x|k|M|G|T|B|kB|MB|GB|s|ms|µs|ns|%|FLOP|th|st|nd|rd)?"
)
_ADDRESS = re.compile(r"\d+\.\d+\.\d+\.\d+|@")
_SETTING = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?\b|\w*[^\W\d]\w*")
_LETTERED = re.compile(r"\w*[^\W\d]\w*")
# A path in a file system, but no rate.
_FOLDERS = re.compile(r"(?!(?:[kMGT]?(?:FLOPs?|B)|calls)/s$|I/O$).*[\w:.][/\\]+\w.*")
_FILE = re.compile(r"[~/\\].*|.*\.(py|pyc|json|gz|html?|so|sqlite|cpp|cu|h|csv|pt|txt|sh)(:.*)?")
# The name of a GPU, which says no more than that of a CPU.
_DEVICE = (
    r"\b(?:NVIDIA|AMD|Intel)(?: (?:Instinct|GeForce|RTX|GTX|Radeon|Tesla|Arc))* "
    r"[A-Z]{0,4}\d+[A-Z]*(?:-[A-Z\d]+)*\b"
)
# That, or what blanks and brackets enclose.
_PIECE = re.compile(rf"(?P<device>{_DEVICE})|[^\s()\[\]{{}},;\"'`=“”|<>→]+")
_PATH = re.compile(r"\w\.[^\W\d]|\.\*|\*\.|\w\.\d+\b(?!\.\d)")
# A path of which every part is a word.
_WORDY = re.compile(r"\w*(?:\.(?:\w|\*)+)*")
_BACKWARD = "backward of "
_ENDS = ".:!?…"
_ENCLOSING = ("()", "[]", '""', "''", "``", "“”")


Rows = Sequence[tuple[str, str]]


class StandIns:
    """Names that were met, each with its stand-in."""

    def __init__(self) -> None:
        self._given: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._quoted = re.compile("(?!)")

    def _stand_in(self, sort: str, name: str) -> str:
        """The same for the same name, whatever its sort: m1, m2, …"""
        found = self._given.get(name)
        if found is None:
            self._counts[sort] = self._counts.get(sort, 0) + 1
            found = self._given[name] = f"{sort}{self._counts[sort]}"
        return found

    # ---- before anything is replaced ----

    def learn(self, texts: Sequence[tuple[str, str]], environment: Rows) -> None:
        """From rules and texts: what is known to be a name, then what may consist of names."""
        for name, value in environment:
            if name in NAMED_ROWS:
                self.environment(name, value)
        for rules in (("path", "kind", "machine", "run", "commit"), ("what", "plot"), LATE):
            if rules is LATE:
                for rule, text in texts:
                    self._learn_heading(rule, text)
            for rule, text in texts:
                if rule in rules:
                    self._learn(rule, text)
        said = "\0".join(text for rule, text in texts if rule in SENTENCES)
        odd = [name for name in self._given if not re.fullmatch(r"\w+", name) and name in said]
        # Paths with blanks or signs in them, of which only whole ones are known for paths.
        for rule, text in texts:
            if rule == "path" and not _WORDY.fullmatch(text) and text in said:
                self._given.setdefault(text, self.path(text))
                odd.append(text)
        odd.sort(key=len, reverse=True)
        self._quoted = re.compile("|".join(map(_bounded, odd)) or "(?!)")

    def _learn(self, rule: str, text: str) -> None:
        if rule == "plot":
            what, colon, _ = text.partition(": ")
            if colon:
                self._stand_in("target", what)
        elif rule != "what" or WORD.fullmatch(text):
            self.way(rule)(text)

    def _learn_heading(self, rule: str, text: str) -> None:
        for pattern, sorts in HEADS.get(rule, ()):
            if (found := pattern.fullmatch(text)) is not None:
                for sort, names in zip(sorts, found.groups(), strict=True):
                    for name in names.split(", "):
                        self._stand_in(sort, name)
                return

    def way(self, rule: str) -> Callable[[str], str]:
        """How texts of a rule are replaced."""
        found: Callable[[str], str] = getattr(self, rule)
        return found

    # ---- names ----

    def keep(self, text: str) -> str:
        return text

    def path(self, text: str) -> str:
        return ".".join(map(self._part, text.split(".")))

    def _part(self, part: str) -> str:
        if part in KEPT_PARTS or _NUMBERS.fullmatch(part):
            return part
        return self._stand_in("m", part)

    def kind(self, text: str) -> str:
        public = text in KEPT_KINDS or is_torch_class(text)
        return text if public else self._stand_in("Class", text)

    def what(self, text: str) -> str:
        """What a block computes, or the class of a module that was refused."""
        return self.kind(text) if WORD.fullmatch(text) else self.text(text)

    def machine(self, text: str) -> str:
        return self._stand_in("machine", text) if text else ""

    def run(self, text: str) -> str:
        return self._stand_in("run", text) if text else ""

    def commit(self, text: str) -> str:
        """Plots show the first digits of what the environment has in full."""
        return self._stand_in("commit", text[:12]) if text else ""

    def title(self, text: str) -> str:
        """The heading: the models before and after, or what somebody thought of."""
        parts = text.split(" → ")
        if all(part in self._given or is_torch_class(part) for part in parts):
            return " → ".join(map(self.kind, parts))
        return self._stand_in("title", text) if text else ""

    def plot(self, text: str) -> str:
        """The title of a plot of kept runs: "what was measured: the workload"."""
        what, colon, rest = text.partition(": ")
        if not colon:
            return self.text(text)
        return f"{self._stand_in('target', what)}{colon}{self.text(rest)}"

    def date(self, text: str) -> str:
        try:
            datetime.fromisoformat(text)
        except ValueError:
            return self.text(text)
        return text

    def name(self, text: str) -> str:
        """A frame: an op, a kernel, or a module as "mlp: Mlp". Anything else is a user's."""
        if text in FRAMES or re.fullmatch(_DEVICE, text):
            return text
        if text in self._given:  # a module may have the name of an op
            return self._given[text]
        if is_public_op(text):
            return text
        if text.startswith(_BACKWARD):
            return _BACKWARD + self.path(text.removeprefix(_BACKWARD))
        path, colon, kind = text.rpartition(": ")
        if colon and (kind in self._given or is_torch_class(kind)):
            return f"{self.path(path)}{colon}{self.kind(kind)}"
        if is_torch_class(text):
            return text
        if all(part in self._given or _kept(part) for part in text.split(".")):
            return self.path(text)
        return self._stand_in("op", text)

    def verdict(self, text: str) -> str:
        return self.text(text)

    def tensor(self, text: str) -> str:
        """ "gradient of up.weight", "output of key, relative"."""
        what, of, rest = text.partition(" of ")
        if not of:
            return self.text(text)
        name, comma, more = rest.partition(", ")
        return f"{self.text(what)}{of}{self.path(name)}{comma}{self.text(more)}"

    # ---- texts ----

    def extra(self, text: str) -> str:
        """What a module says of itself: figures, and the settings of torch's modules."""
        return _SETTING.sub(
            lambda found: (
                found[0]
                if found[0] in EXTRAS or _SIZES.fullmatch(found[0])
                else self._stand_in("w", found[0])
            ),
            text,
        )

    def command(self, text: str) -> str:
        """Its verb and its options stay; what they are given does not, except numbers."""
        try:
            words = shlex.split(text)
        except ValueError:  # an open quote
            words = text.split()
        found = [word if i < 2 and is_own_word(word) else self._argument(word)
                 for i, word in enumerate(words)]  # fmt: skip
        return shlex.join(found)

    def _argument(self, word: str) -> str:
        option, sign, value = word.partition("=")
        if option in own_options():
            return f"{option}{sign}{self._argument(value)}" if sign else option
        if not word or _SIZES.fullmatch(word) or is_torch_class(word):
            return word
        return self._stand_in("file" if _is_file(word) else "argument", word)

    def environment(self, name: str, value: str) -> tuple[str, str]:
        """A row; its value may be of two measurements."""
        if name in KEPT_ROWS:
            return name, value
        way = self._way_of_row(name)
        return self.text(name), BOTH.join(map(way, value.split(BOTH)))

    def _way_of_row(self, name: str) -> Callable[[str], str]:
        if name in NAMED_ROWS:
            return self.way(NAMED_ROWS[name])
        return self.text if name in TOLD_ROWS else self._value

    def _value(self, text: str) -> str:
        """Of a row that another version, or somebody else, has written."""
        return text if _SIZES.fullmatch(text) else self._stand_in("value", text)

    def text(self, text: str) -> str:
        """A sentence, or a label: names and words that are not torchweld's own are replaced."""
        found: list[str] = []
        end = 0
        for quoted in self._quoted.finditer(text):
            found += _PIECE.sub(self._piece, text[end : quoted.start()]), self._given[quoted[0]]
            end = quoted.end()
        return "".join((*found, _PIECE.sub(self._piece, text[end:])))

    def _piece(self, found: re.Match[str]) -> str:
        return found[0] if found["device"] else self._chunk(found[0], _is_listed(found))

    def _chunk(self, chunk: str, listed: bool) -> str:
        """A piece without spaces: a word, a number, a path, a file, an op."""
        plain = chunk.rstrip(_ENDS)
        ending = chunk[len(plain) :]
        if _ADDRESS.search(plain):
            return self._stand_in("host", plain) + ending
        if not WORD.search(plain) or _SIZES.fullmatch(plain):
            return chunk
        if plain.partition(".")[0] not in self._given and is_library_path(plain):
            return chunk
        if "::" in plain:
            public = is_public_op(plain)
            return (plain if public else self._stand_in("op", plain)) + ending
        if _is_file(plain):
            return self._stand_in("file", plain) + ending
        if _PATH.search(plain) and WORD.match(plain):
            return self.path(plain) + ending
        return _LETTERED.sub(lambda word: self._word(word[0], listed), plain) + ending

    def _word(self, word: str, listed: bool) -> str:
        if word in self._given and (listed or word not in PROSE):
            return self._given[word]
        if is_own_word(word) or is_torch_class(word) or _SIZES.fullmatch(word):
            return word
        return self._stand_in("w", word)


def _is_file(text: str) -> bool:
    return bool(_FILE.fullmatch(text) or _FOLDERS.fullmatch(text))


def _is_listed(found: re.Match[str]) -> bool:
    """Whether it stands as names do: "with key, value: …", "(norm)"."""
    text, start, end = found.string, found.start(), found.end()
    around = text[start - 1 : start] + text[end : end + 1]
    return found[0].endswith(":") or around[-1:] in (",", ";") or around in _ENCLOSING


def _kept(part: str) -> bool:
    return part in KEPT_PARTS or _NUMBERS.fullmatch(part) is not None


def _bounded(name: str) -> str:
    """A pattern of the name where it is no part of a longer word."""
    start = r"(?<!\w)" if re.match(r"\w", name) else ""
    end = r"(?!\w)" if re.search(r"\w\Z", name) else ""
    return f"{start}{re.escape(name)}{end}"
