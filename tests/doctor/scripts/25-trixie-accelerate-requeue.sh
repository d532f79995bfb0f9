#!/bin/bash
# after the shape of: ai4d-iasc/trixie, wiki: Accelerate and requeueing
#SBATCH --partition=TrixieMain
#SBATCH --account=project
#SBATCH --time=12:00:00
#SBATCH --job-name=MNIST.distributed
#SBATCH --gres=gpu:4
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --output=%x-%j.out
#SBATCH --signal=B:USR1@30
#SBATCH --requeue

function _requeue {
   echo "BASH - trapping signal 10 - requeueing $SLURM_JOBID"
   scontrol requeue "$SLURM_JOBID"
}
if [[ -n "$SLURM_JOBID" ]]; then
   trap _requeue USR1
fi

source setup_env.sh
head_node_ip=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
head_node_port=29507

srun accelerate launch \
  --num_processes=$((SLURM_NNODES * 4)) \
  --num_machines="$SLURM_NNODES" \
  --main_process_ip="$head_node_ip" \
  --main_process_port="$head_node_port" \
  --machine_rank="$SLURM_NODEID" \
  my_trainer.py
