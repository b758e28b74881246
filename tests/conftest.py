import pytest
import ranks

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
