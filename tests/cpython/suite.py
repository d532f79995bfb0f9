"""Run a module of CPython's tests, and write each test's result into a file: `suite.py FILE MODULE`.

CPython's own `python -m test` does not run beside torch: it sets __file__ of each module, which some of torch's refuse.
"""

import json
import sys
import traceback
import unittest
from pathlib import Path

OUTCOMES = {
    "startTest": "did not end", "addSuccess": "passed", "addError": "failed", "addFailure": "failed",
    "addSubTest": "failed", "addSkip": "skipped", "addExpectedFailure": "failed as expected",
    "addUnexpectedSuccess": "passed unexpectedly",
}


def recording(file, method, outcome):
    """Return a method of unittest's results that also appends a line to a file: the test, its outcome, and the reason.

    So a crash leaves the results of the tests before it.
    """
    original = getattr(unittest.TextTestResult, method)

    def record(results, test, *details):
        reason = details[-1] if details else ""
        if reason is not None:  # else a subtest has passed
            text = reason if isinstance(reason, str) else "".join(traceback.format_exception(*reason))
            with file.open("a") as lines:
                lines.write(json.dumps([test.id(), outcome, text]) + "\n")
        original(results, test, *details)

    return record


def main():
    """Run the module that the command line names."""
    from test import support

    file, module = Path(sys.argv[1]), sys.argv[2]
    sys.path[0] = str(Path.cwd())
    support.use_resources = []  # neither the network nor large files
    methods = {method: recording(file, method, outcome) for method, outcome in OUTCOMES.items()}
    results = type("Results", (unittest.TextTestResult,), methods)
    unittest.main(None, argv=[sys.argv[0], module], testRunner=unittest.TextTestRunner(resultclass=results))


if __name__ == "__main__":
    main()
