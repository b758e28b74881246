import os

import pytest
import ranks

#: Wherever torch connects to a store it asks a name server what 127.0.0.1 is called, for its log. One that does not
#: answer would cost 5 s and more each time, in ranks and in all programs that tests start.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

#: Files that measure time or fill the machine: nothing else shall run beside them.
ALONE = {"test_plan_calibrate", "test_ranks", "test_scaling", "test_slow_network", "test_tracing"}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem in ALONE:
            item.add_marker(pytest.mark.alone)


@pytest.fixture(scope="session", autouse=True)
def _end_ranks():
    yield
    ranks.close()
