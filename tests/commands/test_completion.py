"""Completion: bash is asked as a user's TAB asks it; the scripts know every command and option."""

import shutil
import subprocess

import pytest
from tests.commands.flats import invoke
from typer.main import get_command

from measureflow import cli

COMMANDS = get_command(cli.app).commands
BASH = shutil.which("bash")


def script(shell):
    done = invoke("completion", shell)
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_and_option_is_there(shell):
    text = script(shell)
    for name, command in COMMANDS.items():
        assert name in text
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--"):
                    assert (f"-l {option[2:]} " if shell == "fish" else option) in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_can_read_it(shell, tmp_path):
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} on this machine")
    path = tmp_path / "script"
    path.write_text(script(shell), encoding="utf-8")
    subprocess.run([shell, "-n", path], check=True, capture_output=True)


@pytest.mark.skipif(BASH is None, reason="there is no bash on this machine")
def test_bash_completes(tmp_path):
    lines = {
        "fi": "fit",
        "--v": "--version",
        "fit table.csv --tar": "--target",
        "fit table.csv --method D": "DRLE DRE DLE DE",
        "fit table.csv --target ": "",
        "predict model.mf --un": "--unseen",
        "predict --tar": "",
        "reproduce mult": "multimodal",
        "completion z": "zsh",
        "fit ": "",
    }
    asked = [script("bash")]
    for line in lines:
        words = f"measureflow {line}".split(" ")
        quoted = " ".join(f"'{word}'" for word in words)
        asked.append(
            f'COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _measureflow; echo "${{COMPREPLY[*]}}"'
        )
    path = tmp_path / "ask.sh"
    path.write_text("\n".join(asked), encoding="utf-8")
    done = subprocess.run([BASH, path], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert dict(zip(lines, done.stdout.split("\n"), strict=False)) == lines


def test_an_unknown_shell_is_refused():
    refused = invoke("completion", "tcsh")
    assert refused.exit_code == 2
    assert "bash, zsh, fish" in refused.stderr
