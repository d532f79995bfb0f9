"""What is so: each rank looks at itself; nothing here decides or changes anything."""
