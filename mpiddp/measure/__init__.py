"""How fast a rank's devices, memory, disks and ways to others are, measured by the ranks themselves."""
