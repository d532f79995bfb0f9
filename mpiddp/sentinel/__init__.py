"""The process beside each rank, and the coordinator of them all: it knows neither MPI nor torch."""
