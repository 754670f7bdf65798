"""The background jobs of a server apply, settle and look at what the tests of the op log write."""

import pytest
from sites import Site


@pytest.fixture
def site(site_with_jobs: Site) -> Site:
    return site_with_jobs
