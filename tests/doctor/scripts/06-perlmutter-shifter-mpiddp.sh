#!/bin/bash
# after the shape of: docs.nersc.gov/machinelearning/launchers; NERSC/dl-at-scale-training:submit_pm.sh
#SBATCH -C gpu
#SBATCH --account=m1234_g
#SBATCH --qos=regular
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=02:00:00
#SBATCH -J vit-era5
#SBATCH -o %x-%j.out
#SBATCH --image=nersc/pytorch:25.02.01
#SBATCH --module=gpu,nccl-plugin

config=${1:-base}
args="--yaml_config=config/ViT.yaml --config=$config"

export FI_MR_CACHE_MONITOR=userfaultfd
export HDF5_USE_FILE_LOCKING=FALSE

set -x
srun -u --cpus-per-task=32 shifter bash -c "
    export NCCL_DEBUG=WARN
    python -m mpiddp --prefix train.py ${args}"
