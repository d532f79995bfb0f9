# The settings of a job: CKPT_DIR is where it saves.
export CKPT_DIR=/scratch/project/ckpt
