"""Whatever form a script has, it finds what it finds under plain `python`."""

from __future__ import annotations

import json
import py_compile
import shutil
import zipapp
from pathlib import Path

import pytest

from mpiddp.base.config import Script
from mpiddp.discovery.script import read_script_facts
from tests import processes
from tests.messages import message
from tests.support import (
    DEADLINE_S,
    MPICH_FIRST,
    Mpi,
    check,
    first_of,
    mpiexec,
    need,
    single_node_environ,
)

pytestmark = pytest.mark.light

LOOK = """\
import json, sys
sys.stdout.write(json.dumps({
    "argv": sys.argv, "path": [one for one in sys.path if "__editable__" not in one], "name": __name__,
    "file": globals().get("__file__"), "cached": globals().get("__cached__"), "package": __package__,
    "spec": [__spec__.name, __spec__.origin, __spec__.parent] if __spec__ else None,
    "loader": getattr(__loader__, "__name__", type(__loader__).__name__), "doc": __doc__,
    "code": sys._getframe().f_code.co_filename, "input": sys.stdin.read() if sys.argv[-1] == "reads" else "",
    "main": sys.modules["__main__"].__dict__ is globals(),
}, sort_keys=True) + "\\n")
"""
# What `python -m mpiddp` does for the script itself, without a job around it.
RUN_ONLY = ("import os, sys; from mpiddp.cli import read_config; from mpiddp.runner import script; "
            "one = read_config(sys.argv[1:], os.environ).script; script.set_path(one); script.run_main(one)")


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the script in every form."""
    folder = tmp_path_factory.mktemp("forms")
    (folder / "plain.py").write_text(LOOK)
    (folder / "with a space.py").write_text(LOOK)
    (folder / "no_suffix").write_text("#!/usr/bin/env python\n# coding: latin-1\n" + LOOK)
    (folder / "below").mkdir()
    (folder / "below" / "link.py").symlink_to("../plain.py")
    (folder / "link_to_link.py").symlink_to("below/link.py")
    for name in ("application", "package", "package/inner", "space/module_space"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__main__.py").write_text(LOOK)
    for name in ("package", "package/inner"):
        (folder / name / "__init__.py").write_text("")
    for name in ("package/module.py", "package/inner/module.py", "space/module.py"):
        (folder / name).write_text(LOOK)
    shutil.make_archive(str(folder / "library"), "zip", folder, "package")
    zipapp.create_archive(folder / "application", folder / "application.pyz", "/usr/bin/env python")
    py_compile.compile(str(folder / "plain.py"), str(folder / "compiled.pyc"))
    shutil.copy(folder / "compiled.pyc", folder / "compiled_too")
    (folder / "of_bytecode").mkdir()
    shutil.copy(folder / "compiled.pyc", folder / "of_bytecode" / "__main__.pyc")
    shutil.make_archive(str(folder / "bytecode"), "zip", folder / "of_bytecode")
    return folder


FORMS = [
    "plain.py", "./plain.py", "../{name}/plain.py", "below/../plain.py", ".//plain.py", "{folder}/plain.py",
    "with a space.py", "no_suffix", "below/link.py", "link_to_link.py", "compiled.pyc", "compiled_too",
    "application", "./application", "application/", "{folder}/application", "application.pyz",
    "{folder}/application.pyz", "of_bytecode", "bytecode.zip", "-- plain.py", "-m plain", "-m package",
    "-m package.module", "-m package.inner", "-m package.inner.module", "-m space.module", "-m space.module_space",
    "-m application", "-c {code}",
]
ENVIRONMENTS = {"usual": {}, "safe": {"PYTHONSAFEPATH": "1"}, "zip": {"PYTHONPATH": "library.zip"}}


def words(form: str, folder: Path) -> list[str]:
    """Return the words of the command line that name a script in a form, and its arguments."""
    *option, target = form.split(" ", 1) if form[0] == "-" and " " in form else [form]
    return [*option, target.format(name=folder.name, folder=folder, code=LOOK), "-x", "--epochs", "3", "-", "a b"]


def see(mpi: Mpi, command: list[str], folder: Path, text: str = "", env: dict[str, str] | None = None) -> str:
    """Return what Python prints that is started so, with a text as its standard input."""
    (source := folder.parent / f"{folder.name}.input").write_text(text)
    done = processes.run("sh", "-c", f'exec "$@" < {source}', "sh", str(mpi.python), *command, timeout=DEADLINE_S,
                         cwd=folder, env={**single_node_environ(mpi), **(env or {})})
    return check(done).stdout


@pytest.mark.parametrize("kind", first_of(ENVIRONMENTS))
def test_every_form_sees_what_python_shows_it(quick: Mpi, forms: Path, kind: str) -> None:
    """All that differs between the two is in the table that this makes."""
    differ = {}
    for form in FORMS:
        if kind == "usual" or form in ("plain.py", "application", "bytecode.zip", "-m package.module") or (
                kind == "safe" and form.startswith("-c")):
            if kind == "safe" and form.startswith("-m"):
                continue  # the working directory is not on sys.path, so that there is no such module
            command, env = [*words(form, forms), "reads"], ENVIRONMENTS[kind]
            plain = json.loads(see(quick, command, forms, "for the script", env))
            assert plain["main"], form
            ours = json.loads(see(quick, ["-c", RUN_ONLY, *command], forms, "for the script", env))
            if ours != plain:
                differ[form] = {key: (plain[key], ours[key]) for key in plain if ours[key] != plain[key]}
    assert differ == {}


@pytest.mark.parametrize(("mpi", "form"), [
    pytest.param(*one.values, form, marks=one.marks, id=f"{one.id}-{form}") for one in MPICH_FIRST
    for form in ("application.pyz", "application", "compiled.pyc")])
def test_every_rank_runs_it(mpi: Mpi, forms: Path, form: str) -> None:
    need(mpi.missing())
    command = words(form, forms)
    plain = json.loads(see(mpi, command, forms))
    done = check(mpiexec(mpi, 2, "--quiet", *command, cwd=forms))
    ranks = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(ranks) == 2
    for seen in ranks:
        assert {**seen, "path": [], "input": ""} == {**plain, "path": []}
        assert seen["path"][0] == plain["path"][0]


@pytest.mark.parametrize(("arguments", "words"), [
    (["package_of_data"], message("launch/no_main_module", path="package_of_data", kind="directory")),
    (["data.zip"], message("launch/no_main_module", path="data.zip", kind="zip file")),
    (["other.pyc"], "other.pyc: bad magic number in"),
])
def test_what_is_no_script(quick: Mpi, tmp_path: Path, arguments: list[str], words: str) -> None:
    (tmp_path / "package_of_data").mkdir()
    (tmp_path / "package_of_data" / "data").write_text("1")
    shutil.make_archive(str(tmp_path / "data"), "zip", tmp_path / "package_of_data")
    (tmp_path / "other.pyc").write_bytes(b"\x42\x0d\x0d\x0a" + bytes(60))
    done = mpiexec(quick, 2, *arguments, cwd=tmp_path)
    assert done.returncode == 3
    assert done.stderr.count("mpiddp: cannot start: script-") == done.stderr.count(words) == 1, done.stderr


def test_a_script_on_standard_input_is_refused_once(quick: Mpi) -> None:
    done = mpiexec(quick, 2, "-")
    assert done.returncode == 2
    assert done.stderr.count(message("launch/script_on_stdin")) == 1


def test_an_absolute_path_needs_no_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script := tmp_path / "plain.py").write_text("pass")
    (left := tmp_path / "left").mkdir()
    monkeypatch.chdir(left)
    left.rmdir()
    assert read_script_facts(Script(str(script))).error is None
