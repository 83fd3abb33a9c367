"""tools/make_venv: which interpreter is taken, and what is said when there is none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "make_venv"


@pytest.fixture
def machine(tmp_path):
    """A project folder, and a machine whose path holds just what a test puts into `bin`."""
    project = tmp_path / "project"
    (project / "tools").mkdir(parents=True)
    (project / "tools" / "make_venv").write_text(SCRIPT.read_text())
    (project / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "home").mkdir()
    for name in ("bash", "cat", "cksum", "dirname", "find", "rm", "sort"):
        path = next(Path(folder) / name for folder in ("/bin", "/usr/bin") if (Path(folder) / name).exists())
        (tmp_path / "bin" / name).symlink_to(path)
    return tmp_path


def calls(machine):
    """Every call of a fake interpreter so far, one a line."""
    return (machine / "calls").read_text()


def fake_python(path, version, *, has_venv=True):
    """An interpreter that knows its version and makes environments of itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ok = "true" if tuple(map(int, version.split("."))) >= (3, 12) else "false"
    path.write_text(
        "#!/bin/bash\n"
        'echo "$0 $*" >> "$HOME/../calls"\n'
        'case "$*" in\n'
        f'  *"print("*) echo {version} ;;\n'
        f"  *version_info*) {ok} ;;\n"
        f'  *"import ensurepip"*) {"true" if has_venv else "false"} ;;\n'
        '  "-m venv"*) /bin/mkdir -p "$3/bin"; /bin/cp "$0" "$3/bin/python" ;;\n'
        "esac\n"
    )
    path.chmod(0o755)


def make_venv(machine, **environment):
    env = {"PATH": str(machine / "bin"), "HOME": str(machine / "home"), **environment}
    script = machine / "project" / "tools" / "make_venv"
    return subprocess.run(["/bin/bash", str(script)], env=env, capture_output=True, text=True)


def test_without_an_interpreter_the_message_names_what_was_found(machine):
    fake_python(machine / "bin" / "python3", "3.11.2")
    fake_python(machine / "bin" / "python3.13", "3.13.0", has_venv=False)
    done = make_venv(machine)
    assert done.returncode == 1
    assert "jaxserve needs Python 3.12 or later" in done.stderr
    assert f"{machine}/bin/python3: Python 3.11.2, too old" in done.stderr
    assert f"{machine}/bin/python3.13: Python 3.13.0, without venv and ensurepip" in done.stderr
    assert not (machine / "project" / ".venv").exists()


def test_without_any_python_it_says_so(machine):
    done = make_venv(machine)
    assert done.returncode == 1 and "no Python 3 at all" in done.stderr


def test_the_first_new_enough_name_on_the_path_is_taken(machine):
    fake_python(machine / "bin" / "python3", "3.11.2")
    fake_python(machine / "bin" / "python3.13", "3.13.1")
    fake_python(machine / "bin" / "python3.14", "3.14.0")
    done = make_venv(machine)
    assert done.returncode == 0, done.stderr
    assert f"with {machine}/bin/python3.13 (Python 3.13.1)" in done.stdout


def test_pyenv_versions_are_found_behind_shims_that_refuse(machine):
    shim = machine / "bin" / "python3"
    shim.write_text("#!/bin/bash\necho 'pyenv: version is not installed' >&2\nexit 127\n")
    shim.chmod(0o755)
    fake_python(machine / "home" / ".pyenv" / "versions" / "3.9.18" / "bin" / "python3", "3.9.18")
    fake_python(machine / "home" / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3", "3.12.1")
    done = make_venv(machine)
    assert done.returncode == 0, done.stderr
    assert "versions/3.12.1/bin/python3 (Python 3.12.1)" in done.stdout


def test_an_environment_up_to_date_is_left_alone_and_a_changed_project_is_installed_anew(machine):
    fake_python(machine / "bin" / "python3", "3.12.4")
    assert "installing" in make_venv(machine).stdout
    assert calls(machine).count("pip install") == 1
    assert make_venv(machine).stdout == ""
    assert calls(machine).count("pip install") == 1
    (machine / "project" / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    assert "installing" in make_venv(machine).stdout
    assert calls(machine).count("pip install") == 2


def test_this_interpreter_is_accepted_by_name(machine):
    """The probes run on a real interpreter, up to where the environment would be made."""
    (machine / "project" / ".venv").write_text("in the way: a file, not a folder")
    (machine / "bin" / "rm").unlink()
    done = make_venv(machine, PYTHON=sys.executable)
    version = ".".join(map(str, sys.version_info[:3]))
    assert f"with {os.path.realpath(sys.executable)}" in done.stdout or f"with {sys.executable}" in done.stdout
    assert f"(Python {version})" in done.stdout
