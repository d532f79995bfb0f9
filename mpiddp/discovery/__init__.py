"""What is so on this host: each rank looks at itself; nothing here decides or changes anything."""
