"""How fast a rank's devices, memory, disks and links to others are, measured by the ranks themselves."""
