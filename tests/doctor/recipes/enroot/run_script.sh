#!/bin/bash
# after the shape of: "PyTorch Distributed Training on Slurm": env.sh -> run_script.sh -> torchrun.sh -> train.py
#SBATCH --job-name=distributed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=4
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out

source env.sh

function get_master_address(){
    NODE_LIST=`scontrol show hostnames $SLURM_JOB_NODELIST`
    MASTER_HOST=`echo $NODE_LIST | awk '{print $1}'`
    MASTER_ADDR=`cat /etc/hosts | grep $MASTER_HOST | awk '{print $1}'`
}
get_master_address
echo MASTER_ADDR:$MASTER_ADDR

if [ -d "$CONTAINER_CACHE_DIR" ] ; then
    echo "container exists"
else
    enroot create -n $CONTAINER_NAME $CONTAINER_IMAGE
fi

srun enroot start --root --rw \
    --mount $HOME:/workspace/mnt \
    $CONTAINER_NAME \
    bash torchrun.sh $MASTER_ADDR
