"""Why a job failed: the report, the exception and its origin, the traceback, the stack, the root cause."""
