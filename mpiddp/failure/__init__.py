"""Why a job failed: the report, the exception and its origin, the traceback, the root cause."""
