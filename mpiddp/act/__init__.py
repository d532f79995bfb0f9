"""Make it so: apply one rank's plan."""
