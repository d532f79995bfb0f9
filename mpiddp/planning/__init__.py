"""What shall be so: pure functions from the discovery of all ranks to decisions and problems."""
