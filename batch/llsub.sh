#!/bin/bash -l
# MIT SuperCloud: LLsub llsub.sh, or sbatch llsub.sh; in triples mode LLsub ./llsub.sh [2,2,20]
#SBATCH --job-name=mpiddp
#SBATCH --output=%x-%j.out
#SBATCH --nodes=2              # edit: nodes
#SBATCH --ntasks-per-node=2    # edit: as many as a node has GPUs
#SBATCH --gres=gpu:volta:2     # edit: type and number of a node's GPUs
#SBATCH --cpus-per-task=20     # edit: a node's cores, divided by its GPUs
##SBATCH --account=NAME        # other options that your site may require: remove the first #
##SBATCH --partition=NAME
##SBATCH --qos=NAME
##SBATCH --constraint=NAME
##SBATCH --mem=0               # all memory of a node
##SBATCH --mail-type=END,FAIL
##SBATCH --wait-all-nodes=1    # begin when all nodes are ready

# Do once, with these modules loaded, in the environment that has your torch: pip install . (in a clone of mpiddp)
MODULES="anaconda/Python-ML-2025a mpi/openmpi-4.1.8"  # edit
COMMAND="python -m mpiddp train.py"                   # edit: your script, and its arguments

[ "${LLSUB_RANK:-0}" = 0 ] || exit 0  # in triples mode every process runs this script: one of them starts MPI
module purge; module load $MODULES || exit 1  # remove the purge if sbatch comes from a module
eval "exec mpirun $COMMAND"
