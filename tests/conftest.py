"""Real ranks for tests: processes with a gloo group, started once for each world size and used by many
tests."""

import atexit

import pytest
from ranks import Ranks

_started: dict[int, Ranks] = {}


@pytest.fixture(scope="session")
def ranks():
    """``ranks(n, function, *arguments)`` runs a module-level function on n ranks and returns their
    results."""

    def run(n, function, *arguments):
        if n not in _started or not _started[n].alive:
            _started[n] = Ranks(n)
        return _started[n].run(function, *arguments)

    yield run
    stop()


def stop():
    for pool in _started.values():
        pool.stop()
    _started.clear()


atexit.register(stop)
