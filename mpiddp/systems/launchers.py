"""The launchers that start ranks, a row each: their variables, their interfaces to MPI, and their command lines.

Sources: the launchers' own documents and code; Open MPI, MPICH, Intel MPI and srun (none, pmi2, pmix, cray_shasta)
run in the tests; Flux's variables were dumped under Flux 0.88; the others are known from reading alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .directives import FLUX_FLAGS, FLUX_NAMES, SLURM_FLAGS, SLURM_NAMES
from .mpi_libraries import ALL_INTERFACES, CRAY_PMI, FLUX_PMI, MPICH, OPEN_MPI, PMI, PMIX, MpiLibrary
from .schedulers import FLUX, SLURM, Scheduler

Environ = Mapping[str, str]
# MPICH's and Intel's mpiexec set it, srun --mpi=pmi2 does not; all three set PMI_RANK
HYDRA_VARIABLE = "MPI_LOCALRANKID"
PARASTATION_VARIABLE = "PS_JOB_SIZE"  # set by ParaStation's mpiexec and by srun where psslurm takes slurmd's place
PALS_VARIABLE = "PALS_APINFO"
MPI_PROGRAM = r"(?!mpirun_rsh$)(mpirun|mpiexec|orterun|prterun).*"
MPI_COUNTS = ("-n", "-np", "--n", "--np", "-c")
MPI_HOSTFILES = ("-machinefile", "--machinefile", "-hostfile", "--hostfile", "-f")
MPI_NODES = ("-H", "-host", "--host", "-hosts", "--hosts", *MPI_HOSTFILES, "-grr", "-rr")
MPI_VALUES = {
    **dict.fromkeys((
        *MPI_COUNTS, "-x", "--bind-to", "-bind-to", "--map-by", "-map-by", "--rank-by", "-wdir", "--wdir", "-wd",
        "--prefix", "-bootstrap", "-launcher", "-rmk", "-iface", "-genvlist", "-envlist", "-output-filename",
        "--output-filename", "--output", "--tune"), 1),
    **dict.fromkeys(("-mca", "--mca", "--gmca", "-gmca", "--prtemca", "--pmixmca", "-genv", "-env"), 2),
}

# What MPI's launchers call the options of directives.py.
MPI_NAMES = {"d": "cpus-per-task", "depth": "cpus-per-task", "f": "hostfile", "machinefile": "hostfile", "H": "hosts",
             "host": "hosts"}
MPI_FLAGS = frozenset((
    "oversubscribe", "tag-output", "report-bindings", "allow-run-as-root", "display-map", "display-allocation",
    "verbose", "v", "quiet", "q", "nolocal", "genvall", "envall", "envnone", "l", "prepend-rank", "timestamp-output"))
JSRUN_NAMES = {
    "n": "sets", "nrs": "sets", "r": "sets-per-node", "rs_per_host": "sets-per-node", "a": "tasks-per-set",
    "tasks_per_rs": "tasks-per-set", "c": "cpus-per-set", "cpu_per_rs": "cpus-per-set", "g": "gpus-per-set",
    "gpu_per_rs": "gpus-per-set", "p": "ntasks", "np": "ntasks"}


class JobStep(NamedTuple):
    """A job to start: its nodes (none: this machine only), the ranks on each, and its name.

    `variables` are the names of the environment variables that the launcher must pass to the ranks.
    """

    nodes: Sequence[str]
    tasks_per_node: int
    name: str
    variables: Sequence[str]

    @property
    def tasks(self) -> int:
        """Number of ranks."""
        return max(1, len(self.nodes)) * self.tasks_per_node


def always(_: Environ) -> bool:
    """Return true: nothing else is needed."""
    return True


def never(_: Environ) -> bool:
    """Return false: it is not so for this launcher."""
    return False


class Launcher(NamedTuple):
    """A launcher of ranks.

    Detection: `ranks`, `sizes`, `local_ranks`, `local_sizes` and `node_ranks` are the variables that hold a process's
    rank, the number of ranks, the number of the rank on its node, the number of ranks there, and the node's number; the
    first that is set counts. `nodes` hold the number of its nodes. A launcher is recognised by a rank, all of `marks`,
    and if it `fits` the environment. If no launcher is recognised so, a rank is enough for one that fits `alone`.

    Tasks: `is_task` tells whether a process is in a task of this launcher; without it, a launcher that runs in each of
    its tasks is not refused. If it `carries` other launchers' daemons, these are tasks, too, and `in_task` of the inner
    launcher tells the two cases apart (None: it is never looked at). `terminal` is set if the first task alone has a
    terminal. `stdin_option`: of its ranks only the first has a stdin on which something comes, or its end, unless the
    command line of the ranks' parent has this option; empty if others read the end at once, or the same input.

    Interfaces: `own` are those to MPI (mpi_libraries.py) that it offers, `options` the options by which a user asks for
    them; `interface` writes such an option with {} for its value, which the variable `asked` holds, and
    `ask_interfaces` is the command that lists them. If it belongs to a `library`, it starts only that. `hides` are the
    prefixes of its variables that the library of a single process must not see, `hides_always` those of others that no
    rank must see. `pmi_library` must name its PMI library to Intel MPI. `is_step`: its ranks are a step of the job.
    `binds_without_cgroup`: a rank may have fewer CPUs than its cgroup.

    Signals: one that the launcher passes on, or sends to end a job, reaches the process group that it has started; if
    it `signals_all`, every process of a rank. `kill_delay_s` after SIGTERM a rank is best ended, shortly before the
    launcher sends SIGKILL; 0 if that takes long.

    Command line: `command` starts ranks. `program` is a regular expression for the program's name, `path` for its path
    with links resolved, and `version` for the output of --version. `chooses` choose nodes, those in `hostfiles` by a
    file, `counts` set the number of ranks, `per_node` the ranks of each node, and `values` has the number of words that
    follow an option. `step_options` yields the options that start a JobStep; without it `mpiddp.supervise` cannot
    choose nodes. `is_mpiexec`: ':' separates programs, as in the MPI standard; other launchers' short options may be
    joined to their value. It needs an allocation of `system`, or of none. `interrupts` is the number of SIGINTs that
    end a job. `ends_by_quit`: SIGQUIT ends it; others forward SIGQUIT to the ranks. If it waits for ever for its daemon
    on a node that is cut off, `waiting_processes` are the names that its own process may have.

    In job scripts: `names` are its options' names (directives.py) by those that it has for them, `flags` the options
    that take no value, and `verbs` the words that may stand in the place of the command's second one; of these, all but
    the first return before the ranks have ended. If it does not inherit the job's number of cores, `cores_variable`
    gives it the number. `one_core` says what a task gets without a number of cores; `gpus_by_option` is the option
    without which it gets no GPUs.

    Messages: the options for the number of ranks on a node (with {} for it), for a rank's cores, against its own
    binding, for passing variables on, for showing each rank all GPUs of its node or only its own, and for the nodes in
    a file (`on_hosts`, if it may not know the scheduler's); empty if it has none. `tested` says what we saw of it.
    """

    name: str
    ranks: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    local_ranks: tuple[str, ...] = ()
    local_sizes: tuple[str, ...] = ()
    node_ranks: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    fits: Callable[[Environ], bool] = always
    alone: Callable[[Environ], bool] = never

    is_task: Callable[[Environ], bool] | None = None
    carries: bool = False
    in_task: Callable[[Environ], bool] | None = None
    terminal: str = ""
    stdin_option: str = ""

    own: frozenset[str] = ALL_INTERFACES
    options: Mapping[str, str] = {}
    asked: str = ""
    interface: str = ""
    ask_interfaces: tuple[str, ...] = ()
    library: MpiLibrary | None = None
    hides: tuple[str, ...] = ()
    hides_always: tuple[str, ...] = ()
    pmi_library: str = ""
    is_step: bool = False
    binds_without_cgroup: bool = False

    signals_all: bool = False
    kill_delay_s: float = 0.0

    command: str = ""
    program: str = ""
    path: str = ""
    version: str = ""
    counts: tuple[str, ...] = ()
    per_node: tuple[str, ...] = ()
    chooses: tuple[str, ...] = ()
    hostfiles: tuple[str, ...] = ()
    values: Mapping[str, int] = {}
    step_options: Callable[[JobStep], Iterator[str]] | None = None
    is_mpiexec: bool = False
    system: Scheduler | None = None
    interrupts: int = 1
    ends_by_quit: bool = False
    waiting_processes: tuple[str, ...] = ()

    names: Mapping[str, str] = {}
    flags: frozenset[str] = frozenset()
    verbs: tuple[str, ...] = ()
    cores_variable: str = ""
    one_core: str = ""
    gpus_by_option: str = ""

    ranks_per_node: str = ""
    cores: str = ""
    unbound: str = ""
    export: str = ""
    all_gpus: str = ""
    own_gpu: str = ""
    on_hosts: str = ""
    tested: str = "no: from its documents"

    @property
    def interface_option(self) -> str:
        """The name of the option for the interface to MPI, without dashes; empty if it has none."""
        return self.interface.lstrip("-").partition("=")[0].partition(" ")[0]

    @property
    def words(self) -> tuple[str, ...]:
        """The first words of the command."""
        return tuple(self.command.split())


def is_slurm_step(environ: Environ) -> bool:
    """Return whether srun started this process: a batch script has SLURM_PROCID too, but no numeric SLURM_STEP_ID."""
    return environ.get("SLURM_STEP_ID", "").isdigit()


def describe_hang(environ: Environ) -> str:
    """Return what may keep the ranks of a Slurm step in MPI_Init for ever, empty for nothing known.

    A PMIx server sets PMIX_VERSION for its clients. The error: github.com/openpmix/openpmix/issues/3645.
    """
    version = environ.get("PMIX_VERSION", "")
    if not is_slurm_step(environ) or not version.startswith(("5.0.8", "5.0.9")):
        return ""
    return f"PMIx {version} may hang there with a Slurm older than 25.11"


def is_slurm_step_with_interface(environ: Environ) -> bool:
    """Return whether srun started this process and offers it an interface.

    It counts then, whatever PALS_ variables its plugin cray_shasta has set. If srun offers none, PMI_RANK is Hydra's.
    """
    has_interface = environ.get("SLURM_MPI_TYPE", "none") != "none" or PALS_VARIABLE in environ
    return is_slurm_step(environ) and has_interface


def is_outside_slurm(environ: Environ) -> bool:
    """Return whether Flux may have started this process: it passes on no variables of Slurm.

    So if both are set, a task of Flux has submitted the job of Slurm (flux-framework/flux-core#5237).
    """
    return "SLURM_JOB_ID" not in environ


def is_mpirun_in_step(environ: Environ) -> bool:
    """Return whether a rank's Open MPI mpirun itself runs in the Slurm step that the rank is in.

    PMIX_SERVER_URI2 begins with NAMESPACE.NUMBER and names the rank's daemon; number 0 is mpirun itself.
    """
    return environ.get("PMIX_SERVER_URI2", "").partition(";")[0].endswith(".0")


def is_hydra_in_step(environ: Environ) -> bool:
    """Return whether a rank's MPICH or Intel mpiexec itself runs in the Slurm step that the rank is in.

    MPICH's sets HYDI_CONTROL_FD if it started the daemon without srun. Intel's HYDRA_BSTRAP_LAUNCHER says how it
    started the daemon.
    """
    return "HYDI_CONTROL_FD" in environ or environ.get("HYDRA_BSTRAP_LAUNCHER", "slurm") != "slurm"


def srun_options(step: JobStep) -> Iterator[str]:
    """Yield srun's options; with --overlap it does not wait for resources that a lost node still holds."""
    yield from ("--overlap", f"--nodes={len(step.nodes)}", f"--ntasks={step.tasks}",
                f"--nodelist={','.join(step.nodes)}", f"--job-name={step.name}")


def flux_options(step: JobStep) -> Iterator[str]:
    """Yield the options of `flux run`; a constraint may name hosts (RFC 35)."""
    yield from (f"--nodes={len(step.nodes)}", f"--ntasks={step.tasks}", f"--requires=hosts:{','.join(step.nodes)}",
                f"--job-name={step.name}")


def pals_options(step: JobStep) -> Iterator[str]:
    """Yield the options of PALS's mpiexec, which passes all variables to the ranks (--envall is the default)."""
    yield from ("-n", str(step.tasks))
    if step.nodes:
        yield from ("--ppn", str(step.tasks_per_node), "--hosts", ",".join(step.nodes))


def open_mpi_options(step: JobStep) -> Iterator[str]:
    """Yield the options of Open MPI's mpirun, which passes to other nodes the variables that -x names."""
    yield from ("-n", str(step.tasks))
    if step.nodes:
        yield from ("--host", ",".join(f"{node}:{step.tasks_per_node}" for node in step.nodes))
    for name in step.variables:
        yield from ("-x", name)


def hydra_options(step: JobStep) -> Iterator[str]:
    """Yield the options of MPICH's and Intel MPI's mpiexec."""
    yield from ("-n", str(step.tasks))
    if step.nodes:
        yield from ("-hosts", ",".join(step.nodes), "-ppn", str(step.tasks_per_node))


NO_LAUNCHER = Launcher("")
JSRUN = Launcher(
    "jsrun", ("JSM_NAMESPACE_RANK",), ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_LOCAL_RANK",),  # it sets OMPI_* too
    ("JSM_NAMESPACE_LOCAL_SIZE",),
    command="jsrun", program="jsrun", names=JSRUN_NAMES, one_core="jsrun gives each resource set one core",
    gpus_by_option="--gpu_per_rs", ranks_per_node="--tasks_per_rs {}", cores="--cpu_per_rs", unbound="--bind none")
MPIRUN = Launcher(
    "Open MPI's mpirun", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",), marks=("OMPI_COMM_WORLD_SIZE",),  # flux run -o mpi=spectrum sets a rank alone
    in_task=is_mpirun_in_step, own=frozenset({PMIX}), library=OPEN_MPI,
    command="mpirun", program=MPI_PROGRAM, version=r"Open MPI|OpenRTE|PRRTE|open-mpi", counts=MPI_COUNTS,
    per_node=("-N", "-npernode", "--npernode"), chooses=MPI_NODES, hostfiles=MPI_HOSTFILES, values=MPI_VALUES,
    names=MPI_NAMES, flags=MPI_FLAGS, step_options=open_mpi_options, is_mpiexec=True, ends_by_quit=True,
    waiting_processes=("mpirun", "mpiexec", "orterun", "prterun", "mpirun.openmpi", "mpiexec.openmpi"),  # Debian's, too
    kill_delay_s=0.2,  # SIGKILL follows after 0.25 s (5.0) or 1 s (4.1)
    ranks_per_node="--map-by ppr:{}:node", cores="--map-by slot:PE=N", unbound="--bind-to none", export="-x NAME",
    on_hosts="--hostfile {} -x PATH", tested="versions 4.1 and 5")
# A numeric SLURM_STEP_ID means srun where psslurm has taken slurmd's place. It reads the variable in `options`, and of
# --mpi only "none" (psslurm, getPMIType()).
PARASTATION = Launcher(
    "ParaStation's mpiexec", ("PMI_RANK", "PMIX_RANK"), (PARASTATION_VARIABLE, "PMI_SIZE"), (HYDRA_VARIABLE,),
    ("MPI_LOCALNRANKS",), marks=(PARASTATION_VARIABLE,), fits=lambda environ: not is_slurm_step(environ),
    options={PMIX: "--pmix"}, command="mpiexec", program=MPI_PROGRAM)
MPIRUN_RSH = Launcher(
    "mpirun_rsh", ("MPIRUN_RANK",), ("MPIRUN_NPROCS",), ("MV2_COMM_WORLD_LOCAL_RANK",),
    ("MV2_COMM_WORLD_LOCAL_SIZE",), command="mpirun_rsh", program="mpirun_rsh", unbound="MV2_ENABLE_AFFINITY=0",
    export="NAME=VALUE")
HYDRA = Launcher(
    "MPICH's or Intel MPI's mpiexec", ("PMI_RANK",), ("PMI_SIZE",), (HYDRA_VARIABLE,),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    marks=(HYDRA_VARIABLE,), alone=always, in_task=is_hydra_in_step, own=frozenset({PMI}), library=MPICH,
    stdin_option="--stdin",  # Intel's daemon gets it for mpiexec -s
    hides_always=("PMIX_",),  # MPICH gives up if it finds srun's PMIx beside its own mpiexec
    command="mpiexec", program=MPI_PROGRAM, counts=MPI_COUNTS, per_node=("-ppn", "--ppn", "-perhost"),
    chooses=MPI_NODES, hostfiles=MPI_HOSTFILES, values=MPI_VALUES, flags=MPI_FLAGS, step_options=hydra_options,
    is_mpiexec=True, waiting_processes=("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpirun.mpich"),
    signals_all=True,  # it kills by process group alone: what a rank has started would live on in another group
    ranks_per_node="-ppn {}", unbound="-bind-to none", export="-genvall", on_hosts="-f {}",
    tested="MPICH 5, Intel MPI 2021")
SRUN = Launcher(
    "srun", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS",), ("SLURM_LOCALID",), node_ranks=("SLURM_NODEID",),
    nodes=("SLURM_STEP_NUM_NODES",), fits=is_slurm_step_with_interface, alone=is_slurm_step,
    is_task=is_slurm_step, carries=True, terminal="SLURM_PTY_PORT",
    options={PMIX: "--mpi=pmix", PMI: "--mpi=pmi2", CRAY_PMI: "--mpi=cray_shasta"}, asked="SLURM_MPI_TYPE",
    interface="--mpi={}", ask_interfaces=("srun", "--mpi=list"),
    hides=("SLURM_", "PMI_", "PMIX_", "PALS_", "I_MPI_PMI_LIBRARY"),
    pmi_library="I_MPI_PMI_LIBRARY", is_step=True, signals_all=True,
    command="srun", program="srun", counts=("-n", "--ntasks"), per_node=("--ntasks-per-node",),
    chooses=("-N", "--nodes", "-w", "--nodelist", "-x", "--exclude", "-F", "--nodefile"),
    values=dict.fromkeys((
        "-A", "-B", "-C", "-D", "-G", "-J", "-L", "-M", "-S", "-T", "-W", "-a", "-b", "-c", "-d", "-e", "-i", "-m",
        "-o", "-p", "-q", "-r", "-t", "--account", "--chdir", "--comment", "--constraint", "--cpus-per-task",
        "--container-image", "--container-mounts", "--container-name", "--container-workdir", "--distribution",
        "--error", "--gpus", "--gpus-per-node", "--gpus-per-task", "--gres", "--input", "--job-name", "--mem", "--mpi",
        "--output", "--partition", "--qos", "--reservation", "--time"), 1),
    names=SLURM_NAMES, flags=SLURM_FLAGS, cores_variable="SRUN_CPUS_PER_TASK",
    step_options=srun_options, system=SLURM, interrupts=2, ends_by_quit=True,
    ranks_per_node="--ntasks-per-node={}", cores="--cpus-per-task", unbound="--cpu-bind=none", export="--export=ALL",
    all_gpus="--gpu-bind=none", own_gpu="--gpus-per-task=1",
    tested="Slurm 22.05 and 24.11; with cray_shasta, refusals and single tasks")
PSSLURM = SRUN._replace(
    marks=(PARASTATION_VARIABLE,), fits=is_slurm_step, alone=never, is_task=None, terminal="",
    options={PMIX: "PSSLURM_PMI_TYPE=pmix", PMI: "PSSLURM_PMI_TYPE=pspmi"}, asked="", ask_interfaces=(),
    pmi_library="", program="", step_options=None, tested=Launcher("").tested)
FLUX_RUN = Launcher(
    "flux run", ("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",), fits=is_outside_slurm,
    is_task=is_outside_slurm,  # no launcher makes Flux start its daemons as tasks
    options={PMIX: "-o pmi=pmix", PMI: "-o pmi=simple", FLUX_PMI: "-o pmi=simple", CRAY_PMI: "-o pmi=cray-pals"},
    hides=("FLUX_PMI_", "PMI_", "PMIX_", "PALS_"),
    binds_without_cgroup=True,
    command="flux run", program="flux", counts=("-n", "--ntasks"), per_node=("--tasks-per-node",),
    chooses=("-N", "--nodes", "--requires"),
    values=dict.fromkeys((
        "-B", "-S", "-c", "-g", "-o", "-q", "-t", "--add-file", "--bank", "--begin-time", "--cores-per-task", "--cwd",
        "--dependency", "--env", "--env-file", "--env-remove", "--error", "--flags", "--gpus-per-task", "--input",
        "--job-name", "--output", "--queue", "--rlimit", "--setattr", "--setopt", "--signal", "--taskmap",
        "--time-limit", "--urgency"), 1),
    names=FLUX_NAMES, flags=FLUX_FLAGS, verbs=("run", "submit"), one_core="Flux gives each task one core",
    gpus_by_option="--gpus-per-task", step_options=flux_options, system=FLUX, interrupts=2, ends_by_quit=True,
    ranks_per_node="--tasks-per-node={}", cores="--cores-per-task", unbound="-o cpu-affinity=off",
    export="--env=NAME", all_gpus="-o gpu-affinity=off", own_gpu="-o gpu-affinity=per-task",
    tested="version 0.88, by hand; a stand-in for mpiddp.supervise")
# Its command is recognised by HPE's folder, /opt/cray/pals or /opt/cray/pe/pals: its output for --version is unknown.
PALS = Launcher(
    "PALS's mpiexec", ("PALS_RANKID",), ("PMI_SIZE",), ("PALS_LOCAL_RANKID",),  # PALS_NRANKS is what a user exports
    options={PMIX: "--pmi=pmix", CRAY_PMI: "--pmi=cray"}, hides=("PALS_", "PMI_", "PMIX_"),
    command="mpiexec", program=MPI_PROGRAM, path=r"/cray/(\w+/)?pals/", counts=("-n", "-np", "--np"),
    per_node=("-ppn", "--ppn"),
    chooses=("-host", "--host", "-hosts", "--hosts", "-hostlist", "--hostlist", "-f", "-hostfile", "--hostfile",
             "-configfile", "--configfile"),
    hostfiles=("-f", "-hostfile", "--hostfile"),
    values=dict.fromkeys((
        "-d", "-depth", "--depth", "--cpu-bind", "--mem-bind", "-env", "--env", "-envlist", "--envlist", "-wdir",
        "--wdir", "-umask", "--umask", "-path", "--path", "-soft", "--soft", "--pmi", "--rlimits", "--include-tasks",
        "--exclude-tasks", "--procinfo-file"), 1),
    step_options=pals_options, is_mpiexec=True,
    ranks_per_node="--ppn {}", cores="--depth", unbound="--cpu-bind none", export="--envall")
APRUN = Launcher("aprun", ("ALPS_APP_PE",), command="aprun", program="aprun", names={
    "n": "ntasks", "N": "ntasks-per-node", "d": "cpus-per-task"}, ranks_per_node="-N {}", cores="-d",
                 unbound="-cc none")
# TACC's: it runs the site's mpiexec or srun
IBRUN = Launcher("ibrun", command="ibrun", program="ibrun", names={"n": "ntasks"})
PMIX_LAUNCHER = Launcher("a PMIx launcher", ("PMIX_RANK",), ("PMIX_JOB_SIZE",), fits=never, alone=always,
                         own=frozenset({PMIX}))
TORCHRUN = Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), fits=never,
                    alone=lambda environ: "TORCHELASTIC_RUN_ID" in environ)
SRUN_PMIX = f"{SRUN.command} {SRUN.options[PMIX]}"  # in examples
HOLD_RANK, HOLD_SIZE = "_MPIDDP_HOLD_RANK", "_MPIDDP_HOLD_SIZE"
HOLD = Launcher(
    "mpiddp.hold", (HOLD_RANK,), (HOLD_SIZE,), own=frozenset(), tested="with each MPI's launcher",
    hides_always=("PMI_", "PMI2_", "PMIX_", "OMPI_", "PRTE_", "MPI_LOCAL", "HYDRA_", "HYDI_", "MPIEXEC_", "I_MPI_PM"))
# In the order in which they are looked for: a launcher inside a task of another one sets its variables beside those.
LAUNCHERS: tuple[Launcher, ...] = (HOLD, JSRUN, MPIRUN, PSSLURM, PARASTATION, MPIRUN_RSH, HYDRA, SRUN, FLUX_RUN, PALS,
                                   APRUN, IBRUN, PMIX_LAUNCHER, TORCHRUN)


def list_variables(field: str) -> tuple[str, ...]:
    """Return all launchers' variables in a field of Launcher, each once, in the order of LAUNCHERS."""
    return tuple(dict.fromkeys(name for launcher in LAUNCHERS for name in getattr(launcher, field)))


def get_launcher(name: str) -> Launcher:
    """Return the launcher with a name, NO_LAUNCHER if there is none."""
    return next((row for row in LAUNCHERS if row.name == name), NO_LAUNCHER)


def is_command(program: str) -> bool:
    """Return whether a program starts ranks; one that starts them by a subcommand alone may be something else, too."""
    return bool(program) and any(row.command == program for row in LAUNCHERS)


def find_scheduler_launcher(scheduler: Scheduler) -> Launcher | None:
    """Return the launcher that a scheduler comes with, None if it leaves that to an MPI."""
    return next((row for row in LAUNCHERS if row.program and row.system == scheduler), None)


def describe_job_start(scheduler: Scheduler, launcher: Launcher) -> str:
    """Return what starts ranks on all nodes of a scheduler's job: its own launcher, or `launcher` with a hostfile."""
    if own := find_scheduler_launcher(scheduler):
        return own.command
    if not scheduler.hostfile:
        return launcher.command
    before = f", after {scheduler.make_hostfile}" if scheduler.make_hostfile else ""
    return f"{launcher.command} {launcher.on_hosts.format(scheduler.hostfile)}{before}"


def describe_steppers() -> str:
    """Return in words the commands that start ranks on chosen nodes, those of schedulers first."""
    rows = sorted((row for row in LAUNCHERS if row.step_options), key=lambda row: row.system is None)
    *first, last = dict.fromkeys(row.command for row in rows)
    return f"{', '.join(first)} or {last}"
