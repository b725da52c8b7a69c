"""The `torchweld` command: the list of verbs, and the one place where errors become exit codes.

0: done. 1: a finding the user asked to fail on. 2: wrong usage, or it cannot be done here.
130: interrupted.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence

import click

from torchweld.cli.bench_command import bench
from torchweld.cli.diff_command import diff
from torchweld.cli.error_output import complain
from torchweld.cli.fuse_command import fuse
from torchweld.cli.gate_command import gate_verb
from torchweld.cli.history_command import history
from torchweld.cli.info_command import info
from torchweld.cli.profile_command import profile
from torchweld.cli.report_command import report
from torchweld.cli.typed_command import typed
from torchweld.core.errors import TorchweldError

COMMANDS: tuple[click.Command, ...] = (
    *(info, profile, diff, fuse, bench, gate_verb, report, history),
)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: torchweld info",
)
@click.version_option(package_name="torchweld", message="torchweld %(version)s")
def cli() -> None:
    """Fused Linears and MLPs for PyTorch: the same numbers, in less time, and proof of both."""


for command in COMMANDS:
    cli.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        with typed(arguments):
            code = cli.main(arguments, prog_name="torchweld", standalone_mode=False)
        sys.stdout.flush()
    except TorchweldError as error:
        complain(f"torchweld: {error}")
        return 2
    except click.exceptions.Abort:
        complain("torchweld: interrupted")
        return 130
    except click.ClickException as error:
        said = io.StringIO()
        error.show(said)
        complain(said.getvalue().rstrip("\n"))
        return 2
    except BrokenPipeError:  # the reader (head, less) has gone
        _discard_output()
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        complain(f"torchweld: could not write the output: {error.strerror}")
        return 2
    return code if isinstance(code, int) else 0


def _discard_output() -> None:
    """Python would complain again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
