"""Print as JSON what a script can tell of how it was started, workers of every kind included."""

import atexit
import json
import multiprocessing
import pickle
import sys
import threading


class Thing:
    """A class of the script, to be pickled."""

    def __eq__(self, other):
        return type(self) is type(other)

    __hash__ = None


def in_worker(thing):
    """Return what a worker process finds."""
    return [type(thing).__module__, thing == Thing(), sys.argv]


def main():
    """Look and print."""
    seen = {
        "argv": sys.argv, "path0": sys.path[0], "path": [entry for entry in sys.path if "__editable__" not in entry],
        "file": __file__, "name": __name__, "package": __package__ or None,
        "spec": __spec__.name if __spec__ else None, "loader": type(__loader__).__name__,
        "doc": __doc__.split()[0], "main": sys.modules["__main__"].__dict__ is globals(),
        "module": Thing.__module__, "pickle": pickle.loads(pickle.dumps(Thing())) == Thing(),
        "globals": sorted(name for name in globals() if name.startswith("__")),
    }
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            seen[method] = pool.apply(in_worker, (Thing(),))
    print(json.dumps(seen), flush=True)


def still_main():
    """Say whether the script is still the main module."""
    return sys.modules["__main__"].__dict__ is globals() and pickle.loads(pickle.dumps(Thing())) == Thing()


if __name__ == "__main__":
    main()
    atexit.register(lambda: print("atexit", still_main(), flush=True))
    threading.Timer(0.3, lambda: print("thread", still_main(), flush=True)).start()
