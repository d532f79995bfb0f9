"""A rank gets into its job: MPI, CPU binding, torch, the roll call, the store, the process group."""
