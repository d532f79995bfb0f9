"""The launchers that start ranks: how each is recognised, the variables it sets, and the names of its options.

Sources: the launchers' own documents and code; Open MPI, MPICH, Intel MPI and srun (none, pmi2, pmix, cray_shasta)
run in the tests; Flux's variables were dumped under Flux 0.88; the others are known from reading alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .mpi import ALL_INTERFACES, CRAY, FLUX_PMI, PMI, PMIX

INTERFACE_VARIABLES = {PMI: ("PMI_FD", "PMI_PORT"), PMIX: ("PMIX_NAMESPACE",), CRAY: ("PALS_APINFO",),
                       FLUX_PMI: ("FLUX_PMI_LIBRARY_PATH",)}
# MPICH's and Intel's mpiexec set it, srun --mpi=pmi2 does not; all three set PMI_RANK
HYDRA_VARIABLE = "MPI_LOCALRANKID"
PARASTATION_VARIABLE = "PS_JOB_SIZE"  # set by ParaStation's mpiexec and by srun where psslurm takes slurmd's place
PALS_VARIABLE = "PALS_APINFO"
NODE_COUNTS = ("SLURM_JOB_NUM_NODES", "FLUX_JOB_NNODES")  # the same on all ranks, also of an mpirun inside
LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "JSM_NAMESPACE_LOCAL_SIZE", "PMI_LOCAL_SIZE")


class Launcher(NamedTuple):
    """A launcher of ranks.

    `ranks`, `sizes` and `local_ranks` are the variables that hold a process's rank, the number of ranks, and the number
    of the rank on its node; the first that is set counts. A launcher is recognised by a rank and all of `marks`.
    `own` are the interfaces (discovery/mpi.py) that it offers, `options` the options by which a user asks for them.
    `hides` are the prefixes of its variables that the library of a single process must not see. Through the interfaces
    in `loses_status` MPI_Abort loses the job's exit status.
    The rest is for messages: the `command` that starts ranks, and its options for the number of ranks on a node (with
    {} for it), for a rank's cores, against its own binding, for passing variables on, and for showing each rank all
    GPUs of its node or only its own; empty if it has none.
    """

    name: str
    ranks: tuple[str, ...]
    sizes: tuple[str, ...] = ()
    local_ranks: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    own: frozenset[str] = ALL_INTERFACES
    options: Mapping[str, str] = {}
    hides: tuple[str, ...] = ()
    loses_status: frozenset[str] = frozenset()
    command: str = ""
    ranks_per_node: str = ""
    cores: str = ""
    unbound: str = ""
    export: str = ""
    all_gpus: str = ""
    own_gpu: str = ""


JSRUN = Launcher(
    "jsrun", ("JSM_NAMESPACE_RANK",), ("JSM_NAMESPACE_SIZE",), ("JSM_NAMESPACE_LOCAL_RANK",),  # it sets OMPI_* too
    command="jsrun", ranks_per_node="--tasks_per_rs {}", cores="--cpu_per_rs", unbound="--bind none")
OPEN_MPI = Launcher(
    "Open MPI's mpirun", ("OMPI_COMM_WORLD_RANK",), ("OMPI_COMM_WORLD_SIZE",), ("OMPI_COMM_WORLD_LOCAL_RANK",),
    marks=("OMPI_COMM_WORLD_SIZE",),  # flux run -o mpi=spectrum sets a rank alone
    own=frozenset({PMIX}), command="mpirun", ranks_per_node="--map-by ppr:{}:node", cores="--map-by slot:PE=N",
    unbound="--bind-to none", export="-x NAME")
MPIRUN_RSH = Launcher(
    "mpirun_rsh", ("MPIRUN_RANK",), ("MPIRUN_NPROCS",), ("MV2_COMM_WORLD_LOCAL_RANK",), command="mpirun_rsh",
    unbound="MV2_ENABLE_AFFINITY=0", export="NAME=VALUE")
HYDRA = Launcher(
    "MPICH's or Intel MPI's mpiexec", ("PMI_RANK",), ("PMI_SIZE",), (HYDRA_VARIABLE,), own=frozenset({PMI}),
    command="mpiexec", ranks_per_node="-ppn {}", unbound="-bind-to none", export="-genvall")
PARASTATION = Launcher(
    "ParaStation's mpiexec", ("PMI_RANK", "PMIX_RANK"), (PARASTATION_VARIABLE, "PMI_SIZE"), (HYDRA_VARIABLE,),
    marks=(PARASTATION_VARIABLE,), options={PMIX: "--pmix"}, command="mpiexec")
# A batch script has SLURM_PROCID too; only a step, which srun started, has a numeric SLURM_STEP_ID.
SRUN = Launcher(
    "srun", ("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS",), ("SLURM_LOCALID",),
    options={PMIX: "--mpi=pmix", PMI: "--mpi=pmi2", CRAY: "--mpi=cray_shasta"},
    hides=("SLURM_", "PMI_", "PMIX_", "PALS_", "I_MPI_PMI_LIBRARY"), loses_status=frozenset({PMI}), command="srun",
    ranks_per_node="--ntasks-per-node={}", cores="--cpus-per-task", unbound="--cpu-bind=none", export="--export=ALL",
    all_gpus="--gpu-bind=none", own_gpu="--gpus-per-task=1")
PSSLURM = SRUN._replace(  # it reads this variable, and of --mpi only "none" (psslurm, getPMIType())
    marks=(PARASTATION_VARIABLE,), options={PMIX: "PSSLURM_PMI_TYPE=pmix", PMI: "PSSLURM_PMI_TYPE=pspmi"},
    loses_status=frozenset())
FLUX = Launcher(
    "flux run", ("FLUX_TASK_RANK",), ("FLUX_JOB_SIZE",), ("FLUX_TASK_LOCAL_ID",),
    options={PMIX: "-o pmi=pmix", PMI: "-o pmi=simple", FLUX_PMI: "-o pmi=simple", CRAY: "-o pmi=cray-pals"},
    hides=("FLUX_PMI_", "PMI_", "PMIX_", "PALS_"), loses_status=ALL_INTERFACES,  # the abort cancels the job: 143
    command="flux run", ranks_per_node="--tasks-per-node={}", cores="--cores-per-task", unbound="-o cpu-affinity=off",
    export="--env=NAME", all_gpus="-o gpu-affinity=off", own_gpu="-o gpu-affinity=per-task")
PALS = Launcher(
    "PALS's mpiexec", ("PALS_RANKID",), ("PMI_SIZE",), ("PALS_LOCAL_RANKID",),  # PALS_NRANKS is what a user exports
    options={PMIX: "--pmi=pmix", CRAY: "--pmi=cray"}, hides=("PALS_", "PMI_", "PMIX_"), command="mpiexec",
    ranks_per_node="--ppn {}", cores="--depth", unbound="--cpu-bind none", export="--envall")
APRUN = Launcher("aprun", ("ALPS_APP_PE",), command="aprun", ranks_per_node="-N {}", cores="-d", unbound="-cc none")
PMIX_LAUNCHER = Launcher("a PMIx launcher", ("PMIX_RANK",), ("PMIX_JOB_SIZE",), own=frozenset({PMIX}))
TORCHRUN = Launcher("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",))
LAUNCHERS = (JSRUN, OPEN_MPI, MPIRUN_RSH, HYDRA, PARASTATION, SRUN, FLUX, PALS, APRUN, PMIX_LAUNCHER)


class LaunchFacts(NamedTuple):
    """What started this process: the launcher, the process's rank, and the number of ranks, None if it is not set.

    `offers` are the interfaces by which a library may connect to the launcher. `has_pmi_library` is true if
    I_MPI_PMI_LIBRARY names Slurm's PMI library to Intel MPI. If each task of an `outer` launcher runs a launcher of its
    own, `tasks` is the number of these tasks and `task` the number of the one around this process. `mpi_type` is the
    value of srun's --mpi, empty if it is unknown or another launcher's.
    """

    launcher: Launcher
    rank: int
    size: int | None
    offers: frozenset[str]
    has_pmi_library: bool
    tasks: int = 1
    task: int = 0
    outer: str = ""
    mpi_type: str = ""

    @property
    def command(self) -> str:
        """The launcher's name, with the option for its interface if that is known."""
        return f"{self.launcher.name} --mpi={self.mpi_type}" if self.mpi_type else self.launcher.name

    @property
    def by_srun(self) -> bool:
        """Return whether srun itself started the rank."""
        return self.launcher in (SRUN, PSSLURM)


def read_launch_facts(environ: Mapping[str, str]) -> LaunchFacts | None:
    """Return what started this process, None if no launcher did.

    Inside a task of another launcher, a launcher sets its variables beside the other's: the inner one counts.
    """
    launcher = find_launcher(environ)
    if launcher is None:
        return None
    rank = read_number(environ, launcher.ranks)
    assert rank is not None
    offers = frozenset(kind for kind in launcher.own if any(name in environ for name in INTERFACE_VARIABLES[kind]))
    return LaunchFacts(launcher, rank, read_number(environ, launcher.sizes), offers,
                       "I_MPI_PMI_LIBRARY" in environ, *find_outer_tasks(launcher, environ),
                       environ.get("SLURM_MPI_TYPE", "") if launcher is SRUN else "")


def find_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """Return the launcher of this process.

    A numeric SLURM_STEP_ID means srun, whatever PALS_ variables its plugin cray_shasta has set. Hydra inside a step
    comes before it: only Hydra sets HYDRA_VARIABLE, and if srun offers no interface, PMI_RANK is Hydra's too. Flux
    sets PMI_RANK, PMIX_RANK and PALS_RANKID itself. It passes on no variables of Slurm (flux-framework/flux-core#5237):
    if both are set, a task of Flux has submitted the job of Slurm.
    """
    in_step = environ.get("SLURM_STEP_ID", "").isdigit()
    with_interface = environ.get("SLURM_MPI_TYPE", "none") != "none" or PALS_VARIABLE in environ
    srun = [SRUN] if in_step else []
    flux = [] if "SLURM_JOB_ID" in environ else [FLUX]
    order = [
        JSRUN, OPEN_MPI, *([PSSLURM] if in_step else [PARASTATION]), MPIRUN_RSH,
        *([HYDRA] if HYDRA_VARIABLE in environ else []), *(srun if with_interface else []), *flux, PALS, APRUN, HYDRA,
        *srun,
        PMIX_LAUNCHER, *([TORCHRUN] if "TORCHELASTIC_RUN_ID" in environ else []),
    ]
    return next((launcher for launcher in order if read_number(environ, launcher.ranks) is not None
                 and all(name in environ for name in launcher.marks)), None)


def read_number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    """Return the number in the first of these variables that holds one, None if none does."""
    return next((int(environ[name]) for name in names if environ.get(name, "").isdecimal()), None)


def find_outer_tasks(launcher: Launcher, environ: Mapping[str, str]) -> tuple[int, int, str]:
    """Return the tasks that each run such a launcher: their number, this process's own, and the name of their launcher.

    It is (1, 0, "") if this process's launcher runs in no such task, and in the shell of srun --pty: that is the first
    task's, and the shells of the others end at once, because they have no standard input. The second task counts as the
    first then: a step that a shell has started inherits the variable of --pty.
    """
    for outer in (SRUN, FLUX):
        tasks, task = read_number(environ, outer.sizes), read_number(environ, outer.ranks)
        if tasks is None or task is None or not is_launcher_in_task(launcher, outer, environ):
            continue
        has_terminal = outer is SRUN and "SLURM_PTY_PORT" in environ
        if task or not has_terminal:
            return tasks, task - has_terminal, outer.name
    return 1, 0, ""


def is_launcher_in_task(launcher: Launcher, outer: Launcher, environ: Mapping[str, str]) -> bool:
    """Return whether this rank's mpirun or mpiexec itself runs in the Slurm step or Flux job that this rank is in.

    An mpirun in a Slurm allocation runs outside that step: it makes srun start a daemon on each node, so its ranks are
    in a step of several tasks too. Variables tell the two cases apart. Open MPI's name the rank's daemon, and number 0
    is mpirun itself (PMIX_SERVER_URI2 begins with NAMESPACE.NUMBER). MPICH's mpiexec sets HYDI_CONTROL_FD if it started
    the daemon without srun. Intel's HYDRA_BSTRAP_LAUNCHER says how it started the daemon. No launcher makes Flux start
    its daemons as tasks.
    """
    if launcher not in (OPEN_MPI, HYDRA):
        return False
    if outer is FLUX:
        return "SLURM_JOB_ID" not in environ
    if not environ.get("SLURM_STEP_ID", "").isdigit():
        return False
    if launcher is OPEN_MPI:
        return environ.get("PMIX_SERVER_URI2", "").partition(";")[0].endswith(".0")
    return "HYDI_CONTROL_FD" in environ or environ.get("HYDRA_BSTRAP_LAUNCHER", "slurm") != "slurm"


def count_nodes(environ: Mapping[str, str]) -> int:
    """Return the number of nodes of this process's step, or of its job, as the scheduler has it; 0 if unknown.

    Without a scheduler that says so, the launcher's ranks are divided by those on this node.
    """
    started_by = read_launch_facts(environ)
    if started_by is None:
        return 1
    step = ("SLURM_STEP_NUM_NODES",) if started_by.by_srun else ()
    if (nodes := read_number(environ, (*step, *NODE_COUNTS))) is not None:
        return nodes
    local = read_number(environ, LOCAL_SIZES)
    return -(-started_by.size // local) if started_by.size and local else 0


def is_first_on_node(environ: Mapping[str, str]) -> bool:
    """Return whether this process is the first of the job on its node; True if its launcher sets no local rank."""
    launcher = find_launcher(environ)
    return launcher is None or not read_number(environ, launcher.local_ranks)
