"""A rank gets into its job: variables, cores, torch, the roll call, the store, the process group."""
