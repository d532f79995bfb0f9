"""What people look at: the map and its picture, the trace, the report."""
