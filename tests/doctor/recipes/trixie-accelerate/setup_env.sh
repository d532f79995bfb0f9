# Sets up the environment of a job.
module load pytorch
