#!/bin/bash
# by an author who did not know the doctor's rules
#PBS -N unet3d
#PBS -P medimg
#PBS -q gpuq
#PBS -l select=2:ncpus=64:ngpus=4:mem=480gb
#PBS -l place=scatter:excl
## 48 hours, that is the limit of gpuq
#PBS -l walltime=48:00
#PBS -j oe
#PBS -m ae

# 2 nodes, 8 GPUs, one MPI process for each GPU.
# mpirun gets the hosts from PBS, so no hostfile here.

source /etc/profile.d/modules.sh
module load openmpi/4.1.6 cuda/12.2 python/3.11
source $HOME/venvs/unet/bin/activate

export NCCL_IB_HCA=mlx5
echo "start: $(date)"
echo "nodes:"; sort -u $PBS_NODEFILE

mpirun --bind-to none \
       -x NCCL_IB_HCA \
       python -m mpiddp --prefix --log-dir logs train.py \
           --data /scratch/medimg/kits23 \
           --epochs 400 \
           --workers 12

echo "end: $(date)"
