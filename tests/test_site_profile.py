"""The site profile: which file counts, its schema, what it sets in a job, and that a bad one never fails a job."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mpiddp.base.config import SITE_PREFIX_FILE, LaunchConfig, Script
from mpiddp.base.errors import LaunchError
from mpiddp.bootstrap.refusal import format_refusal
from mpiddp.bootstrap.site import make_cache_folder
from mpiddp.cli import read_config
from mpiddp.discovery import site_profile
from mpiddp.discovery.site_profile import (
    ProfileError,
    SiteProfile,
    SiteVariable,
    expand,
    expand_folder,
    find_profile,
    load_profile,
    read_profile,
)
from mpiddp.doctor import site as doctor_site
from mpiddp.doctor.__main__ import main as run_doctor
from mpiddp.options.site import find_option_problems
from mpiddp.planning.environment import explain_env
from mpiddp.planning.problems import warn_site
from mpiddp.planning.site import choose_settings, explain_settings, warn_different_variables
from mpiddp.staging.mirror import target_dirs
from mpiddp.where.registry import registry_folder
from tests import processes
from tests.messages import find, message
from tests.support import (
    ROOT,
    Done,
    Mpi,
    check,
    mpiexec,
    mpiexec_command,
    need,
    on_path,
    single_node_environ,
)

pytestmark = pytest.mark.light

HEAD = 'name = "Testbed"\ncontact = "help@example.org"\nlink = "https://example.org/ml"\n'
VARIABLE = '[variables.A_NAME]\nvalue = "1"\nreason = "it has to be"\n'
HARMFUL = VARIABLE.replace("A_NAME", "OWN") + "harmful_if_different = true\n"
PROFILE = SiteProfile("/etc/mpiddp/site.toml", "Testbed", "help@example.org")
PRINTS = "import os; print(*(f'{name}={os.environ.get(name)}' for name in os.environ['SHOWN'].split()))"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Forget the profiles that a test has read."""
    yield
    load_profile.cache_clear()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the path of a profile that only this user can write to."""
    (path := tmp_path / "site.toml").touch(0o644)
    return path


def wrong(file: Path, text: str) -> list[str]:
    """Return what is wrong with a profile."""
    file.write_text(text)
    with pytest.raises(ProfileError) as caught:
        read_profile(str(file))
    assert not any("\n" in problem for problem in caught.value.problems)
    return caught.value.problems


def test_the_named_file_counts_then_the_hosts_then_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts, own = tmp_path / "etc.toml", tmp_path / "share/mpiddp/site.toml"
    monkeypatch.setattr(site_profile, "ETC_FILE", str(hosts))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert find_profile({}) == ""
    own.parent.mkdir(parents=True)
    own.touch()
    assert find_profile({}) == str(own)
    hosts.touch()
    assert find_profile({}) == str(hosts)
    assert find_profile({"MPIDDP_SITE": "/a/b.toml"}) == "/a/b.toml"
    assert find_profile({"MPIDDP_SITE": ""}) == ""


def test_all_keys_are_read(file: Path) -> None:
    file.write_text(HEAD + """
text = "Read the page."
launch_line = "srun python -m mpiddp train.py"
launch_options = ["--network=x", "-C gpu"]
log_folder = "/scratch/$USER/logs"
state_folder = "/project/$USER"
staging_folder = "/local"
caches.TRITON_CACHE_DIR = "/tmp/$USER"
options = {stall = 600, prefix = true, show = "fold", fold-window = 0.5}
variables.NCCL_PROTO = {value = "", reason = "why", harmful_if_different = true}
""")
    assert read_profile(str(file)) == SiteProfile(
        str(file), "Testbed", "help@example.org", "https://example.org/ml", "Read the page.",
        "srun python -m mpiddp train.py", ["--network=x", "-C gpu"], "/scratch/$USER/logs", "/project/$USER", "/local",
        {"TRITON_CACHE_DIR": "/tmp/$USER"}, {"stall": "600", "prefix": "1", "show": "fold", "fold-window": "0.5"},
        {"NCCL_PROTO": SiteVariable("", "why", True)})


def wrong_value(place: str, item: str, value: str, needed: str = "a text in quotes") -> str:
    """Return the message for a value that is wrong."""
    return message("site/wrong_value", place=place, item=item, value=value, needed=needed)


FIRST = "[variables.A_NAME] "
WRONG = [
    (HEAD + "contakt = 'a'\n", [message(
        "site/unknown_key", place="", item="contakt", known=", ".join(SiteProfile._fields[1:]))]),
    (HEAD + "[[check]]\npath = '/a'\n", [message(
        "site/unknown_key", place="", item="check", known=", ".join(SiteProfile._fields[1:]))]),
    (HEAD + VARIABLE + "gpu = 'amd'\n", [message(
        "site/unknown_key", place=FIRST, item="gpu", known="value, reason, harmful_if_different")]),
    (HEAD + "variables.A_NAME = {value = '1'}\n", [message("site/missing_key", place=FIRST, item="reason")]),
    ("name = 'X'\n", [message("site/missing_key", place="", item="contact")]),
    (HEAD + VARIABLE.replace('"1"', "1"), [wrong_value(FIRST, "value", "1")]),
    (HEAD + VARIABLE.replace('"1"', '"1\\u0000"'),
     [wrong_value(FIRST, "value", '"1\\u0000"', "a text without null characters")]),
    (HEAD + VARIABLE + "harmful_if_different = 'yes'\n",
     [wrong_value(FIRST, "harmful_if_different", '"yes"', "true or false")]),
    (HEAD + "launch_options = [1]\n", [wrong_value("", "launch_options", "[1]", "a list of texts")]),
    (HEAD + "caches.X = 1\noptions.stall = [1]\nlaunch_line = 2020-01-01\n", [
        wrong_value("", "launch_line", '"2020-01-01"'), wrong_value("[caches] ", "X", "1"),
        wrong_value("[options] ", "stall", "[1]")]),
    (HEAD + "caches = 1\noptions = 1\nvariables = 1\n",
     [wrong_value("", item, "1", "a table") for item in ("caches", "options", "variables")]),
    (HEAD + "variables.A_NAME = '1'\n", [wrong_value(
        "[variables] ", "A_NAME", '"1"', "a value and a reason, under [variables.A_NAME]")]),
    *((HEAD + VARIABLE.replace("A_NAME", f"'{name}'"), [message("site/unsettable", item=name, why=why)])
      for name, why in (
          ("A NAME", "a variable's name has letters, digits and _"),
          ("LD_LIBRARY_PATH", "it has been read before; set it in the module"),
          ("PYTHONPATH", "it has been read before; set it in the module"),
          ("MPIDDP_STALL", "write the option under [options]"), ("RANK", "mpiddp sets it for each rank"),
          ("MASTER_PORT", "mpiddp sets it for each rank"),
          ("TORCHELASTIC_USE_AGENT_STORE", "mpiddp sets it for each rank"))),
    (HEAD + "log_folder = 'logs'\n", [wrong_value("", "log_folder", '"logs"', "an absolute path")]),
    (HEAD + "caches.A = '~/x'\n", [wrong_value("", "A", '"~/x"', "an absolute path")]),
]


@pytest.mark.parametrize(("text", "problems"), WRONG)
def test_what_is_wrong_is_told_with_its_place_and_what_is_needed(file: Path, text: str, problems: list[str]) -> None:
    assert wrong(file, text) == problems


def test_all_that_is_wrong_is_listed_and_the_first_is_shown_at_a_start(file: Path) -> None:
    problems = wrong(file, "name = 3\n[x]\n")
    assert len(problems) == 3
    shown = load_profile(str(file))
    assert shown.profile is None
    assert shown.problem == f"{file} is not used: " + message(
        "site/more_problems", problem=problems[0], file=file, number=2)


@pytest.mark.parametrize("name", ["RANKS_PER_NODE", "PATHS", "LDX", "PYTHO"])
def test_names_that_only_begin_alike_may_be_set(file: Path, name: str) -> None:
    file.write_text(HEAD + VARIABLE.replace("A_NAME", name))
    assert [*read_profile(str(file)).variables] == [name]


@pytest.mark.parametrize("content", [b"x = [", b"\xff\xfe", b"a = 1\na = 2\n", b"x = " + b"[" * 100_000])
def test_what_is_not_toml_is_one_line(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    problem = load_profile(str(file)).problem
    (fields,) = find("site/not_used", f"mpiddp: warning: site-profile: {problem}", file=file)
    assert find("site/not_toml", fields["problem"])


def test_python_3_10_without_tomli(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(HEAD)

    def import_nothing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", import_nothing)
    assert load_profile(str(file)).problem == f"{file} is not used: " + message("site/no_parser")


@pytest.mark.parametrize(("mode", "is_read"), [(0o644, True), (0o600, True), (0o664, False), (0o646, False)])
def test_a_file_that_others_can_write_is_not_read(file: Path, mode: int, is_read: bool) -> None:
    file.write_text(HEAD)
    file.chmod(mode)
    loaded = load_profile(str(file))
    assert (loaded.profile is not None) == is_read
    assert loaded.problem == ("" if is_read else f"{file} is not used: {message('site/open_file')}")


def test_another_users_file_is_not_read(file: Path) -> None:
    need(["root"] if os.geteuid() else [])
    file.write_text(HEAD)
    os.chown(file, 12345, -1)
    assert load_profile(str(file)).problem == (
        f"{file} is not used: " + message("site/foreign_file", owner="user 12345"))


def test_the_environments_file_may_belong_to_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need(["root"] if os.geteuid() else [])
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    own = tmp_path / SITE_PREFIX_FILE
    own.parent.mkdir(parents=True)
    own.write_text(HEAD)
    own.chmod(0o644)
    for path in (own, own.parent, own.parent.parent, tmp_path):
        os.chown(path, 12345, -1)
    assert load_profile(str(own)) == site_profile.Site(read_profile(str(own)))
    load_profile.cache_clear()
    own.chmod(0o664)
    assert load_profile(str(own)).problem == f"{own} is not used: {message('site/open_file')}"
    load_profile.cache_clear()
    own.chmod(0o644)
    os.chown(own, 12346, -1)
    assert load_profile(str(own)).problem == f"{own} is not used: " + message("site/foreign_file", owner="user 12346")
    os.chown(own, 12345, -1)
    load_profile.cache_clear()
    (other := tmp_path / "other.toml").write_text(HEAD)
    os.chown(other, 12345, -1)
    assert load_profile(str(other)).problem == (
        f"{other} is not used: " + message("site/foreign_file", owner="user 12345"))


def test_what_is_no_regular_file_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    assert load_profile(str(fifo)).problem == f"{fifo} is not used: " + message("site/not_regular")
    for path in (tmp_path, tmp_path / "none"):
        assert load_profile(str(path)).problem.startswith(f"{path} is not used: ")


def test_the_users_own_variables_stay() -> None:
    values = {"A": "2", "SAME": "x", "EMPTY": "x", "PLACE": "/s/$WHO/${WHO}$$", "LOST": "$NOBODY/x"}
    variables = {name: SiteVariable(value, "many") for name, value in values.items()}
    profile = PROFILE._replace(variables={**variables, "OWN": SiteVariable("x", "own", True)},
                               caches={"CACHE": "/tmp/$WHO", "NO_CACHE": "$EMPTY"})
    environ = {"OWN": "y", "SAME": "x", "EMPTY": "", "WHO": "me"}
    settings = choose_settings(profile, environ)
    assert {setting.name: setting.value for setting in settings if setting.is_set} == {
        "A": "2", "PLACE": "/s/me/me$", "CACHE": "/tmp/me"}
    assert [setting.missing for setting in settings if setting.is_cache] == ["", "EMPTY"]
    (warning,) = warn_different_variables(profile, settings)
    assert f"mpiddp: warning: {warning}" == message(
        "site/different_variable", item="OWN", value="y", site="Testbed", needed="x", reason="own")
    lines = explain_settings(profile, settings)
    assert lines["A"] == message("site/explained", item="A", value=2, file=profile.file, reason="many")
    assert lines["OWN"] == message("site/explained_difference", item="OWN", value="y", file=profile.file, other="x",
                                   reason="own")
    assert lines["SAME"] == message("site/explained_same", item="SAME", value="x", file=profile.file)
    assert lines["LOST"] == message("site/explained_missing", item="LOST", file=profile.file, missing="NOBODY")


def test_a_variable_of_the_profile_is_explained_once() -> None:
    text = explain_env({"OMP_NUM_THREADS": "2", "RANK": "0"}, {"RANK": None}, {"OMP_NUM_THREADS": "the site's line"})
    assert text.splitlines() == ["RANK=0  from MPI (rank in the job)", "the site's line"]


@pytest.mark.parametrize(("text", "result"), [
    ("a$$b", ("a$b", "")), ("100$", ("100$", "")), ("^LL128", ("^LL128", "")), ("$A$B", ("", "B")),
    ("$A$C", ("", "C"))])
def test_values_name_other_variables(text: str, result: tuple[str, str]) -> None:
    assert expand(text, {"A": "1", "C": ""}) == result


def test_a_warning_of_some_nodes_names_them() -> None:
    from tests.test_plan import host

    facts = [host(rank)._replace(site_warnings=("all",) + ("some",) * (rank == 1)) for rank in range(2)]
    assert warn_site(facts) == ["all", f"some (on {facts[1].hostname})"]


def config(file: Path, *arguments: str, **environ: str) -> LaunchConfig:
    """Return the configuration of a job with a profile."""
    job = read_config([*arguments, "t.py"], {"MPIDDP_SITE": str(file), **environ})
    assert isinstance(job, LaunchConfig)
    return job


def test_options_come_from_the_command_line_then_variables_then_the_profile(file: Path) -> None:
    file.write_text(HEAD + "[options]\nstall = 600\nallow-idle-gpus = true\nabort-grace = 7\n")
    assert config(file) == LaunchConfig(
        Script("t.py"), stall_s=600, idle_gpus=True, abort_grace_s=7,
        site_options=("--stall=600", "--abort-grace=7", "--allow-idle-gpus=1"))
    assert config(file, "--stall=5").stall_s == 5
    assert config(file, "--stall=5").site_options == ("--abort-grace=7", "--allow-idle-gpus=1")
    assert config(file, MPIDDP_STALL="9").stall_s == 9
    assert config(file, "--stall=5", MPIDDP_STALL="9").stall_s == 5
    assert config(file, MPIDDP_STALL="").stall_s is None
    assert config(file, MPIDDP_ALLOW_IDLE_GPUS="0").idle_gpus is False
    assert read_config(["t.py"], {"MPIDDP_SITE": ""}) == LaunchConfig(Script("t.py"))


def test_options_of_the_profile_that_do_not_go_with_the_users_are_left_out(file: Path) -> None:
    file.write_text(HEAD + "[options]\nshow = 'fold'\nfold-window = 2\nstall = 600\n")
    assert config(file).fold_window_s == 2
    job = config(file, "--show=0")
    assert (job.stall_s, job.site_options) == (600, ("--stall=600",))
    (conflict,) = job.site_conflicts
    assert len(find("site/wrong_option", f"mpiddp: warning: site-profile: f: {conflict}", item="fold-window")) == 1
    with pytest.raises(argparse.ArgumentTypeError, match="--stall-abort"):
        config(file, "--stall-abort", MPIDDP_STALL="")


def test_the_log_folder_is_left_out_without_its_variable(file: Path) -> None:
    file.write_text(HEAD + "log_folder = '$WHO/logs'\n[options]\nstall = 600\n")
    assert config(file, WHO="/me").site_options == ("--stall=600", "--log-dir=/me/logs")
    job = config(file)
    assert (job.log_dir, job.site_options, job.site_conflicts) == ("", ("--stall=600",), ())


@pytest.mark.parametrize(("folder", "problem"), [
    ("/a/$NOBODY", message("site/variable_not_set", item="NOBODY")),
    ("/a/$EMPTY", message("site/variable_not_set", item="EMPTY")),
    ("$PART/b", message("site/folder_not_absolute", folder="a/b")), ("/a/$PART", ""), ("", "")])
def test_a_folder_must_be_absolute_after_its_variables(folder: str, problem: str) -> None:
    path = folder.replace("$PART", "a") * (not problem)
    assert expand_folder(folder, {"PART": "a", "EMPTY": ""}) == (path, problem)


def test_wrong_options_are_left_out_and_named(file: Path) -> None:
    file.write_text(HEAD + "[options]\nstal = 600\nstall = 'x'\ndry-run = true\nbind = 'none'\nquiet = 'maybe'\n")
    assert config(file) == LaunchConfig(Script("t.py"), binding=config(file, "--bind=none").binding,
                                        site_options=("--bind=none",))
    problems = find_option_problems(read_profile(str(file)).options)
    found = [fields for problem in problems
             for fields in find("site/wrong_option", f"mpiddp: warning: site-profile: f: {problem}", file="f")]
    assert [fields["item"] for fields in found] == ["stal", "stall", "dry-run", "quiet"]
    assert found[0]["problem"] == message("site/no_option", hint=" (did you mean stall?)")
    assert found[2]["problem"] == message("site/one_job_option")


def test_folders_of_the_profile(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(HEAD + "log_folder = '/logs/$WHO'\nstate_folder = '/project/$WHO'\n"
                    "staging_folder = '/local/$NOBODY'\n")
    assert config(file, WHO="me").log_dir == "/logs/me"
    assert config(file, "--log-dir=/other", WHO="me").log_dir == "/other"
    assert config(file).log_dir == ""
    assert target_dirs("auto", {"MPIDDP_SITE": str(file), "NOBODY": "x"}) == ["/local/x", "/dev/shm"]
    assert target_dirs("auto", {"MPIDDP_SITE": str(file)}) == ["/dev/shm"]
    for name, value in (("MPIDDP_SITE", str(file)), ("WHO", "me"), ("XDG_STATE_HOME", "/xdg")):
        monkeypatch.setenv(name, value)
    assert registry_folder() == "/xdg/mpiddp"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert registry_folder() == "/project/me/mpiddp"


def test_a_cache_folder_is_the_users_own(tmp_path: Path) -> None:
    assert make_cache_folder(str(tmp_path / "a/b")) == ""
    assert stat.S_IMODE((tmp_path / "a/b").stat().st_mode) == 0o700
    assert make_cache_folder(str(tmp_path / "a/b")) == ""
    assert message("site/folder_not_absolute", folder="it") == make_cache_folder("a/b")
    (tmp_path / "file").touch()
    assert make_cache_folder(str(tmp_path / "file/c")) != ""


def test_a_cache_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    need(["root"] if os.geteuid() else [])
    (folder := tmp_path / "tmp").mkdir()
    folder.chmod(0o1777)
    (folder / "cache").mkdir()
    os.chown(folder / "cache", 12345, -1)
    assert message("launch/entry_of_another_user", user="user 12345") in make_cache_folder(str(folder / "cache"))


@pytest.mark.parametrize("name", ["frontier", "perlmutter", "alps", "lumi", "aurora"])
def test_the_profiles_of_centres_are_right(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They are copied as a centre installs them: an unpacked archive may let the group write to its files."""
    path = tmp_path / f"{name}.toml"
    shutil.copyfile(ROOT / "batch/sites" / path.name, path)
    path.chmod(0o644)
    assert "from public documents, not run there" in " ".join(path.read_text().splitlines()[0:2]).replace("# ", "")
    assert "Source" in path.read_text()
    assert run_doctor(["--site", str(path)]) == 0
    out, err = capfd.readouterr()
    (fields,) = find("site/profile_is_right", out.splitlines()[0])
    assert fields["file"] == str(path)
    assert err == ""
    profile = read_profile(str(path))
    assert profile.contact and profile.link and profile.launch_line
    assert all(name in out for name in (*profile.variables, *profile.caches))
    if name != "aurora":  # there PALS offers PMIx
        assert profile.variables["PMI_MMAP_SYNC_WAIT_TIME"].value == "600"


def test_the_doctor_lists_all_that_is_wrong_with_a_profile(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    problems = wrong(file, HEAD + "[x]\n[y]\n")
    assert doctor_site.main(str(file)) == 1
    assert capfd.readouterr().err.splitlines() == [
        message("site/problem_in_profile", file=file, problem=problem) for problem in problems]
    file.write_text(HEAD + "[options]\nstal = 1\n")
    assert doctor_site.main(str(file)) == 1
    assert message("site/no_option", hint=" (did you mean stall?)") in capfd.readouterr().err
    assert doctor_site.main(f"{file}.x") == 2
    assert capfd.readouterr().err == message("site/no_such_profile", file=f"{file}.x") + "\n"


def test_a_refusal_shows_the_centres_words(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(HEAD + 'text = """Read the page.\nThen ask.\n"""\nlaunch_line = "srun x"\n')
    monkeypatch.setenv("MPIDDP_SITE", str(file))
    error = LaunchError("no-network", actual="a", needed="b", do="c")
    rest = format_refusal(error).removeprefix(f"{error}\n").splitlines()
    assert rest[0] == message("site/refused", site="Testbed", contact="help@example.org", link="https://example.org/ml")
    assert [line.strip() for line in rest[1:]] == ["Read the page.", "Then ask."]
    assert "start with: srun x" in format_refusal(LaunchError("no-pmix", "a", "b", "c"))
    monkeypatch.setenv("MPIDDP_SITE", "")
    assert format_refusal(error) == str(error)


def job(mpi: Mpi, file: Path, ranks: int, *arguments: object, **environ: str) -> Done:
    """Run a job with a profile."""
    return mpiexec(mpi, ranks, *arguments, env={"MPIDDP_SITE": str(file), **environ})


def test_variables_arrive_on_all_ranks_before_mpi_init_and_the_users_own_stay(quick: Mpi, file: Path) -> None:
    """MPICH prints a summary in MPI_Init if MPIR_CVAR_DEBUG_SUMMARY is set then."""
    text = VARIABLE + VARIABLE.replace("A_NAME", "MPIR_CVAR_DEBUG_SUMMARY") + HARMFUL
    file.write_text(HEAD + f"caches.CACHE = '{file.parent}/cache'\noptions.stall = 600\n" + text)
    shown = "MPIR_CVAR_DEBUG_SUMMARY A_NAME OWN CACHE"
    done = check(job(quick, file, 3, "-c", PRINTS, SHOWN=shown, OWN="mine"))
    assert "==== Various sizes and limits ====" in done.stdout + done.stderr
    values = f"MPIR_CVAR_DEBUG_SUMMARY=1 A_NAME=1 OWN=mine CACHE={file.parent}/cache"
    assert [line for line in done.stdout.splitlines() if "A_NAME=" in line] == [values] * 3
    assert (file.parent / "cache").is_dir()
    assert done.stderr.count(message("site/different_variable", item="OWN", value="mine", site="Testbed", needed=1,
                                     reason="it has to be")) == 1
    without = check(mpiexec(quick, 3, "-c", PRINTS, env={"MPIDDP_SITE": "", "SHOWN": shown}))
    assert "==== Various sizes and limits ====" not in without.stdout + without.stderr


def test_explain_tells_reasons_and_sources(quick: Mpi, file: Path) -> None:
    text = VARIABLE + VARIABLE.replace("A_NAME", "OWN") + VARIABLE.replace("A_NAME", "OMP_NUM_THREADS")
    file.write_text(HEAD + text + "[options]\nstall = 600\n")
    lines = check(job(quick, file, 2, "--explain", OWN="mine")).stdout.splitlines()
    reason = {"file": file, "reason": "it has to be"}
    assert message("site/explained", item="A_NAME", value=1, **reason) in lines
    assert message("site/explained_difference", item="OWN", value="mine", other=1, **reason) in lines
    assert [line for line in lines if line.startswith("OMP_NUM_THREADS")] == [
        message("site/explained", item="OMP_NUM_THREADS", value=1, **reason)]
    assert message("site/explained_option", option="--stall=600", file=file) in lines


@pytest.mark.parametrize("kind", ["wrong", "open", "missing"])
def test_a_bad_profile_is_one_warning(quick: Mpi, file: Path, kind: str) -> None:
    file.write_text(HEAD + VARIABLE + "x = 1\n" * (kind == "wrong"))
    file.chmod(0o666 if kind == "open" else 0o644)
    path = Path(f"{file}.x") if kind == "missing" else file
    done = check(job(quick, path, 3, "-c", PRINTS, SHOWN="A_NAME"))
    assert done.stdout == "A_NAME=None\n" * 3
    (fields,) = find("site/not_used", done.stderr, file=path)
    if kind == "open":
        assert fields["problem"] == message("site/open_file")


def test_a_profile_that_one_rank_lacks_is_named(quick: Mpi, file: Path) -> None:
    file.write_text(HEAD + f"log_folder = '{file.parent}/logs'\n")
    need(quick.missing())
    command = mpiexec_command(quick, 1, "-m", "mpiddp", "-c", PRINTS)
    rank = command[command.index("-n") + 2:]
    done = check(processes.run(
        *command, ":", "-n", "1", "env", "MPIDDP_SITE=", *rank, timeout=100, cwd=ROOT,
        env={**single_node_environ(quick), **on_path(ROOT), "MPIDDP_SITE": str(file), "SHOWN": "A"}), 3)
    (fields,) = find("launch/profiles_differ", done.stderr, option="log_dir")
    assert (fields["file"], fields["other_file"]) == (str(file), "none")


def test_what_the_profile_asks_for_in_vain_is_one_warning_each(quick: Mpi, file: Path) -> None:
    file.write_text(HEAD + f"log_folder = '$NOBODY/logs'\ncaches.CACHE = '{file}/x'\n"
                    "options = {stal = 1, show = 'fold', fold-window = 2}\n")
    done = check(job(quick, file, 3, "--show=all", "-c", PRINTS, SHOWN="CACHE"))
    assert done.stdout == "CACHE=None\n" * 3
    assert len(find("site/wrong_option", done.stderr, file=file, item="stal")) == 1
    assert len(find("site/wrong_option", done.stderr, file=file, item="fold-window")) == 1
    assert len(find("site/unusable_log_folder", done.stderr, file=file, problem="$NOBODY is not set")) == 1
    assert len(find("site/unusable_cache", done.stderr, file=file, item="CACHE")) == 1


def test_a_job_that_cannot_start_shows_whom_to_ask(quick: Mpi, file: Path) -> None:
    file.write_text(HEAD + "launch_line = 'mpiexec python -m mpiddp x.py'\n")
    words = message("site/refused", site="Testbed", contact="help@example.org", link="https://example.org/ml")
    for script in ("torchrun", file.parent / "none.py"):  # before MPI_Init, and after
        done = check(job(quick, file, 2, script), 3)
        assert done.stderr.count(words) == 1
        assert ("start with: mpiexec python -m mpiddp x.py" in done.stderr) == (script == "torchrun")


def test_a_program_with_its_own_main_has_the_variables_too(quick: Mpi, file: Path) -> None:
    need(quick.missing())
    file.write_text(HEAD + VARIABLE + HARMFUL)
    code = f"import mpiddp\nwith mpiddp.process_group():\n    {PRINTS.replace('; ', chr(10) + '    ')}\n"
    done = check(processes.run(
        *mpiexec_command(quick, 2, "-c", code), timeout=100, cwd=ROOT,
        env={**single_node_environ(quick), **on_path(ROOT), "MPIDDP_SITE": str(file), "SHOWN": "A_NAME", "OWN": "2"}))
    assert done.stdout == "A_NAME=1\n" * 2
    assert len(find("site/different_variable", done.stderr, item="OWN", value="2")) == 1
