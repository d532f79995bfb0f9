"""The time limits of agents and ranks, in seconds, and their order."""

from ..failure.root_cause import KILL_SPREAD_S, ROOT_CAUSE_WAIT_S

# The start
LISTEN_TIMEOUT_S = 30.0  # for an agent to listen: its code may have to be loaded from a cold file system
PROBE_HOSTS_TIMEOUT_S = 2.0  # for the job's hosts to answer while a rank waits in MPI_Init
HARD_GRACE_S = 15.0  # after the startup timeout, for ranks to end the job in order
KILL_DELAY_S = 1.0  # between SIGTERM and SIGKILL of a rank that is late
REPORTS_SPREAD_S = 1.0  # for other nodes' agents to print their reports, before the job's step is cancelled

# A failure
PRINT_TIMEOUT_S = 5.0  # for the agent of the rank that failed first to print the report
DECISION_TIMEOUT_S = 8.0  # for the coordinator to select the root cause and have it printed
ANSWER_TIMEOUT_S = 12.0  # for an agent to answer its rank
STACK_TIMEOUT_S = 2.0  # for that rank to print its traceback
OUTPUT_TIMEOUT_S = 1.5  # for output that was written before the report to be shown
SNAPSHOT_TIMEOUT_S = 2.0  # for all ranks to answer where they are
SIGNAL_SPREAD_S = 1.0  # in which a signal reaches all ranks

# The end
CLOSED_TIMEOUT_S = 1.0  # after a rank's connection has closed, until it counts as finished: it may be ending
LATE_AGENTS_TIMEOUT_S = 1.0  # for agents that have not joined yet
FLUSH_TIMEOUT_S = 0.2  # for a rank to flush its files when the job ends
FINAL_EXIT_TIMEOUT_S = 2.0  # after the grace of a rank, until it is killed
DESCENDANTS_TIMEOUT_S = 0.7  # between SIGTERM and SIGKILL of what a rank has left behind
LOST_LAUNCHER_TIMEOUT_S = 1.0  # for the rank to end by the signal that has ended its launcher, or a shell in between
LOST_COORDINATOR_TIMEOUT_S = 2.0  # for the launcher to end a job that has lost rank 0's agent
DEPUTY_TIMEOUT_S = 20.0  # for the deputy to end, whose connection may be lost later: until an agent reports that itself
JOB_OVER_TIMEOUT_S = 5.0  # after all ranks should have ended, until an agent ends without the others
INDEX_TIMEOUT_S = 1.0  # for the file system to take the index of the logs, when all ranks have ended
ABORT_WAIT_S = 30.0  # after the grace, for a rank that can end the job by MPI_Abort: until all others have ended
ABORT_TIMEOUT_S = 2.0  # for a launcher to end the agents after MPI_Abort, which a rank calls within its grace
TASK_TIMEOUT_S = 5.0  # for a file system or a command
SCANCEL_TIMEOUT_S = 15.0  # for Slurm to cancel a step, which goes on when its task is over
FINAL_FLUSH_TIMEOUT_S = 2.0  # for all others to receive the coordinator's last messages
FINAL_OUTPUT_TIMEOUT_S = 2.0  # for a terminal to take the last output, if nobody waits for more
FINAL_TASKS_TIMEOUT_S = 1.0  # for the last tasks, when the agent ends
PMI_TIMEOUT_S = 0.5  # for mpiexec to answer that a rank has finalised PMI
WAITING_LAUNCHER_TIMEOUT_S = 10.0  # for a launcher to end by itself after a job that may have lost a node
PEERS_TIMEOUT_S = 1.0  # for the other agents to end before rank 0's

assert ROOT_CAUSE_WAIT_S + PRINT_TIMEOUT_S < DECISION_TIMEOUT_S
assert DECISION_TIMEOUT_S + STACK_TIMEOUT_S + OUTPUT_TIMEOUT_S < ANSWER_TIMEOUT_S < HARD_GRACE_S
assert STACK_TIMEOUT_S + OUTPUT_TIMEOUT_S < PRINT_TIMEOUT_S
assert FLUSH_TIMEOUT_S < FINAL_EXIT_TIMEOUT_S < JOB_OVER_TIMEOUT_S < ABORT_WAIT_S
assert KILL_SPREAD_S < LOST_COORDINATOR_TIMEOUT_S
assert DESCENDANTS_TIMEOUT_S < JOB_OVER_TIMEOUT_S
