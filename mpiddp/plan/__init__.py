"""What shall be so: pure functions from the facts of all ranks to decisions and problems."""
