#!/bin/bash -l
# HPE Cray with Slurm, where srun needs no --mpi for Cray MPICH: sbatch cray.sh
#SBATCH --job-name=mpiddp
#SBATCH --output=%x-%j.out
#SBATCH --time=01:00:00        # edit
#SBATCH --nodes=2              # edit: nodes
#SBATCH --ntasks-per-node=4    # edit: as many as a node has GPUs; an MI250X counts as two
#SBATCH --gpus-per-node=4      # edit
#SBATCH --cpus-per-task=7      # edit: a node's cores, divided by its GPUs
##SBATCH --account=NAME        # other options that your site may require: remove the first #
##SBATCH --partition=NAME
##SBATCH --qos=NAME
##SBATCH --constraint=NAME
##SBATCH --mem=0               # all memory of a node
##SBATCH --mail-type=END,FAIL
##SBATCH --wait-all-nodes=1    # begin when all nodes are ready
##SBATCH --network=disable_rdzv_get  # OLCF: for large jobs that use RCCL much more than MPI, with FI_CXI_RDZV_PROTO=alt_read

# Do once, with these modules loaded, in the environment that has your torch: MPICC="cc -shared" pip install --no-binary=mpi4py mpi4py; pip install . (in a clone of mpiddp)
MODULES=""                           # edit: your site's modules, including aws-ofi-nccl, with which NCCL uses Slingshot (at OLCF rccl-net-plugin); empty for none
ENVIRONMENT=""                       # edit: a venv's PATH/bin/activate, or conda's $HOME/miniforge3/bin/activate NAME; empty for none
COMMAND="python -m mpiddp train.py"  # edit: your script, and its arguments

if [ -n "$MODULES" ]; then module load $MODULES || exit 1; fi  # no purge: the Cray environment itself consists of modules
if [ -n "$ENVIRONMENT" ]; then source $ENVIRONMENT || exit 1; fi
# Some sites recommend these settings: remove the # to use one.
# export MPICH_GPU_SUPPORT_ENABLED=0  # CSCS: MPI on GPUs can deadlock with NCCL; mpiddp sends no GPU data by MPI
# export NCCL_NET="AWS Libfabric"     # CSCS, ALCF: fail instead of using TCP; not for a single node (OLCF)
# export MIOPEN_USER_DB_PATH="/tmp/miopen-$SLURM_JOB_ID" MIOPEN_CUSTOM_CACHE_DIR="/tmp/miopen-$SLURM_JOB_ID"  # OLCF, LUMI: prevents errors on a shared disk
# export TRITON_HOME=/dev/shm CUDA_CACHE_DISABLE=1  # CSCS: prevents many small files on Lustre; not in its Container Engine
export PMI_MMAP_SYNC_WAIT_TIME=600  # ranks that start late: Cray's PMI gives up after 180 s
export SLURM_SRUN_REDUCE_TASK_EXIT_MSG=1 SLURM_STEP_KILLED_MSG_NODE_ID=-1  # fewer lines after mpiddp's report
eval "exec srun --cpus-per-task=$SLURM_CPUS_PER_TASK $COMMAND"
