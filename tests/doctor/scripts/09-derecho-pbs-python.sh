#!/bin/bash
# after the shape of: negin513/distributed-pytorch-hpc:README.md
#PBS -A ABCD0001
#PBS -N fsdp
#PBS -q main
#PBS -l walltime=00:30:00
#PBS -l select=2:ncpus=64:mpiprocs=4:ngpus=4
#PBS -l job_priority=premium
#PBS -j oe
#PBS -k eod

module load conda
conda activate /glade/u/home/$USER/conda-envs/pytorch
cd $PBS_O_WORKDIR

export LSCRATCH=/glade/derecho/scratch/$USER
export MPICH_GPU_MANAGED_MEMORY_SUPPORT_ENABLED=1
export MPICH_OFI_NIC_POLICY=GPU
export NCCL_SOCKET_IFNAME=hsn
export NCCL_NET="AWS Libfabric"

nodes=( $( cat $PBS_NODEFILE ) )
head_node=${nodes[0]}
export MASTER_ADDR=$(ssh $head_node hostname -i | awk '{print $1}')
export MASTER_PORT=1234

mpiexec -n 8 --ppn 4 --cpu-bind none python ddp.py --epochs 10
