"""The command line as a process: exit codes, errors on stderr, interrupts, closed pipes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest

from torchweld.cli import main as command_line
from torchweld.core.errors import NotMeasuredError

PYTHON_M = [sys.executable, "-m", "torchweld"]


@pytest.fixture
def verb(monkeypatch: pytest.MonkeyPatch) -> list[BaseException | int]:
    """A verb `probe` that raises or returns what the test puts into the list."""
    outcome: list[BaseException | int] = []

    @click.command("probe")
    def probe() -> int:
        (result,) = outcome
        if isinstance(result, BaseException):
            raise result
        return result

    commands = {**command_line.cli.commands, "probe": probe}
    monkeypatch.setattr(command_line.cli, "commands", commands)
    return outcome


def test_a_torchweld_error_is_one_line_and_exit_code_2(
    verb: list[BaseException | int], capsys: pytest.CaptureFixture[str]
) -> None:
    verb.append(NotMeasuredError("the machine is busy; try again"))
    assert command_line.run(["probe"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "torchweld: the machine is busy; try again\n")


def test_an_interrupt_is_one_line_and_exit_code_130(
    verb: list[BaseException | int], capsys: pytest.CaptureFixture[str]
) -> None:
    verb.append(KeyboardInterrupt())
    assert command_line.run(["probe"]) == 130
    out, err = capsys.readouterr()
    assert (out, err.strip()) == ("", "torchweld: interrupted")


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_verb_chooses_its_exit_code(verb: list[BaseException | int], code: int) -> None:
    verb.append(code)
    assert command_line.run(["probe"]) == code


def test_an_error_of_our_own_making_is_not_hidden(verb: list[BaseException | int]) -> None:
    verb.append(ZeroDivisionError("a bug"))
    with pytest.raises(ZeroDivisionError):
        command_line.run(["probe"])


def test_an_unknown_verb_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.run(["weld"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "weld" in err


@pytest.mark.parametrize("verb_name", [None, *sorted(command_line.cli.commands)])
def test_help_of_every_verb_has_an_example_and_fits(
    verb_name: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [verb_name] if verb_name else []
    assert command_line.run([*arguments, "--help"]) == 0
    out, _ = capsys.readouterr()
    assert f"torchweld {verb_name or 'info'}" in out.partition("Example")[2]
    assert max(len(line) for line in out.splitlines()) <= 100


def test_every_listed_command_is_a_verb() -> None:
    assert [c.name for c in command_line.COMMANDS] == list(command_line.cli.commands)


def test_the_module_is_the_command() -> None:
    done = subprocess.run([*PYTHON_M, "--version"], capture_output=True, text=True, check=True)
    name, version = done.stdout.split()
    assert name == "torchweld"
    assert version.count(".") == 2
    done = subprocess.run([*PYTHON_M, "weld"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", ["info", "info --json", "--help"])
def test_a_full_disk_behind_stdout_is_said(arguments: str) -> None:
    command = [*PYTHON_M, *arguments.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "torchweld: could not write the output: No space left on device\n"


# One line meets the closed pipe when it is flushed; 2000 fill the pipe and meet it while writing.
@pytest.mark.parametrize("lines", [1, 2000])
def test_a_closed_pipe_is_quiet(lines: int) -> None:
    code = (
        "import click, sys\n"
        "from torchweld.cli import main as m\n"
        "@m.cli.command()\n"
        "def probe():\n"
        "    sys.stdin.read()\n"
        f"    for _ in range({lines}): sys.stdout.write('x' * 1000)\n"
        "m.main(['probe'])\n"
    )
    pipe = subprocess.PIPE
    writer = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, stderr=pipe)
    assert writer.stdin is not None
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    writer.stdin.close()  # only now does it begin to write
    said = writer.stderr.read()
    writer.stderr.close()
    assert (writer.wait(timeout=60), said) == (1, b"")
