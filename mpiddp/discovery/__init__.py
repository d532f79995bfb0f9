"""Local discovery: each rank inspects its own host; nothing here decides or changes anything."""
