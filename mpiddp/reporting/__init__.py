"""What people look at when a job starts: the start line, the map, and the trace."""
