import pytest
import ranks


@pytest.fixture(scope="session", autouse=True)
def _end_ranks():
    yield
    ranks.close()
