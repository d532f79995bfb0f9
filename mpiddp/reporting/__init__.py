"""What a job shows at its start: the start line, the map, the trace."""
