"""Job scripts in the shapes that people use, and the findings that a supporter gives for each."""
